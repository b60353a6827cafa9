"""The engine: everything about batches, caches and order of service, so that methods need to know
none of it."""
