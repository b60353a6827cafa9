"""Two processes that share a network out (FSDP2), stopped in the middle and gone on with by one,
beside one process throughout:

    python bench/shards.py [--publish]     (the table of docs/scale.md)

A small network of random weights, every objective. Weights should differ by rounding only.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from page import DOCS, write_part

from forerun.profile.machine import machine
from forerun.train.data import Corpus
from forerun.train.loop import train
from forerun.train.recipe import Recipe

STEPS = 12
STOPPED = 6
NETWORK = dict(
    model_type="llama",
    vocab_size=4096,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=None,
)
DISTILLED = {"samples": 8, "teacher": "zoo:ar", "temperatures": [0.0]}
OPTIONS = {
    "ar": {},
    "any-subset": {"mask_token": 1},
    "masked": {"mask_token": 1},
    "block": {"mask_token": 1, "sizes": [4, 8]},
    "distil-drafter": {"mask_token": 1, **DISTILLED},
    "distil-block": {"mask_token": 1, "sizes": [4, 8], **DISTILLED},
    "consistency": {"block": 4, "blocks": 4, "sequences": 8, "window": 2},
}
COLUMNS = ("objective", "loss, one process", "two, then one", "weights moved by at most")
COLUMNS += ("and differ by at most",)


def recipe_of(objective: str) -> Recipe:
    return Recipe(
        objective=objective,
        model=NETWORK,
        options=OPTIONS[objective],
        context=32,
        batch=4,
        steps=STEPS,
        warmup=1,
        learning_rate=1e-3,
        validate_every=STEPS,
        save_every=1,
        shard=True,
        recompute=True,
    )


def corpus() -> Corpus:
    rng = np.random.default_rng(0)
    tokens = np.cumsum(rng.integers(1, 4, 9000)) % 4000 + 8
    return Corpus(tokens[:8000], tokens[8000:])


def in_two_processes(folder: Path) -> None:
    """Each trains up to the middle, and keeps its share."""
    for objective in OPTIONS:
        train(recipe_of(objective), corpus(), folder / objective, stop_at=STOPPED)


def started(folder: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    words += ["--master_port", "29541", __file__, "--share", str(folder)]
    subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def farthest(one: dict, other: dict) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def row_of(objective: str, folder: Path) -> str:
    recipe = recipe_of(objective)
    alone = dataclasses.replace(recipe, shard=False, recompute=False)
    losses: list[float] = []

    def report(told: dict) -> None:
        losses.append(told["valid_loss"])

    def trained(recipe: Recipe, name: str, stop_at: int | None = None) -> dict:
        out = folder / name / objective
        return train(recipe, corpus(), out, report=report, stop_at=stop_at).state_dict()

    first = trained(alone, "first", stop_at=1)
    one = trained(alone, "one")
    resumed = trained(recipe, "two")
    moved = farthest(one, first)
    return (
        f"| `{objective}` | {losses[-2]:.5f} | {losses[-1]:.5f} | {moved:.1e} "
        f"| {farthest(one, resumed):.1e} |"
    )


def table() -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        started(Path(name) / "two")
        lines += [row_of(objective, Path(name)) for objective in OPTIONS]
    told = f"{STEPS} steps, stopped after {STOPPED}; {machine()}, gloo."
    return "\n".join([*lines, "", f"`bench/shards.py`: {told}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.share:
        in_two_processes(Path(arguments.share))
        return
    made = table()
    print(made)
    if arguments.publish:
        write_part(DOCS / "scale.md", made, "<!-- shards -->", "<!-- end shards -->")


if __name__ == "__main__":
    main()
