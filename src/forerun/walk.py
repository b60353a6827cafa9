"""Where the decoding of a canvas is: which blanks are open, block by block, and what a cache policy trusts by now. Methods for
masked and for block models walk; none of them knows a cache."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forerun.core import BLANK, BlockWise, Canvas, Frame, Placement, Scope
from forerun.errors import BadOption, unknown
from forerun.parameters import check_whole

POLICIES = ("none", "prefix", "dual")
CAUSAL = ("nothing", "prefix", "text")


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
        self, target: Any, positions: Sequence[Sequence[int]], placed: Sequence[Placement]
    ) -> Awaitable[list[tuple[Tensor, Tensor]]]:
        """One forward about some canvases, under the policy as it is now."""
        return target.canvases(self.seq, positions, placed, self.scope())

    def decided(self, count: int) -> None:
        self.since += count


@dataclass(frozen=True)
class Strides:
    """The options of every method that fills the blocks of a block model."""

    block: int | None = field(
        default=None, metadata={"help": "tokens per block, up to what the model was trained for (the default)"}
    )
    sub_block: int | None = field(
        default=None, metadata={"help": "tokens per part of a block; a part is finished before the next is begun, all in its sight"}
    )
    causal: str = field(
        default="nothing",
        metadata={
            "help": "what is read as in blocks of one token: nothing, prefix (the block's decided beginning), text (all that is "
            "decided, so that a verdict's rows are the cache)"
        },
    )

    def __post_init__(self) -> None:
        for name in ("block", "sub_block"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if self.causal not in CAUSAL:
            raise unknown("causal", self.causal, CAUSAL)


class BlockWalk(Walk):
    """The same walk over the blocks of a block model: stretches of the canvas, counted from its first token. What lies before the
    block is finished, so no policy is needed: the engine keeps what may be kept."""

    def __init__(self, seq: Canvas, target: BlockWise, block: int | None, sub_block: int | None, causal: str):
        size = target.block if block is None else block
        if size > target.block:
            raise BadOption(f"block={block} must be at most {target.block}, the block that this model was trained for.")
        if sub_block is not None and sub_block > size:
            raise BadOption(f"sub_block={sub_block} must be at most {size}, the block that it is a part of.")
        super().__init__(seq, size, "none", 1)
        self.part, self.causal = sub_block or size, causal
        # In a shifted model the block before speaks of a block's first token: that is decided alone, and the block begins after it.
        self.begins_alone = target.row_before and causal == "nothing"

    def frame(self) -> Frame:
        """The block with the first blank."""
        start = self.seq.first_blank // self.block * self.block
        return Frame(start, min(start + self.block, len(self.seq.canvas)), self.block, self.causal)

    @property
    def alone(self) -> bool:
        """Is it the turn of a block's first token, which the block before speaks of?"""
        return self.begins_alone and self.seq.first_blank % self.block == 0

    def number(self, position: int) -> int:
        """Of the part that a position belongs to; parts are counted from the beginning of their block."""
        return position // self.block * self.block + position % self.block // self.part

    def open(self, placed: Placement = (), later: int = 0) -> list[int]:
        frame, first = self.frame(), self.seq.first_blank
        if self.alone:
            return [first]
        begin = frame.start + (first - frame.start) // self.part * self.part
        filled = {position for position, _ in placed}
        here = range(first, min(begin + self.part, frame.end))
        return [p for p in here if self.seq.canvas[p] == BLANK and p not in filled]

    def ahead(self) -> int:
        return len(self.open()) - 1

    def beyond(self, placed: Placement, count: int) -> list[int]:
        return []

    def ask(
        self, target: Any, positions: Sequence[Sequence[int]], placed: Sequence[Placement]
    ) -> Awaitable[list[tuple[Tensor, Tensor]]]:
        return target.blocks(self.seq, positions, placed, self.frame())
