"""The only ragged code: plans of many sequences become one forward, arguments of many rules become one batch.

B segments (one per sequence), T rows run in all, S slots of the longest lane, R rows that are read. Rows of all sequences are
laid end to end, so that the matrix products see no padding at all; only attention knows where one sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.rows import HI, HORIZON, LO, POSITION, TOKEN, Plan
from forerun.transfer import sent


class Segment(NamedTuple):
    """The rows of one plan that must run: rows `start` and on, packed at [offset, offset + rows)."""

    lane: int
    plan: Plan
    start: int
    offset: int

    @property
    def rows(self) -> int:
        return self.plan.rows.shape[1] - self.start

    @property
    def end(self) -> int:
        """How many slots the segment may look at."""
        return self.plan.rows.shape[1]

    def run(self) -> np.ndarray:
        return self.plan.rows[:, self.start :]


class Batch:
    """One forward as data: what a backbone needs to run it. Tensors are made when they are first asked for."""

    tiles: Tiles | None = None  # how kernels of ours see the rows; without it attention goes by segments
    drawn_T: Tensor | None = None  # the rows' tokens, where they were drawn on the device and the host does not know them yet

    def __init__(self, work: Sequence[tuple[int, Plan, int]], context: int, device: torch.device):
        self.device = device
        lanes, plans, starts = zip(*work)
        sizes = [plan.rows.shape[1] - start for plan, start in zip(plans, starts)]
        offsets = [0, *accumulate(sizes)][:-1]
        self.segments = [Segment(*one) for one in zip(lanes, plans, starts, offsets)]
        self.rows_5T = _joined([plan.rows[:, start:] for plan, start in zip(plans, starts)])
        shift = np.array(starts) - offsets  # from where a row is packed to its place in its own plan
        self.slots = np.arange(sum(sizes)) + (shift + np.array(lanes) * context).repeat(sizes)
        self.reads = _joined([branch for plan in plans for branch in plan.reads])
        self.reads = self.reads - shift.repeat([sum(map(len, plan.reads)) for plan in plans])
        self._sights: dict[tuple[int, int | None, torch.dtype], Tensor | None] = {}
        self._padded: dict[int | None, Padded] = {}

    @cached_property
    def _numbers(self) -> tuple[Tensor, ...]:
        """Tokens, positions, slots and reads, in one transfer."""
        rows = len(self.slots)
        packed = np.concatenate([self.rows_5T[TOKEN], self.rows_5T[POSITION], self.slots, self.reads])
        return torch.from_numpy(packed).to(self.device, torch.long, non_blocking=True).split([rows, rows, rows, len(self.reads)])

    @cached_property
    def tokens_T(self) -> Tensor:
        return self._numbers[0] if self.drawn_T is None else self.drawn_T

    @cached_property
    def positions_T(self) -> Tensor:
        return self._numbers[1]

    @cached_property
    def slots_T(self) -> Tensor:
        return self._numbers[2]

    @cached_property
    def reads_R(self) -> Tensor:
        return self._numbers[3]

    def sight(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What to add to a segment's scores, [rows, end]: 0 for slots that a row sees, else minus infinity; None where every row
        sees them all. Numbers, because attention would make them of truth values again in every layer."""
        key = (index, window, dtype)
        if key not in self._sights:
            segment = self.segments[index]
            everything = window is None and (segment.run()[HORIZON] >= segment.end).all()
            self._sights[key] = None if everything else scores(visible(segment, window), dtype).to(self.device)
        return self._sights[key]

    def padded(self, window: int | None = None) -> Padded:
        """The same forward with sequences side by side, for devices that prefer one large attention to many small ones."""
        if window not in self._padded:
            self._padded[window] = Padded(self.segments, window, self.device)
        return self._padded[window]


def scores(mask: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(torch.from_numpy(~mask), -torch.inf)


def visible(segment: Segment, window: int | None = None) -> np.ndarray:
    """[rows, end]: row i sees slots [0, horizon) and [lo, hi), and none that lies `window` positions back or more."""
    _, position, horizon, lo, hi = segment.run()[:, :, None]
    slot = np.arange(segment.end)
    mask = (slot < horizon) | ((lo <= slot) & (slot < hi))
    if window is not None:
        mask &= position - segment.plan.rows[POSITION] < window
    return mask


class Padded:
    """Segments side by side: [B, T, ...] rows against [B, S, ...] slots, with the mask made on the device from the integers."""

    def __init__(self, segments: Sequence[Segment], window: int | None, device: torch.device):
        longest, self.slots = max(s.rows for s in segments), max(s.end for s in segments)
        rows = np.zeros((len(segments), 5, longest), np.int64)
        rows[:, HORIZON] = 1  # padding rows look at slot 0 and are thrown away
        self.gather, scatter = np.zeros((len(segments), longest), np.int64), []
        for b, s in enumerate(segments):
            rows[b, :, : s.rows] = s.run()
            self.gather[b, : s.rows] = np.arange(s.offset, s.offset + s.rows)
            scatter.append(b * longest + np.arange(s.rows))
        lanes = [s.lane for s in segments]
        self.lanes: slice | Tensor = slice(0, len(lanes))
        if lanes != list(range(len(lanes))):
            self.lanes = torch.tensor(lanes, device=device)
        self.gather_BT = torch.from_numpy(self.gather).to(device)
        self.scatter_T = torch.from_numpy(np.concatenate(scatter)).to(device)
        rows_B5T1 = torch.from_numpy(rows).to(device)[..., None]
        slot_S = torch.arange(self.slots, device=device)
        self.mask_BTS = (slot_S < rows_B5T1[:, HORIZON]) | ((slot_S >= rows_B5T1[:, LO]) & (slot_S < rows_B5T1[:, HI]))
        if window is not None:
            at = np.zeros((len(segments), 1, self.slots), np.int64)
            for b, s in enumerate(segments):
                at[b, 0, : s.end] = s.plan.rows[POSITION]
            self.mask_BTS &= rows_B5T1[:, POSITION] - torch.from_numpy(at).to(device) < window


LEAST_ROWS = 16  # rows times heads that matrix units take at least, so that a lower tile would not be cheaper
TILE_ROWS = 64  # rows times heads that one tile of attention holds at most
SHARES = (32, 16, 8, 4, 2, 1)  # into how many shares what a tile looks at may be cut
LEAST_SHARE = 64  # slots
NOWHERE = np.int32(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class Tiles:
    """Rows as attention kernels take them: up to `height` neighbouring rows of one sequence are a tile, which looks at slots
    [0, near) and [lo, far) of its lane, in `splits` shares."""

    numbers: Any  # [6, N]: first row, rows, lane, near, lo, far
    spans: Any  # [3, T]: horizon, lo and hi of every row
    height: int
    splits: int

    def to(self, device: torch.device) -> Tiles:
        numbers, spans = (torch.from_numpy(np.ascontiguousarray(x)).to(device, torch.long) for x in (self.numbers, self.spans))
        return Tiles(numbers, spans, self.height, self.splits)


def tiled(batch: Batch, fold: int, groups: int, programs: int, most_rows: int = TILE_ROWS) -> Tiles:
    """The tiles of a batch, in NumPy, for `fold` query heads on each of `groups` key heads, and a device that can run so many
    programs at a time."""
    rows = [s.rows for s in batch.segments]
    low, high = max(1, LEAST_ROWS // fold), max(1, most_rows // fold)  # two heights do for all: fewer sizes are captured
    height = low if max(rows) <= low else high
    first, lane = np.array([s.offset for s in batch.segments]), np.array([s.lane for s in batch.segments])
    if max(rows) > height:  # some segments are several tiles
        tiles = -(-np.array(rows) // height)
        within = np.arange(tiles.sum()) - (tiles.cumsum() - tiles).repeat(tiles)
        first, lane = first.repeat(tiles) + height * within, lane.repeat(tiles)
    _, _, horizon, lo, hi = batch.rows_5T
    numbers = np.empty((6, len(first)), np.int64)
    numbers[0], numbers[2] = first, lane
    numbers[1, :-1], numbers[1, -1] = first[1:] - first[:-1], len(horizon) - first[-1]
    near = numbers[3] = np.maximum.reduceat(horizon, first)
    far = numbers[5] = np.maximum(np.maximum.reduceat(hi, first), near)
    lo_seen = np.where(hi > lo, lo, NOWHERE)  # an empty interval reaches nowhere
    numbers[4] = np.minimum(np.maximum(np.minimum.reduceat(lo_seen, first), near), far)
    shares = min(programs // (len(first) * groups), int((near + far - numbers[4]).max()) // LEAST_SHARE)
    splits = next((n for n in SHARES if n <= shares), 1)
    return Tiles(numbers, batch.rows_5T[HORIZON:], height, splits)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, -1)


def stack(values: Sequence[Any], device: torch.device) -> Tensor | None:
    """One argument of a rule for many sequences, batch first: laws are padded with zeros, token lists with -1."""
    first = values[0]
    if first is None:
        return None
    if not isinstance(first, Tensor):
        longest = max(len(v) for v in values)
        return sent([[*v, *[-1] * (longest - len(v))] for v in values], torch.long, device)
    values = [v.to(device) for v in values]
    if len(values) == 1:
        return values[0][None]
    if _follow_each_other(values):
        return values[0].as_strided((len(values), *values[0].shape), (values[0].numel(), *values[0].stride()))
    if len({v.shape for v in values}) == 1:
        return torch.stack(list(values))
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)


def _follow_each_other(values: Sequence[Tensor]) -> bool:
    """Are they pieces of one tensor, one behind the other, as the laws of one forward are? They need not be copied."""
    first, size = values[0], values[0].numel()
    memory, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    return size > 0 and all(
        v.shape == first.shape
        and v.dtype == first.dtype
        and v.is_contiguous()
        and v.storage_offset() == begin + i * size
        and v.untyped_storage().data_ptr() == memory
        for i, v in enumerate(values)
    )
