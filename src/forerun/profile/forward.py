"""How long a forward takes, against the least it could take here.

A forward must read every weight once, and the keys and values it looks at. It must do two
operations per weight and row. The larger of the two, at the bandwidth and arithmetic measured on
this machine, is its floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch

from forerun.api import Model
from forerun.backbones.lean import LeanBackbone
from forerun.engine.backbone import Backbone
from forerun.engine.host import Work
from forerun.engine.pack import Batch
from forerun.profile.costs import cost_of
from forerun.profile.latency import verdict_batch
from forerun.profile.progress import Progress, no_progress
from forerun.profile.timing import median_seconds, queued_seconds


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do at best."""

    bytes_per_second: float
    flops_per_second: float

    def as_dict(self) -> dict[str, float]:
        return {"bytes/s": self.bytes_per_second, "flop/s": self.flops_per_second}


def ceilings(backbone: Backbone) -> Ceilings:
    """Measured on the backbone's device, in its dtype."""
    device = backbone.device
    return Ceilings(bandwidth(device), arithmetic(device, backbone.dtype))


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy moves, read and written."""
    size = 1 << (30 if device.type == "cuda" else 27)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copies() -> None:
        for _ in range(10):
            target.copy_(source)

    return 20 * size / median_seconds(copies, device, turns=7)


def arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / median_seconds(lambda: a @ b, device, turns=5)


class ForwardSize(NamedTuple):
    batch: int
    context: int  # tokens of each sequence that are in slots already
    tokens: int  # rows of each sequence that run


@dataclass(frozen=True)
class TimedForward:
    """One forward: what it took, and its floor, in seconds."""

    batch: int
    context: int
    tokens: int
    seconds: float
    floor: float

    @property
    def times(self) -> float:
        """How many times its floor it took."""
        return self.seconds / self.floor

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "times": self.times}


@torch.inference_mode()
def forwards(
    model: Model,
    tokens: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    turns: int = 5,
    progress: Progress = no_progress,
) -> tuple[Ceilings, list[TimedForward]]:
    """The machine's ceilings, and every forward that fits the model."""
    best = ceilings(model.backbone)
    sizes = [
        ForwardSize(batch, context, count)
        for context in contexts
        for batch in batches
        for count in tokens
        if context + count <= model.context and batch <= model.engine.lanes
    ]
    timed = []
    for size in sizes:
        batch = verdict_batch(model, size.batch, size.context, size.tokens)
        timed.append(timed_forward(model, batch, size, best, turns))
        progress(len(timed), len(sizes))
    model.host.forget()
    return best, timed


def timed_forward(
    model: Model, batch: Batch, size: ForwardSize, best: Ceilings, turns: int = 5
) -> TimedForward:
    run = partial(model.host.runner.forward, batch)
    if batch.device.type == "cuda":
        seconds = queued_seconds(run, turns)
    else:
        seconds = median_seconds(run, batch.device, turns)
    return TimedForward(*size, seconds, floor_of(model.backbone, batch, best))


def floor_of(backbone: Backbone, batch: Batch, best: Ceilings) -> float:
    """The seconds that a forward takes at least: for reading or for arithmetic, whichever is
    more."""
    work = Work()
    work.add(batch)
    cost = cost_of(backbone, work)
    unread = _looked_up_weights(backbone)
    reading = (cost.bytes - unread * backbone.dtype.itemsize) / best.bytes_per_second
    return max(reading, (cost.flops - 2 * unread * work.rows) / best.flops_per_second)


def _looked_up_weights(backbone: Backbone) -> int:
    """Weights of which only some rows are read: the input embedding, unless the output uses the
    same matrix."""
    if not isinstance(backbone, LeanBackbone):
        return 0
    # a quantised one is a matrix of its own
    return 0 if backbone.tied and backbone.quantize is None else backbone.embed.numel()
