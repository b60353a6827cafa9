"""Checkpoints: from a name to a family, a backbone and a tokenizer."""
