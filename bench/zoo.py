"""Held-out loss of the shipped weights, as stored, on any corpus:

python bench/zoo.py [DATA [NAME ...]]
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forerun import zoo
from forerun.train.block import BlockObjective
from forerun.train.data import tokenise
from forerun.train.objectives import make_objective
from forerun.train.recipe import read
from forerun.train.validation import held_out_loss

WINDOWS = 128


@dataclass(frozen=True)
class BlockProbe(BlockObjective):
    """The block objective, measured with the options that it has."""

    def held_out(self) -> BlockProbe:
        return self


def block_probes(trained: BlockObjective) -> dict[str, BlockProbe]:
    """The loss from left to right, and the bound at every block size."""
    common = BlockProbe(mask_token=trained.mask_token, rates=trained.rates, whole=0.0)
    probes = {"from left to right": replace(common, ar=1.0)}
    for size in trained.sizes:
        probes[f"blocks of {size}"] = replace(common, sizes=(size,), ar=0.0)
    return probes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "data",
        nargs="?",
        help="a folder of .py files or a .jsonl[.xz] file; default: what is installed",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all that are shipped")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = tokenise(arguments.data, zoo.tokenizer(), Path(folder) / "tokens.npz")
    for name in arguments.names or zoo.shipped():
        network, _ = zoo.load(name, torch.float32, "cpu")
        recipe = read(zoo.recipe(name))
        objective = make_objective(recipe.objective, recipe.options)
        loss = held_out_loss(network, objective, corpus, recipe, WINDOWS)
        size = sum(p.numel() for p in network.parameters()) / 1e6
        print(f"zoo:{name}: {size:.2f} M parameters, held-out loss {loss:.3f} nats per token")
        if isinstance(objective, BlockObjective):
            for label, probe in block_probes(objective).items():
                bound = held_out_loss(network, probe, corpus, recipe, WINDOWS)
                print(f"  {label}: {bound:.3f}")


if __name__ == "__main__":
    main()
