"""Constraints: what a text must look like (JSON, a regular expression, a grammar, one of some
choices), and which tokens that leaves at every place"""
