"""How long a forward takes here, by how many tokens run in it: what a method that runs more tokens per forward has to beat."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from forerun.api import Model
from forerun.engine.pack import Batch
from forerun.rows import Plan, causal_rows

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def verdicts(model: Model, lanes: int, held: int, size: int) -> Batch:
    """A forward of `size` tokens in each of some lanes, after `held` that are in slots already, all of them read."""
    plan = Plan(causal_rows(np.arange(held + size) % model.vocab), [np.arange(held, held + size)], held + size)
    return Batch([(lane, plan, held) for lane in range(lanes)], model.host.room, model.backbone.device)


@torch.inference_mode()
def forward_seconds(model: Model, sizes: Sequence[int] = SIZES, held: int = 128, turns: int = 7) -> dict[int, float]:
    """Median seconds of a forward of so many tokens after `held` that are in slots already, all of them read."""
    held = min(held, model.context // 2)
    found: dict[int, list[float]] = {size: [] for size in sizes if held + size <= model.context}
    for turn in range(turns + 1):
        for size in found:
            began = time.perf_counter()
            model.host.runner.forward(verdicts(model, 1, held, size))
            if model.backbone.device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first warms up
                found[size].append(time.perf_counter() - began)
    model.host.memos[0].forget()
    return {size: statistics.median(seconds) for size, seconds in found.items()}


def knee(seconds: dict[int, float], slack: float = 1.25) -> int:
    """The most tokens that ride along: a forward of so many takes at most `slack` times what the fastest one takes."""
    least = min(seconds.values())
    return max(size for size, taken in seconds.items() if taken <= slack * least)


def at(seconds: dict[int, float], size: int) -> float:
    """Seconds for a number of tokens that was not measured, between those that were."""
    known = sorted(seconds)
    return float(np.interp(size, known, [seconds[k] for k in known]))
