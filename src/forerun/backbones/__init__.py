"""Backbones run rows: `transformers`' own models, one lean decoder for the Llama shape, XLNet, the
diffusion transformer, and a table for certification. `engine/backbone.py` is their contract."""
