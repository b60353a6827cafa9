"""Families turn text into rows: pure functions, one file per kind of language model."""
