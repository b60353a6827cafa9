"""Checkpoints: from a name to a network or backbone, and its tokenizer."""
