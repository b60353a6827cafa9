"""In which order the blanks of a canvas are decided: block by block, and what a cache policy trusts
by now.

Methods for masked and for block models take their open blanks from here; none of them knows a
cache.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.errors import BadOption, unknown
from forerun.families.base import ModelHandle
from forerun.families.block import BlockFiller, BlockSpan
from forerun.families.masked import WHOLE_CANVAS, CacheScope, CanvasFiller
from forerun.options import check_whole
from forerun.probability.outcomes import Placement
from forerun.registry import Departure
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.question import BlankLaws

POLICIES = ("none", "prefix", "dual")
CAUSAL = ("nothing", "prefix", "text")
ORDERS = ("confidence", "entropy", "margin")


class BlockOrder(ABC):
    """Which blanks of a canvas are open, and how to ask about them."""

    by = "confidence"  # what open blanks are decided in the order of
    small_canvases = True  # is a canvas just a block? Else it is the whole text
    target: ModelHandle

    def __init__(self, seq: Canvas, block: int):
        self.seq = seq
        self.block = block

    @property
    def rows_are_cheap(self) -> bool:
        """Do more canvases in one forward cost little more time?"""
        return self.small_canvases and self.target.rows_are_cheap

    @abstractmethod
    def number(self, position: int) -> int:
        """The block that a blank belongs to."""

    @abstractmethod
    def open(self, placed: Placement = ()) -> list[int]:
        """Undecided blanks of the first block that has any, were some filled as `placed` says."""

    @abstractmethod
    def ahead(self) -> int:
        """How many decisions may follow the next one in the same forward."""

    @abstractmethod
    def most_canvases(self) -> int:
        """How many canvases one forward has room for."""

    @abstractmethod
    async def ask(
        self, positions: Sequence[Sequence[int]], placements: Sequence[Placement]
    ) -> list[BlankLaws]:
        """One forward about some canvases."""

    def beyond(self, placed: Placement, count: int) -> list[int]:
        """Blanks of the next block, once this one has too few for `count` drafts."""
        return []

    def decided(self, count: int) -> None:
        """So many blanks were decided. Only a cache needs to know."""
        return


class StepShares:
    """How many blanks each forward of a block decides, so that a block takes so many `steps`: equal
    shares, and where that leaves some over, one more in the first ones (LLaDA's schedule, and
    SDAR's)."""

    def __init__(self, steps: int | None):
        self.steps = steps  # None: one for each blank
        self.block = -1
        self.least = self.larger = 0  # share, and how many forwards have one more
        self.forwards = 0  # of this block

    def next(self, block: int, blanks: int) -> int:
        """The share of the next forward, which is about this block; it had so many blanks when it
        began."""
        if block != self.block:
            steps = blanks if self.steps is None else min(self.steps, blanks)
            self.least, self.larger = divmod(blanks, steps)
            self.block = block
            self.forwards = 0
        self.forwards += 1
        return self.least + (self.forwards <= self.larger)


@dataclass(frozen=True)
class CanvasBlockOptions:
    """The options of every method that decodes a masked model."""

    block: int = field(
        default=8,
        metadata={"help": "blanks per block; a block is finished before the next is begun"},
    )
    cache: str = field(
        default="none",
        metadata={
            "help": "none (exact), prefix (keys before the block are kept), dual (those after it "
            "too)"
        },
    )
    refresh: int = field(
        default=8,
        metadata={"help": "with a cache: compute everything anew after so many decided tokens"},
    )

    def __post_init__(self) -> None:
        check_whole("block", self.block)
        check_whole("refresh", self.refresh)
        if self.cache not in POLICIES:
            raise unknown("cache", self.cache, POLICIES)


@dataclass(frozen=True)
class OrderedBlockOptions(CanvasBlockOptions):
    """Of methods that decide a number of blanks, the surest first."""

    order: str = field(
        default="confidence",
        metadata={
            "help": "which blank is the surest: confidence (of the token drawn), or Dream's margin "
            "(of the likeliest token over the next) and entropy (of the law)"
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ORDERS:
            raise unknown("order", self.order, ORDERS)


def stale_keys(options: CanvasBlockOptions) -> Departure | None:
    """Keys that are as old as the last refresh; with a refresh at every token there are none."""
    if options.cache == "none" or options.refresh == 1:
        return None
    where = "before" if options.cache == "prefix" else "outside"
    return Departure("cache", f"keys {where} the block are as old as the last refresh")


class CanvasBlockOrder(BlockOrder):
    """Blocks of blanks, counted among the blanks, with a cache policy."""

    target: CanvasFiller

    def __init__(self, seq: Canvas, target: CanvasFiller, options: CanvasBlockOptions):
        super().__init__(seq, options.block)
        self.target = target
        if isinstance(options, OrderedBlockOptions):
            self.by = options.order
        self.cache = options.cache
        self.small_canvases = options.cache == "dual"
        self.refresh = options.refresh
        self.cached_block = -1  # the block that the slots belong to
        self.decided_since = 0  # tokens decided since the slots were computed

    def number(self, position: int) -> int:
        return int(self.seq.blanks.searchsorted(position)) // self.block

    def open(self, placed: Placement = (), later: int = 0) -> list[int]:
        """Undecided blanks of the first block that has any, or of a `later` block."""
        blanks = self.seq.blanks
        undecided = self.seq.tokens[blanks] == BLANK
        for position, _ in placed:
            undecided[blanks.searchsorted(position)] = False
        left = undecided.nonzero()[0]
        wanted = left[0] // self.block + later
        return blanks[left[left // self.block == wanted]].tolist()

    @property
    def stale(self) -> bool:
        """Must everything be computed anew? So it is when a block begins, and after every `refresh`
        tokens of it."""
        begins = self.number(self.open()[0]) != self.cached_block
        return begins or self.decided_since >= self.refresh

    def scope(self) -> CacheScope:
        """What the cache policy trusts now."""
        if self.cache == "none":
            return WHOLE_CANVAS
        number = self.number(self.open()[0])
        fresh = self.stale
        if fresh:
            self.cached_block = number
            self.decided_since = 0
        members = self.seq.blanks[number * self.block : (number + 1) * self.block]
        return CacheScope(self.cache, int(members[0]), int(members[-1]) + 1, fresh)

    def ahead(self) -> int:
        """Under a cache, none beyond the block or the refresh."""
        if self.cache == "none":
            return self.seq.remaining - 1
        until_refresh = self.refresh if self.stale else self.refresh - self.decided_since
        return min(len(self.open()), until_refresh) - 1

    def most_canvases(self) -> int:
        length = len(self.seq.tokens)
        size = 2 * self.block if self.small_canvases else length  # with a look at the next block
        return 1 + (self.target.host.room - length) // size

    def beyond(self, placed: Placement, count: int) -> list[int]:
        """Under a cache, once this block has one blank left: the next one begins with a forward of
        its own, which such drafts are judged in."""
        if len(self.open(placed)) <= (count if self.cache == "none" else 1):
            return self.open(placed, later=1)
        return []

    async def ask(
        self, positions: Sequence[Sequence[int]], placements: Sequence[Placement]
    ) -> list[BlankLaws]:
        return await self.target.canvases(self.seq, positions, placements, self.scope())

    def decided(self, count: int) -> None:
        self.decided_since += count


@dataclass(frozen=True)
class BlockOptions:
    """The options of every method that fills the blocks of a block model."""

    block: int | None = field(
        default=None,
        metadata={"help": "tokens per block; default: what the model was trained for"},
    )
    sub_block: int | None = field(
        default=None,
        metadata={
            "help": "tokens per part of a block; a part is finished before the next is begun, all "
            "in its sight"
        },
    )
    causal: str = field(
        default="nothing",
        metadata={
            "help": "what is read as in blocks of one token: nothing, prefix (the block's decided "
            "beginning), text (all that is decided, so that a verdict's rows are the cache)"
        },
    )

    def __post_init__(self) -> None:
        for name in ("block", "sub_block"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if self.causal not in CAUSAL:
            raise unknown("causal", self.causal, CAUSAL)


def causal_reading(options: BlockOptions) -> Departure | None:
    """Text that is read from left to right, which a model filling blocks was not trained on."""
    if options.causal == "nothing":
        return None
    return Departure("causal", f"causal={options.causal} reads text in blocks of one token")


class ModelBlockOrder(BlockOrder):
    """The blocks of a block model: stretches of the canvas, counted from its first token.

    What lies before the block is finished, so no policy is needed: the engine keeps what may be
    kept.
    """

    target: BlockFiller

    def __init__(self, seq: Canvas, target: BlockFiller, options: BlockOptions):
        size = target.block if options.block is None else options.block
        if size > target.largest_block:
            raise BadOption(
                f"block={options.block} must be at most {target.largest_block}: a lane has no room "
                f"for the verdict on a larger one."
            )
        if size > target.block:
            warnings.warn(
                f"block={options.block} is larger than the {target.block} tokens that this model "
                f"was trained for: its text may be worse.",
                stacklevel=2,
            )
        if options.sub_block is not None and options.sub_block > size:
            raise BadOption(
                f"sub_block={options.sub_block} must be at most {size}, the block that it is a "
                f"part of."
            )
        super().__init__(seq, size)
        self.target = target
        self.part = options.sub_block or size
        self.causal = options.causal
        # In a shifted model the block before speaks of a block's first token: that token is decided
        # alone, and the block begins after it.
        self.begins_alone = target.shifted and options.causal == "nothing"

    def span(self) -> BlockSpan:
        """The block with the first blank."""
        start = self.seq.first_blank // self.block * self.block
        end = min(start + self.block, len(self.seq.tokens))
        return BlockSpan(start, end, self.block, self.causal)

    @property
    def alone(self) -> bool:
        """Is it the turn of a block's first token, which the block before speaks of?"""
        return self.begins_alone and self.seq.first_blank % self.block == 0

    def number(self, position: int) -> int:
        """Of the part that a position belongs to; parts count from the beginning of their block."""
        return position // self.block * self.block + position % self.block // self.part

    def open(self, placed: Placement = ()) -> list[int]:
        span = self.span()
        first = self.seq.first_blank
        if self.alone:
            return [first]
        begin = span.start + (first - span.start) // self.part * self.part
        filled = {position for position, _ in placed}
        part = range(first, min(begin + self.part, span.end))
        return [p for p in part if self.seq.tokens[p] == BLANK and p not in filled]

    def ahead(self) -> int:
        return len(self.open()) - 1

    def most_canvases(self) -> int:
        return (self.target.host.room - self.span().start) // self.block

    async def ask(
        self, positions: Sequence[Sequence[int]], placements: Sequence[Placement]
    ) -> list[BlankLaws]:
        return await self.target.blocks(self.seq, positions, placements, self.span())
