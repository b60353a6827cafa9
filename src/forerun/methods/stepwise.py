"""Decoding masked diffusion models in order of confidence: one blank per forward (the reference), and the ways to take several.

Blanks are decided block by block, from left to right (Nie et al., 2025, semi-autoregressive remasking). In every forward each blank
of the block draws a token from its law; its confidence is that token's probability under the model's own law, before temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forerun.choose import entropy_bounded, sure_enough, surest
from forerun.core import Canvas, Canvases
from forerun.parameters import check_between, check_whole
from forerun.registry import method
from forerun.walk import Blocks, Walk


@dataclass(frozen=True)
class Steps(Blocks):
    steps: int = field(default=8, metadata={"help": "forwards per block"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("steps", self.steps)


@dataclass(frozen=True)
class Threshold(Blocks):
    threshold: float = field(
        default=0.9, metadata={"help": "decide every blank at least this confident, and the surest one anyway"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("threshold", self.threshold)


@dataclass(frozen=True)
class EntropyBounded(Blocks):
    bound: float = field(default=0.5, metadata={"help": "nats by which the joint of what is decided at once may be off"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("bound", self.bound, most=math.inf)


async def decode(seq: Canvas, target: Canvases, walk: Walk, rule: Callable[..., tuple[Tensor, ...]]) -> None:
    """Ask about the open blanks of the block, let the rule say which are decided, until nothing is open."""
    while not seq.done:
        blanks = walk.open()
        [(law, own)] = await walk.ask(target, [blanks], [()])
        decided = taken(blanks, await seq.draw(rule, blanks, law, own))
        seq.decide(decided, "decided")
        walk.decided(len(decided))


def taken(positions: Sequence[int], chosen: Sequence[int]) -> list[tuple[int, int]]:
    """What a rule decides, (position, token): it answers token + 1 for each position, or 0 for "not yet", and perhaps padding."""
    return [(p, x - 1) for p, x in zip(positions, chosen) if x > 0]


@method("stepwise", guarantee="exact", reference="stepwise", options=Blocks)
async def stepwise(seq: Canvas, target: Canvases, **blocks: Any) -> None:
    """One blank per forward: the surest of the block."""
    await decode(seq, target, Walk(seq, **blocks), surest(1))


@method(
    "steps", guarantee="approximate", reference="stepwise", options=Steps, reason="several blanks are decided on their own at once"
)
async def steps(seq: Canvas, target: Canvases, steps: int, **blocks: Any) -> None:
    """A fixed number of forwards per block, each deciding its share of the surest blanks."""
    walk = Walk(seq, **blocks)
    await decode(seq, target, walk, surest(-(-min(walk.block, len(seq.blanks)) // steps)))


@method(
    "threshold", guarantee="approximate", reference="stepwise", options=Threshold, reason="all confident blanks are decided at once"
)
async def threshold(seq: Canvas, target: Canvases, threshold: float, **blocks: Any) -> None:
    """Every blank that is confident enough, and the surest one anyway (Fast-dLLM)."""
    await decode(seq, target, Walk(seq, **blocks), sure_enough(threshold))


@method(
    "entropy-bounded",
    guarantee="approximate",
    reference="stepwise",
    options=EntropyBounded,
    reason="blanks are decided at once while their joint stays within a bound",
)
async def bounded(seq: Canvas, target: Canvases, bound: float, **blocks: Any) -> None:
    """As many of the surest blanks as a bound on their joint entropy allows (Ben-Hamu et al., 2025)."""
    await decode(seq, target, Walk(seq, **blocks), entropy_bounded(bound))
