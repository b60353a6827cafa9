"""How long a forward takes here, by how many tokens run in it: what a method that runs more tokens
per forward has to beat."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from forerun.api import Model
from forerun.engine.pack import Batch
from forerun.sequence.rows import Plan, causal_rows

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def verdict_batch(model: Model, lanes: int, held: int, size: int) -> Batch:
    """A forward of `size` tokens in each of some lanes, after `held` tokens in slots. All rows are
    read."""
    rows = causal_rows(np.arange(held + size) % model.vocab)
    plan = Plan(rows, [np.arange(held, held + size)], held + size)
    return model.host.batch([(lane, plan, held) for lane in range(lanes)])


@torch.inference_mode()
def forward_seconds(
    model: Model, sizes: Sequence[int] = SIZES, held: int = 128, turns: int = 7
) -> dict[int, float]:
    """Median seconds of a forward by its tokens, after `held` tokens in slots."""
    held = min(held, model.context // 2)
    times: dict[int, list[float]] = {size: [] for size in sizes if held + size <= model.context}
    for turn in range(turns + 1):
        for size, seconds in times.items():
            began = time.perf_counter()
            model.host.runner.forward(verdict_batch(model, 1, held, size))
            if model.backbone.device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first warms up
                seconds.append(time.perf_counter() - began)
    model.host.forget()
    return {size: statistics.median(seconds) for size, seconds in times.items()}


def knee(seconds: Mapping[int, float], slack: float = 1.25) -> int:
    """The most tokens that ride along: a forward of so many takes at most `slack` times what the
    fastest one takes."""
    least = min(seconds.values())
    return max(size for size, taken in seconds.items() if taken <= slack * least)


def seconds_at(seconds: Mapping[int, float], size: int) -> float:
    """Seconds for a number of tokens that was not measured, between those that were."""
    known = sorted(seconds)
    return float(np.interp(size, known, [seconds[k] for k in known]))
