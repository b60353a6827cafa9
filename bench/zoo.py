"""Held-out loss of the shipped weights, as stored, on any corpus:  python bench/zoo.py [DATA [NAME ...]]"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun import zoo
from forerun.train.block import Block
from forerun.train.data import tokenise
from forerun.train.loop import validate
from forerun.train.objectives import make
from forerun.train.recipe import read


@dataclass(frozen=True)
class AsItIs(Block):
    """The block objective, measured with the options that it has."""

    def held_out(self) -> AsItIs:
        return self


def block_sizes(trained: Any) -> list[tuple[str, AsItIs]]:
    """The loss from left to right, and the bound at every block size."""
    same = dict(mask_token=trained.mask_token, rates=trained.rates, whole=0.0)
    sizes = [(f"blocks of {size}", AsItIs(sizes=(size,), ar=0.0, **same)) for size in trained.sizes]
    return [("from left to right", AsItIs(ar=1.0, **same)), *sizes]


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
        if recipe.objective == "block":
            for label, probe in block_sizes(make("block", recipe.options)):
                print(f"  {label}: {validate(network, probe, corpus, recipe, 'cpu', size=128):.3f}")


if __name__ == "__main__":
    main()
