"""Kinds of models: how each turns a sequence with blanks into rows, and what one may ask it."""
