"""Backbones run rows: `transformers`' own models, one lean decoder for the Llama shape, and a table for certification."""
