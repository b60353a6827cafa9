"""Where the decoding of a canvas is: which blanks are open, block by block, and what a cache policy trusts by now. Methods for
masked models walk; none of them knows a cache."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from forerun.core import BLANK, Canvas, Canvases, Placement, Scope
from forerun.errors import unknown
from forerun.parameters import check_whole

POLICIES = ("none", "prefix", "dual")


@dataclass(frozen=True)
class Blocks:
    """The options of every method that walks."""

    block: int = field(default=8, metadata={"help": "blanks per block; a block is finished before the next is begun"})
    cache: str = field(
        default="none",
        metadata={"help": "none (exact), prefix (keys before the block are kept), dual (those after it too)"},
    )
    refresh: int = field(default=8, metadata={"help": "with a cache: compute everything anew after so many decided tokens"})

    def __post_init__(self) -> None:
        check_whole("block", self.block)
        check_whole("refresh", self.refresh)
        if self.cache not in POLICIES:
            raise unknown("cache", self.cache, POLICIES)


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
        blanks = self.seq.blanks
        undecided = self.seq.canvas[blanks] == BLANK
        for position, _ in placed:
            undecided[blanks.searchsorted(position)] = False
        left = undecided.nonzero()[0]
        return blanks[left[left // self.block == left[0] // self.block + later]].tolist()

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

    def beyond(self, placed: Placement, count: int) -> list[int]:
        """Blanks of the next block, once this one has too few for `count` drafts; under a cache every block begins anew."""
        return self.open(placed, later=1) if self.cache == "none" and len(self.open(placed)) <= count else []

    def ask(
        self, target: Canvases, positions: Sequence[Sequence[int]], placed: Sequence[Placement]
    ) -> Awaitable[list[tuple[Tensor, Tensor]]]:
        """One forward about some canvases, under the policy as it is now."""
        return target.canvases(self.seq, positions, placed, self.scope())

    def decided(self, count: int) -> None:
        self.since += count
