"""Decoding masked diffusion models in order of confidence: one blank per forward (the reference), and the ways to take several.

Blanks are decided block by block, from left to right (Nie et al., 2025, semi-autoregressive remasking). In every forward each blank
of the block draws a token from its law; its confidence is that token's probability under the model's own law, before temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from forerun.choose import entropy_bounded, sure_enough, surest
from forerun.core import BLANK, Canvas, Canvases, Placement, Scope
from forerun.errors import BadOption, unknown
from forerun.registry import method

POLICIES = ("none", "prefix", "dual")


@dataclass(frozen=True)
class Stepwise:
    block: int = field(default=8, metadata={"help": "blanks per block; a block is finished before the next is begun"})
    cache: str = field(
        default="none",
        metadata={"help": "none (exact), prefix (keys before the block are kept), dual (those after it too)"},
    )
    refresh: int = field(default=8, metadata={"help": "with a cache: compute everything anew after so many decided tokens"})

    def __post_init__(self) -> None:
        for name in ("block", "refresh"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadOption(f"{name}={value!r} must be a whole number, 1 or more.")
        if self.cache not in POLICIES:
            raise unknown("cache", self.cache, POLICIES)


@dataclass(frozen=True)
class Steps(Stepwise):
    steps: int = field(default=8, metadata={"help": "forwards per block"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.steps, int) or self.steps < 1:
            raise BadOption(f"steps={self.steps!r} must be a whole number, 1 or more.")


@dataclass(frozen=True)
class Threshold(Stepwise):
    threshold: float = field(
        default=0.9, metadata={"help": "decide every blank at least this confident, and the surest one anyway"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.threshold, int | float) or not 0 <= self.threshold <= 1:
            raise BadOption(f"threshold={self.threshold!r} must lie between 0 and 1.")


@dataclass(frozen=True)
class EntropyBounded(Stepwise):
    bound: float = field(default=0.5, metadata={"help": "nats by which the joint of what is decided at once may be off"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.bound, int | float) or self.bound < 0:
            raise BadOption(f"bound={self.bound!r} must be 0 or more.")


class Walk:
    """Where decoding is: which blanks are open, and what the cache policy trusts."""

    def __init__(self, seq: Canvas, block: int, cache: str, refresh: int):
        self.seq, self.block, self.cache, self.refresh = seq, block, cache, refresh
        self.begun, self.since = -1, 0  # the block that the slots belong to, and tokens decided since they were made

    def number(self, position: int) -> int:
        """The block that a blank belongs to."""
        return int(self.seq.blanks.searchsorted(position)) // self.block

    def open(self, placed: Placement = (), later: int = 0) -> list[int]:
        """Undecided blanks of the first block that has any, were some blanks filled as `placed` says; or of a `later` block."""
        filled = {position for position, _ in placed}
        left = [int(p) for p in self.seq.blanks if self.seq.canvas[p] == BLANK and p not in filled]
        return [p for p in left if self.number(p) == self.number(left[0]) + later]

    @property
    def stale(self) -> bool:
        """Must everything be computed anew? So it is when a block begins, and after every `refresh` tokens of it."""
        return self.number(self.open()[0]) != self.begun or self.since >= self.refresh

    def scope(self) -> Scope:
        """The policy now."""
        if self.cache == "none":
            return Scope()
        number, fresh = self.number(self.open()[0]), self.stale
        if fresh:
            self.begun, self.since = number, 0
        members = self.seq.blanks[number * self.block : (number + 1) * self.block]
        return Scope(self.cache, int(members[0]), int(members[-1]) + 1, fresh)

    def ahead(self) -> int:
        """How many decisions may follow the next one in the same forward: under a cache none beyond the block or the refresh."""
        if self.cache == "none":
            return self.seq.remaining - 1
        return min(len(self.open()), self.refresh if self.stale else self.refresh - self.since) - 1

    def decided(self, count: int) -> None:
        self.since += count


async def decode(seq: Canvas, target: Canvases, walk: Walk, rule: Callable[..., tuple[Tensor, ...]]) -> None:
    """Ask about the open blanks of the block, let the rule say which are decided, until nothing is open."""
    while not seq.done:
        blanks = walk.open()
        [(law, own)] = await target.canvases(seq, [blanks], [()], walk.scope())
        chosen = (await seq.draw(rule, blanks, law, own))[: len(blanks)]
        taken = [(p, x - 1) for p, x in zip(blanks, chosen) if x > 0]  # a rule answers token + 1, or 0 for "not yet"
        seq.fill([p for p, _ in taken], [x for _, x in taken], "decided")
        walk.decided(len(taken))


@method("stepwise", guarantee="exact", reference="stepwise", options=Stepwise)
async def stepwise(seq: Canvas, target: Canvases, block: int, cache: str, refresh: int) -> None:
    """One blank per forward: the surest of the block."""
    await decode(seq, target, Walk(seq, block, cache, refresh), surest(1))


@method(
    "steps", guarantee="approximate", reference="stepwise", options=Steps, reason="several blanks are decided on their own at once"
)
async def steps(seq: Canvas, target: Canvases, block: int, cache: str, refresh: int, steps: int) -> None:
    """A fixed number of forwards per block, each deciding its share of the surest blanks."""
    await decode(seq, target, Walk(seq, block, cache, refresh), surest(-(-min(block, len(seq.blanks)) // steps)))


@method(
    "threshold", guarantee="approximate", reference="stepwise", options=Threshold, reason="all confident blanks are decided at once"
)
async def threshold(seq: Canvas, target: Canvases, block: int, cache: str, refresh: int, threshold: float) -> None:
    """Every blank that is confident enough, and the surest one anyway (Fast-dLLM)."""
    await decode(seq, target, Walk(seq, block, cache, refresh), sure_enough(threshold))


@method(
    "entropy-bounded",
    guarantee="approximate",
    reference="stepwise",
    options=EntropyBounded,
    reason="blanks are decided at once while their joint stays within a bound",
)
async def bounded(seq: Canvas, target: Canvases, block: int, cache: str, refresh: int, bound: float) -> None:
    """As many of the surest blanks as a bound on their joint entropy allows (Ben-Hamu et al., 2025)."""
    await decode(seq, target, Walk(seq, block, cache, refresh), entropy_bounded(bound))
