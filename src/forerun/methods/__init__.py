"""Decoding methods: one file per algorithm box, ordinary code for one sequence."""
