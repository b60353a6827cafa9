"""Held-out loss of the shipped weights, as stored, on any corpus:  python bench/zoo.py [DATA [NAME ...]]"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from forerun import zoo
from forerun.train.data import tokenise
from forerun.train.loop import validate
from forerun.train.objectives import make
from forerun.train.recipe import read


def main() -> None:
    source = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        corpus = tokenise(source, zoo.tokenizer(), Path(folder) / "tokens.npz")
    for name in sys.argv[2:] or zoo.shipped():
        network, _ = zoo.load(name, torch.float32, "cpu")
        recipe = read(zoo.recipe(name))
        loss = validate(network, make(recipe.objective, recipe.options), corpus, recipe, "cpu", size=128)
        size = sum(p.numel() for p in network.parameters()) / 1e6
        print(f"zoo:{name}: {size:.2f} M parameters, held-out loss {loss:.3f} nats per token")


if __name__ == "__main__":
    main()
