"""The only ragged code: plans of many sequences become one forward, and arguments of many rules
become one batch.

B segments (one per sequence), T rows run in all, S slots of the longest lane, R rows that are read,
N tiles. Rows of all sequences are laid end to end, so that the matrix products see no padding. Only
attention knows where one sequence ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from forerun.engine.pages import PageTable
from forerun.probability.transfer import to_device
from forerun.sequence.rows import HI, HORIZON, LO, POSITION, TOKEN, PlainText, Plan, TailedText

# One argument of a rule for one sequence: a law, a list of tokens, or nothing.
RuleArgument = Tensor | Sequence[int] | None


class Segment(NamedTuple):
    """The rows of one plan that must run: those from `start` on, packed at `offset`."""

    lane: int
    plan: Plan
    start: int
    offset: int

    @property
    def rows(self) -> int:
        return self.plan.length - self.start

    @property
    def end(self) -> int:
        """How many slots the segment may look at."""
        return self.plan.length

    def rows_to_run(self) -> np.ndarray:
        """The five integers of the rows that must run, [5, rows]."""
        return self.plan.rows_between(self.start, self.plan.length)


class Moved(NamedTuple):
    """How far the rows of each sequence are to be moved on, on the device."""

    steps_B: Tensor
    most: int  # that any of them moves
    more: int = 0  # that all of them move, beside that


class Placed(NamedTuple):
    """Tokens that only the device knows: one at the same place of every sequence's rows, and those
    behind it; -1 for none, which is run as any token."""

    first: int
    token_B: Tensor
    behind_BK: Tensor | None = None


class Batch:
    """One forward as data: what a backbone needs to run it (`engine/backbone.py` says how it is
    read). Tensors are made when they are first asked for."""

    # The rows as attention kernels take them. Without tiles, attention goes by segments.
    tiles: Tiles[Tensor] | None = None
    host_tiles: Tiles[np.ndarray] | None = None  # the same on the host, once somebody has asked
    # Tokens of the first rows, drawn on the device: the host does not know them yet.
    drawn_T: Tensor | None = None
    # and how much further on they stand, where the host does not know that either
    moved: Moved | None = None
    ahead = 0  # tokens that texts may be longer, with what moves: attention has room for them
    is_plain_text = False  # does every row see itself and all before it, and nothing else?
    runs: Runs | None = None  # where the rows are texts and tails
    # Where another model keeps what these rows are made of, by flat slot; its scratch slot where a
    # row is made of nothing. And where its lanes live.
    sources: np.ndarray | None = None
    source_table: PageTable | None = None

    def __init__(
        self,
        work: Sequence[tuple[int, Plan, int]],
        table: PageTable | int,
        device: torch.device,
    ):
        """`work` is (lane, plan, first row that must run) of every sequence. `table` says where
        lanes live; a number stands for lanes of so many slots, one after the other."""
        self.device = device
        lanes, plans, starts = zip(*work)
        # of each sequence: rows that run, rows that are read, and slots that they may look at
        self.slot_counts = [plan.length for plan in plans]
        self.row_counts = [end - start for end, start in zip(self.slot_counts, starts)]
        self.read_counts = [plan.read_count for plan in plans]
        *offsets, total = accumulate(self.row_counts, initial=0)
        self.segments = list(map(Segment, lanes, plans, starts, offsets))
        # from where a row is packed to its place in its own plan
        shift_B = np.array(starts) - offsets
        self.lanes = _for_rows(np.array(lanes), self.row_counts)
        places_T = np.arange(total) + _for_rows(shift_B, self.row_counts)
        self.places = places_T  # of the rows in their own plans
        if isinstance(table, int):
            table = PageTable(max(lanes) + 1, table)
        self.table = table
        self.slots = table.places(self.lanes, places_T)
        self.is_plain_text = all(plan.causal == plan.length for plan in plans)
        if all(type(plan) is PlainText for plan in plans):
            self.rows_5T = _plain_rows(self.segments, places_T)
            self.reads = _last_rows(self.row_counts, self.read_counts)
        elif all(isinstance(plan, (PlainText, TailedText)) for plan in plans):
            self.runs = Runs(cast("Sequence[PlainText | TailedText]", plans), starts)
            tokens_T = _concatenate([plan.tokens[start:] for plan, start in zip(plans, starts)])
            self.rows_5T = self.runs.rows(tokens_T, places_T)
            self.reads = _last_rows(self.row_counts, self.read_counts)
        else:
            self.rows_5T = _concatenate([segment.rows_to_run() for segment in self.segments])
            reads = _concatenate([branch for plan in plans for branch in plan.reads])
            self.reads = reads - _for_rows(shift_B, self.read_counts)
        self._begin()

    def _begin(self) -> None:
        self._biases: dict[tuple[int, int | None, torch.dtype], Tensor | None] = {}
        self._padded: dict[int | None, PaddedBatch] = {}
        self._spans: dict[int, slice | Tensor] = {}

    def with_tokens(self, tokens: np.ndarray) -> Batch:
        """The same rows with other tokens, where the host knows them to be."""
        other = copy(self)
        other.rows_5T = self.rows_5T.copy()
        other.rows_5T[TOKEN] = tokens
        other.drawn_T = None
        other.moved = None
        other.host_tiles = None
        for made in ("_integers", "tokens_T"):
            other.__dict__.pop(made, None)
        return other

    def for_rows(self, values: Sequence[int]) -> np.ndarray:
        """The value of every sequence, for each of its rows."""
        return _for_rows(np.array(values), self.row_counts)

    @property
    def longest(self) -> int:
        """How many slots any segment may look at."""
        return max(segment.end for segment in self.segments)

    def span(self, index: int, end: int | None = None) -> slice | Tensor:
        """Where the slots live that a segment may look at, or more of its last page."""
        if index not in self._spans:
            segment = self.segments[index]
            span = self.table.span(segment.lane, end or segment.end)
            if isinstance(span, slice):
                self._spans[index] = span
            else:
                self._spans[index] = torch.from_numpy(span).to(self.device)
        return self._spans[index]

    @cached_property
    def _integers(self) -> tuple[Tensor, ...]:
        """Tokens, positions, slots and reads, in one transfer."""
        rows = len(self.slots)
        packed = np.concatenate(
            [self.rows_5T[TOKEN], self.rows_5T[POSITION], self.slots, self.reads]
        )
        return (
            torch.from_numpy(packed)
            .to(self.device, torch.long, non_blocking=True)
            .split([rows, rows, rows, len(self.reads)])
        )

    @cached_property
    def tokens_T(self) -> Tensor:
        if self.drawn_T is None:
            return self._integers[0]
        if len(self.drawn_T) == len(self.slots):
            return self.drawn_T
        return torch.cat([self.drawn_T, self._integers[0][len(self.drawn_T) :]])

    @cached_property
    def positions_T(self) -> Tensor:
        return self._integers[1]

    @cached_property
    def slots_T(self) -> Tensor:
        return self._integers[2]

    @cached_property
    def reads_R(self) -> Tensor:
        return self._integers[3]

    @cached_property
    def sources_T(self) -> Tensor:
        assert self.sources is not None, "only a model that looks into another has sources"
        return to_device(self.sources, torch.long, self.device)

    def attention_bias(
        self, index: int, window: int | None, dtype: torch.dtype, end: int | None = None
    ) -> Tensor | None:
        """What to add to the scores of a segment, [rows, end]: 0 where a row sees a slot, else
        minus infinity. None where every row sees every slot. Numbers, because attention would
        convert truth values in every layer. `end` is how many slots are looked at, if they are
        more than the segment's."""
        key = (index, window, dtype)
        if key not in self._biases:
            segment = self.segments[index]
            horizon = segment.rows_to_run()[HORIZON]
            end = end or segment.end
            if window is None and (horizon >= end).all():
                self._biases[key] = None
            else:
                mask = np.zeros((segment.rows, end), bool)
                mask[:, : segment.end] = visible(segment, window)
                bias = additive_mask(mask, dtype)
                self._biases[key] = bias.to(self.device)
        return self._biases[key]

    def padded(self, window: int | None = None) -> PaddedBatch:
        """The same forward with sequences side by side, for devices that prefer one large attention
        to many small ones."""
        if window not in self._padded:
            self._padded[window] = PaddedBatch(self, window)
        return self._padded[window]


class Runs:
    """Rows of texts and their tails, as runs: of every sequence the rest of its text, then each
    tail. A text's rows see all before them; a tail's rows see its context and their own slots."""

    def __init__(self, plans: Sequence[PlainText | TailedText], starts: Sequence[int]):
        # plain lists: runs are few, and every call of NumPy takes as long as ten of them
        self._lengths: list[int] = []
        self._contexts: list[int] = []  # slots that a tail's rows see besides their own
        self._slots: list[int] = []  # where a tail's own begin; of a text, where it ends
        self._ends: list[int] = []  # where they end; the same of a text
        self._counts: list[int] = []  # of the runs of each sequence
        for plan, start in zip(plans, starts):
            self._lengths += [plan.stored - start, *plan.tail_lengths]
            self._contexts += [plan.stored, *plan.tail_contexts]
            self._slots += [plan.stored, *plan.tail_slots[:-1]]
            self._ends += [plan.stored, *plan.tail_slots[1:]]
            self._counts.append(1 + len(plan.tail_lengths))

    def rows(self, tokens_T: np.ndarray, places_T: np.ndarray) -> np.ndarray:
        """The five integers of all rows, given their tokens and their places in their plans."""
        spans_3R = np.array([self._contexts, self._slots, self._ends])
        context_T, slot_T, end_T = spans_3R.repeat(self._lengths, 1)
        in_tail_T = end_T > slot_T
        behind_T = places_T + 1
        rows_5T = np.empty((5, len(places_T)), np.int32)
        rows_5T[TOKEN] = tokens_T
        rows_5T[POSITION] = places_T - (slot_T - context_T)
        rows_5T[HORIZON] = np.minimum(context_T, behind_T)
        rows_5T[LO] = slot_T * in_tail_T
        rows_5T[HI] = behind_T * in_tail_T
        return rows_5T

    def bounds(self, lanes: Sequence[int], low: int, high: int) -> tuple[np.ndarray, int]:
        """The bounds of tiles, and their height: what `_any_bounds` says of these rows."""
        lengths = self._lengths
        height = low if max(lengths) <= low else high
        *firsts, _ = accumulate(lengths, initial=0)
        of_runs = [lane for lane, count in zip(lanes, self._counts) for _ in range(count)]
        bounds = [firsts, lengths, of_runs, self._contexts, self._slots, self._ends]
        if max(lengths) <= height and 0 not in lengths:  # one tile each
            return np.array(bounds), height
        return _cut_runs(np.array(bounds), height), height


def _cut_runs(runs_6R: np.ndarray, height: int) -> np.ndarray:
    """The bounds of tiles that cut runs into so many rows at most. What a tile sees ends with its
    last row."""
    tiles_R = -(-runs_6R[1] // height)
    first_N, length_N, lane_N, near_N, lo_N, far_N = runs_6R.repeat(tiles_R, 1)
    before_N = np.arange(len(first_N)) - (tiles_R.cumsum() - tiles_R).repeat(tiles_R)
    before_N *= height  # rows of its run
    rows_N = np.minimum(length_N - before_N, height)
    behind_N = length_N - before_N - rows_N
    in_tail_N = far_N > lo_N
    near_N -= behind_N * ~in_tail_N
    lo_N = np.where(in_tail_N, lo_N, near_N)
    return np.array([first_N + before_N, rows_N, lane_N, near_N, lo_N, far_N - behind_N])


class NextRows(Batch):
    """One row of plain text per sequence, behind all that its slots hold. Most forwards are of this
    kind: lanes and lengths are enough, and plans are made for who looks."""

    is_plain_text = True

    def __init__(
        self,
        lanes: Sequence[int],
        lengths: Sequence[int],
        table: PageTable,
        device: torch.device,
        make_plans: Callable[[], Sequence[Plan]],
    ):
        """The texts have these lengths, this row included; its token is 0 until it is drawn."""
        count = len(lanes)
        self.device = device
        self.table = table
        self.slot_counts = list(lengths)
        self.row_counts = [1] * count
        self.read_counts = [1] * count
        self.lanes = np.array(lanes)
        ends_B = np.array(lengths)
        self.places = ends_B - 1
        self.slots = table.places(self.lanes, self.places)
        self.rows_5T = np.zeros((5, count), np.int32)
        self.rows_5T[POSITION] = ends_B - 1
        self.rows_5T[HORIZON] = ends_B
        self.reads = np.arange(count)
        self._make_plans = make_plans
        self._begin()

    @cached_property
    def segments(self) -> list[Segment]:  # type: ignore[override]
        starts = [length - 1 for length in self.slot_counts]
        plans = self._make_plans()
        return list(map(Segment, self.lanes.tolist(), plans, starts, range(len(plans))))


class MovedOn(Batch):
    """The rows of a batch that was replayed last, further on by as much as only the device knows.
    Nothing but that and some of their tokens is new, so nothing is made or sent for them."""

    def __init__(self, last: Batch, moved: Moved, grown: int):
        """Texts are at most so many tokens longer than they were."""
        self.device = last.device
        self.row_counts = last.row_counts
        self.read_counts = last.read_counts
        self.slot_counts = [count + grown for count in last.slot_counts]
        self.slots = last.slots  # as many, not these
        self.reads = last.reads
        self.source_table = last.source_table
        self.moved = moved
        self.placed: Placed | None = None
        self._begin()


class MovingRows(Batch):
    """Rows of plain text, one per sequence, that move on token by token in the host's memory.
    Whoever runs them asks for arrays, not for tensors, and for nothing of their segments."""

    def __init__(self, batch: Batch):
        self.device = batch.device
        self.segments = batch.segments
        self.table = batch.table
        self.lanes = batch.lanes
        self.slots = batch.slots
        self.rows_5T = batch.rows_5T.copy()
        self.reads = batch.reads
        self.is_plain_text = batch.is_plain_text
        self._steps = 0

    @property
    def longest(self) -> int:
        return super().longest + self._steps

    def set_tokens(self, tokens_T: np.ndarray, steps: int) -> None:
        """Give all rows other tokens, so many positions on."""
        self._steps += steps
        self.rows_5T[TOKEN] = tokens_T
        self.rows_5T[POSITION : HORIZON + 1] += steps
        self.slots = self.table.places(self.lanes, self.rows_5T[POSITION])


def additive_mask(mask: np.ndarray, dtype: torch.dtype) -> Tensor:
    """0 where the mask is true, else minus infinity."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(torch.from_numpy(~mask), -torch.inf)


def visible(segment: Segment, window: int | None = None) -> np.ndarray:
    """[rows, end]: row i sees slots [0, horizon) and [lo, hi), except those `window` or more
    positions back."""
    _, position, horizon, lo, hi = segment.rows_to_run()[:, :, None]
    slot = np.arange(segment.end)
    mask = (slot < horizon) | ((lo <= slot) & (slot < hi))
    if window is not None:
        mask &= position - segment.plan.rows[POSITION] < window
    return mask


class PaddedBatch:
    """Segments side by side: [B, T, ...] rows against [B, S, ...] slots. The mask is made on the
    device from the five integers."""

    def __init__(self, batch: Batch, window: int | None):
        segments = batch.segments
        device = batch.device
        longest = max(s.rows for s in segments)
        self.slots = max(s.end for s in segments)
        places = np.full((len(segments), self.slots), batch.table.scratch_slot, np.int64)
        rows = np.zeros((len(segments), 5, longest), np.int64)
        rows[:, HORIZON] = 1  # padding rows look at slot 0 and are thrown away
        gather = np.zeros((len(segments), longest), np.int64)
        scatter = []
        for b, s in enumerate(segments):
            rows[b, :, : s.rows] = s.rows_to_run()
            gather[b, : s.rows] = np.arange(s.offset, s.offset + s.rows)
            scatter.append(b * longest + np.arange(s.rows))
            places[b, : s.end] = batch.table.places(np.array(s.lane), np.arange(s.end))
        self.places_BS = torch.from_numpy(places).to(device)
        self.gather_BT = torch.from_numpy(gather).to(device)
        self.scatter_T = torch.from_numpy(np.concatenate(scatter)).to(device)
        rows_B5T1 = torch.from_numpy(rows).to(device)[..., None]
        slot_S = torch.arange(self.slots, device=device)
        self.mask_BTS = (slot_S < rows_B5T1[:, HORIZON]) | (
            (slot_S >= rows_B5T1[:, LO]) & (slot_S < rows_B5T1[:, HI])
        )
        if window is not None:
            slot_positions = self._slot_positions(segments).to(device)
            self.mask_BTS &= rows_B5T1[:, POSITION] - slot_positions < window
        self.unseen_BS = ~self.mask_BTS.any(1)

    def _slot_positions(self, segments: Sequence[Segment]) -> Tensor:
        """The position of the row in each slot, [B, 1, S]."""
        positions = np.zeros((len(segments), 1, self.slots), np.int64)
        for b, s in enumerate(segments):
            positions[b, 0, : s.end] = s.plan.rows[POSITION]
        return torch.from_numpy(positions)


# rows times heads that matrix units take at least, so that a lower tile would not be cheaper
LEAST_ROWS = 16
TILE_ROWS = 64  # rows times heads that one tile of attention holds at most
SLOTS = 64  # of one share: slots that are added up together; texts are cut at multiples of it
AT_ONCE = 4  # shares that a program takes at a time, where each has not one of its own
SECTION = 16  # shares that are folded together before the next ones are looked at
SECTION_COUNTS = (4, 16, 64)  # few: a text grows through them while it is read
TILE_COUNTS = (1, 8, 32, 128, 640)  # an empty tile costs next to nothing
NO_SLOT = np.int32(np.iinfo(np.int32).max)

Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True)
class Tiles(Generic[Array]):
    """Rows as attention kernels take them. Up to `height` neighbouring rows of one sequence form a
    tile, which looks at slots [0, near) and [lo, far) of its lane. With `splits`, pieces of those
    slots are looked at apart, up to so many: each share, or `by_section` each section. Else one
    program looks at all of them."""

    bounds_6N: Array  # of each tile: first row, rows, lane, near, lo, far
    spans_3T: Array  # of each row: horizon, lo, hi
    height: int
    splits: int
    by_section: bool = False

    @property
    def count(self) -> int:
        return self.bounds_6N.shape[1]

    def to(self: Tiles[np.ndarray], device: torch.device) -> Tiles[Tensor]:
        def send(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, torch.long)

        bounds_6N, spans_3T = send(self.bounds_6N), send(self.spans_3T)
        return Tiles(bounds_6N, spans_3T, self.height, self.splits, self.by_section)


def round_up(count: int, sizes: Sequence[int]) -> int:
    """The least of those sizes that holds so many; the count itself where none does."""
    return next((size for size in sizes if size >= count), count)


def make_tiles(
    batch: Batch,
    heads: int,
    key_heads: int,
    programs: int,
    most_rows: int = TILE_ROWS,
    ahead: int = 0,
) -> Tiles[np.ndarray]:
    """The tiles of a batch, for a device that runs so many programs at a time; with shares for
    texts that are so many tokens longer."""
    fold = heads // key_heads
    # Two heights serve all batches, so that fewer sizes are captured.
    low = max(1, LEAST_ROWS // fold)
    high = max(1, most_rows // fold)
    if batch.is_plain_text:
        bounds, height = _plain_bounds(batch, low, high)
        longest = max(batch.slot_counts) + ahead  # slots that one tile looks at
    else:
        if batch.runs is not None:
            lanes = [segment.lane for segment in batch.segments]
            bounds, height = batch.runs.bounds(lanes, low, high)
        else:
            bounds, height = _any_bounds(batch, low, high)
        _, _, _, near, lo, far = bounds
        longest = int((near + far - lo).max()) + ahead
    tiles = round_up(bounds.shape[1], TILE_COUNTS) * key_heads
    splits, by_section = _splits(tiles, longest, programs, max(batch.row_counts) > high)
    return Tiles(bounds, batch.rows_5T[HORIZON:], height, splits, by_section)


def _splits(tiles: int, longest: int, programs: int, full: bool) -> tuple[int, bool]:
    """Into how many pieces the slots of so many tiles are cut, and whether these are sections.
    What is captured for some tiles serves all that round up to as many. Where some are `full`, as
    where a prompt is read, what each piece of them found takes long to write and to join: on an
    H200, 128 rows of a 1.5B after 3,500 tokens took 5.4 ms by shares and 3.9 by sections."""
    pieces = _split_count(-(-longest // (AT_ONCE * SLOTS)))
    too_many = full and tiles * pieces > 2 * programs
    if 2 * tiles < programs and not too_many:  # few: a program per share pays
        return AT_ONCE * pieces, False
    sections = -(-longest // (SECTION * SLOTS))
    # One long text among many short ones would keep all waiting; of many tiles none waits for one.
    if sections > 1 and tiles <= 4 * programs:
        return round_up(sections, SECTION_COUNTS), True
    return 1, False


def _plain_bounds(batch: Batch, low: int, high: int) -> tuple[np.ndarray, int]:
    """The bounds of tiles over plain text, and their height, by arithmetic alone: most forwards
    are of this kind."""
    height = low if max(batch.row_counts) <= low else high
    if max(batch.row_counts) <= height:  # one tile each
        *offsets, _ = accumulate(batch.row_counts, initial=0)
        ends = batch.slot_counts
        lanes = batch.lanes[offsets]
        return np.array([offsets, batch.row_counts, lanes, ends, ends, ends], np.int64), height
    bounds: list[tuple[int, ...]] = []
    for (lane, _, start, offset), count in zip(batch.segments, batch.row_counts):
        for first in range(0, count, height):
            rows = min(height, count - first)
            near = start + first + rows
            bounds.append((offset + first, rows, lane, near, near, near))
    return np.array(bounds, np.int64).T, height


def _any_bounds(batch: Batch, low: int, high: int) -> tuple[np.ndarray, int]:
    """The bounds of tiles over any rows, and their height."""
    first, lane = _runs(batch)
    rows = np.diff(first, append=batch.rows_5T.shape[1])
    height = low if rows.max() <= low else high
    if rows.max() > height:  # some runs need several tiles
        tiles = -(-rows // height)
        within = np.arange(tiles.sum()) - (tiles.cumsum() - tiles).repeat(tiles)
        first = first.repeat(tiles) + height * within
        lane = lane.repeat(tiles)
    return _tile_bounds(batch.rows_5T, first, lane), height


def _split_count(shares: int) -> int:
    """So many shares or a few more: there are two counts per power of two, so that fewer sizes are
    captured."""
    power = 1 << (shares - 1).bit_length()
    return 3 * power // 4 if 4 * shares <= 3 * power else power


def _runs(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The first row and the lane of every run of rows that may share a tile.

    Rows that also look at an interval [lo, hi) share one only if its slots come at the same number
    for all of them: right after the same horizon, from the same lo. So what a row sees has the same
    numbers in whatever company it runs.
    """
    first = np.array([s.offset for s in batch.segments])
    lane = np.array([s.lane for s in batch.segments])
    _, _, horizon, lo, hi = batch.rows_5T
    apart = hi > np.maximum(lo, horizon)
    if not apart.any():
        return first, lane
    horizon = np.where(apart, horizon, -1)
    lo = np.where(apart, lo, -1)
    begins = np.zeros(len(apart), bool)
    begins[1:] = (np.diff(horizon) != 0) | (np.diff(lo) != 0)
    begins[first] = True
    starts = np.flatnonzero(begins)
    return starts, lane[np.searchsorted(first, starts, side="right") - 1]


def _tile_bounds(rows_5T: np.ndarray, first: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """First row, rows, lane, near, lo and far of each tile, [6, N]."""
    _, _, horizon, lo, hi = rows_5T
    near = np.maximum.reduceat(horizon, first)
    far = np.maximum(np.maximum.reduceat(hi, first), near)
    lo_seen = np.where(hi > lo, lo, NO_SLOT)  # an empty interval reaches nowhere
    bounds = np.empty((6, len(first)), np.int64)
    bounds[0] = first
    bounds[1, :-1] = first[1:] - first[:-1]
    bounds[1, -1] = len(horizon) - first[-1]
    bounds[2] = lane
    bounds[3] = near
    bounds[4] = np.minimum(np.maximum(np.minimum.reduceat(lo_seen, first), near), far)
    bounds[5] = far
    return bounds


def _plain_rows(segments: Sequence[Segment], places_T: np.ndarray) -> np.ndarray:
    """The five integers of rows of plain text, from their tokens and places alone."""
    rows_5T = np.zeros((5, len(places_T)), np.int32)
    rows_5T[TOKEN] = _concatenate([segment.plan.tokens[segment.start :] for segment in segments])
    rows_5T[POSITION] = places_T
    rows_5T[HORIZON] = places_T + 1
    return rows_5T


def _last_rows(row_counts: Sequence[int], read_counts: Sequence[int]) -> np.ndarray:
    """The last rows of every sequence, where rows are laid end to end."""
    reads_R = np.arange(sum(read_counts))
    if row_counts == read_counts:  # all of them
        return reads_R
    unread = [rows - reads for rows, reads in zip(row_counts, read_counts)]
    return reads_R + _for_rows(np.array([*accumulate(unread)]), read_counts)


def _for_rows(values_B: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """The value of every sequence, for each of its rows."""
    one_each = counts.count(1) == len(counts)
    return values_B if one_each else values_B.repeat(counts)


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, -1)


def stack(values: Sequence[RuleArgument], device: torch.device) -> Tensor | None:
    """One argument of a rule for many sequences, batch first. Laws are padded with zeros, token
    lists with -1. All values are of one kind."""
    if values[0] is None:
        return None
    if isinstance(values[0], Tensor):
        tensors = cast("Sequence[Tensor]", values)
        return _stack_tensors([tensor.to(device) for tensor in tensors])
    lists = cast("Sequence[Sequence[int]]", values)
    longest = max(len(tokens) for tokens in lists)
    padded = [[*tokens, *[-1] * (longest - len(tokens))] for tokens in lists]
    return to_device(padded, torch.long, device)


def _stack_tensors(values: list[Tensor]) -> Tensor:
    first = values[0]
    if len(values) == 1:
        return first[None]
    if _are_adjacent(values):
        return first.as_strided((len(values), *first.shape), (first.numel(), *first.stride()))
    if len({v.shape for v in values}) == 1:
        return torch.stack(values)
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


def _are_adjacent(values: Sequence[Tensor]) -> bool:
    """Are they neighbouring pieces of one tensor, as the laws of one forward are? Then they need
    not be copied."""
    first = values[0]
    size = first.numel()
    memory = first.untyped_storage().data_ptr()
    begin = first.storage_offset()
    return size > 0 and all(
        v.shape == first.shape
        and v.dtype == first.dtype
        and v.is_contiguous()
        and v.storage_offset() == begin + i * size
        and v.untyped_storage().data_ptr() == memory
        for i, v in enumerate(values)
    )
