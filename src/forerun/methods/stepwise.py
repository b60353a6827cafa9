"""Decoding masked diffusion models in order of confidence: one blank per forward (the reference),
and the ways to take several.

Blanks are decided block by block, from left to right (Nie et al., 2025, semi-autoregressive
remasking). In every forward each blank of the block draws a token from its law; its confidence is
that token's probability under the model's own law, before temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from forerun.families.masked import CanvasFiller
from forerun.methods.block_order import (
    BlockOrder,
    CanvasBlockOptions,
    CanvasBlockOrder,
    OrderedBlockOptions,
    StepShares,
    stale_keys,
)
from forerun.options import check_between, check_whole
from forerun.probability.selection import (
    SelectionRule,
    above_threshold,
    entropy_bounded,
    most_confident,
)
from forerun.registry import method
from forerun.sequence.canvas import Canvas


@dataclass(frozen=True)
class StepsOptions(OrderedBlockOptions):
    steps: int = field(default=8, metadata={"help": "forwards per block"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("steps", self.steps)


@dataclass(frozen=True)
class ThresholdOptions(CanvasBlockOptions):
    threshold: float = field(
        default=0.9,
        metadata={"help": "decide every blank at least this confident, and the surest one anyway"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("threshold", self.threshold)


@dataclass(frozen=True)
class EntropyBoundedOptions(CanvasBlockOptions):
    bound: float = field(
        default=0.5,
        metadata={"help": "nats by which the joint of what is decided at once may be off"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("bound", self.bound, most=math.inf)


async def decode(
    seq: Canvas, order: BlockOrder, rule_for: Callable[[list[int]], SelectionRule]
) -> None:
    """Ask about the open blanks of the block, let a rule say which are decided, until nothing is
    open."""
    while not seq.done:
        blanks = order.open()
        rule = rule_for(blanks)
        [answer] = await order.ask([blanks], [()])
        selection = await seq.draw(rule, blanks, answer.law, answer.model_law)
        order.decided(seq.place(selection.placements(blanks), "decided"))


@method("stepwise", guarantee="exact", reference="stepwise", departs=stale_keys)
async def stepwise(seq: Canvas, target: CanvasFiller, options: OrderedBlockOptions) -> None:
    """One blank per forward: the most confident of the block."""
    rule = most_confident(1, options.order)
    await decode(seq, CanvasBlockOrder(seq, target, options), lambda blanks: rule)


@method(
    "steps",
    guarantee="approximate",
    reference="stepwise",
    reason="several blanks are decided on their own at once",
    departs=stale_keys,
)
async def steps(seq: Canvas, target: CanvasFiller, options: StepsOptions) -> None:
    """A fixed number of forwards per block, each deciding its share of the most confident
    blanks."""
    order = CanvasBlockOrder(seq, target, options)
    shares = StepShares(options.steps)

    def rule_for(blanks: list[int]) -> SelectionRule:
        share = shares.next(order.number(blanks[0]), len(blanks))
        return most_confident(share, options.order)

    await decode(seq, order, rule_for)


@method(
    "threshold",
    guarantee="approximate",
    reference="stepwise",
    reason="all confident blanks are decided at once",
    departs=stale_keys,
)
async def threshold(seq: Canvas, target: CanvasFiller, options: ThresholdOptions) -> None:
    """Every blank that is confident enough, and the most confident one anyway (Fast-dLLM)."""
    order = CanvasBlockOrder(seq, target, options)
    rule = above_threshold(options.threshold)
    await decode(seq, order, lambda blanks: rule)


@method(
    "entropy-bounded",
    guarantee="approximate",
    reference="stepwise",
    reason="blanks are decided at once while their joint stays within a bound",
    departs=stale_keys,
)
async def bounded(seq: Canvas, target: CanvasFiller, options: EntropyBoundedOptions) -> None:
    """As many of the most confident blanks as a bound on their joint entropy allows (Ben-Hamu et
    al., 2025)."""
    order = CanvasBlockOrder(seq, target, options)
    rule = entropy_bounded(options.bound)
    await decode(seq, order, lambda blanks: rule)
