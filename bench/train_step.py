"""One training step of a large shape on one GPU: seconds and memory, from which `docs/scale.md`
calculates what a run takes:

    python bench/train_step.py --shape qwen2.5-7b --json steps.json

Weights are random and in bfloat16, so that they fit beside their gradients; layers run again on the
way back. Forward and way back are timed, without the optimiser. The drafter's step is whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from forerun.profile.machine import machine
from forerun.profile.shapes import SHAPES, random_network
from forerun.train.block import BlockObjective
from forerun.train.consistency import ConsistencyObjective, TrajectoryBatch
from forerun.train.drafter import DrafterRecipe, DrafterRun, read_recipe, shape_of
from forerun.train.frozen import FrozenTarget
from forerun.train.own_text import ANSWER, BEGINS, GREEDY, OwnText
from forerun.train.shards import recompute

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"
CONTEXT = 1024
BLOCK = 32
BLOCKS = 16


def consistency(vocab: int, share: int):
    """512 tokens given, 16 blocks of 32 beside them, and as much real text."""
    rng = np.random.default_rng(0)
    objective = ConsistencyObjective(block=BLOCK, blocks=BLOCKS, window=8)
    guesses = BLOCK * BLOCKS
    states = rng.integers(0, vocab, (share, BLOCK + 1, guesses))
    noisy = np.tile(np.arange(BLOCK, -1, -1)[None, :, None], (share, 1, BLOCKS))
    batch = TrajectoryBatch(
        rng.integers(0, vocab, (share, CONTEXT)),
        rng.integers(0, vocab, (share, CONTEXT - guesses)),
        states,
        noisy,
    )
    return objective, objective.prepare(batch, rng, 0)


def block(vocab: int, share: int):
    rng = np.random.default_rng(0)
    objective = BlockObjective(mask_token=vocab - 1, sizes=(BLOCK,), shifted=True)
    tokens = torch.from_numpy(rng.integers(0, vocab - 1, (share, CONTEXT)))
    return objective, objective.prepare(tokens, rng, 0)


def drafter_run(network, recipe: DrafterRecipe, folder: Path) -> DrafterRun:
    """A drafter of the recipe that learns from texts as long as the recipe's, of random tokens."""
    config = network.config
    rng = np.random.default_rng(0)
    longest = recipe.text.longest
    texts = 4 * recipe.batch
    tokens = rng.integers(0, config.vocab_size, texts * longest).astype(np.int32)
    marks = np.full(len(tokens), ANSWER | GREEDY, np.uint8)
    marks[::longest] = BEGINS | GREEDY
    chosen = replace(recipe, mask_token=config.vocab_size - 1)
    shape = shape_of(chosen, network, None)
    target = FrozenTarget(network, longest)
    return DrafterRun(chosen, shape, target, OwnText(tokens, marks), folder, lambda line: None)


def drafter(network, recipe: DrafterRecipe, turns: int) -> dict:
    """Seconds and memory of one whole step."""
    network.zero_grad(set_to_none=True)
    with tempfile.TemporaryDirectory() as folder:
        run = drafter_run(network, recipe, Path(folder))

        def step() -> None:
            blocks = run.texts.batch(0, recipe.batch, recipe.anchors, run.shape.block)
            run.loss(blocks).backward()
            run.optimiser.step()
            run.optimiser.zero_grad(set_to_none=True)

        return measured(step, turns)


def measured(step, turns: int) -> dict:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(step, turns)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return {"seconds": seconds, "peak GiB": peak}


def timed(step, turns: int) -> float:
    seconds = []
    for turn in range(turns + 1):
        began = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if turn:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--share", type=int, default=4, help="sequences of a forward")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    network = random_network(arguments.shape, device, kind).train()
    recompute(network)
    vocab = SHAPES[arguments.shape].vocab
    found = {"shape": arguments.shape, "share": arguments.share, "machine": machine()}

    def keep(name: str, told: dict) -> None:
        """What was measured is kept, whatever comes after it."""
        found[name] = told
        print(name, told, flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")

    for name, make in (("consistency", consistency), ("block", block)):
        objective, batch = make(vocab, arguments.share)
        batch = [tensor.to(device) for tensor in batch]

        def step(objective=objective, batch=batch) -> None:
            objective.loss(network, *batch).backward()
            network.zero_grad(set_to_none=False)

        keep(name, measured(step, arguments.turns))
    tokens = torch.randint(0, vocab, (arguments.share, CONTEXT), device=device)

    @torch.no_grad()
    def read() -> None:
        network(tokens, use_cache=False, logits_to_keep=1)

    seconds = timed(read, arguments.turns)
    keep("target forward", {"seconds": seconds, "tokens": CONTEXT * arguments.share})
    recipe = read_recipe(str(RECIPES / "7b-drafter.yaml"))
    if device.type == "cpu":  # only to try it
        recipe = replace(recipe, batch=1, anchors=8)
    keep("drafter", drafter(network, recipe, arguments.turns))


if __name__ == "__main__":
    main()
