"""What a caller asks: the decode request, its prompt or text with holes, its way through the
engine, and its result."""
