"""The only ragged code: plans of many sequences become one forward, arguments of many rules become one batch.

B segments (one per sequence), T rows run in all, S slots of the longest lane, R rows that are read. Rows of all sequences are
laid end to end, so that the matrix products see no padding at all; only attention knows where one sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.rows import HI, HORIZON, LO, POSITION, TOKEN, Plan


@dataclass(frozen=True)
class Segment:
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
    """One forward as data: what a backbone needs to run it."""

    def __init__(self, work: Sequence[tuple[int, Plan, int]], context: int, device: torch.device):
        self.device = device
        self.segments: list[Segment] = []
        offset = 0
        for lane, plan, start in work:
            self.segments.append(Segment(lane, plan, start, offset))
            offset += self.segments[-1].rows
        rows = np.concatenate([s.run() for s in self.segments], 1)
        slots = np.concatenate([np.arange(s.start, s.end) + s.lane * context for s in self.segments])
        reads = np.concatenate([branch - s.start + s.offset for s in self.segments for branch in s.plan.reads])
        # One transfer for all integers of the forward.
        packed = np.concatenate([rows[TOKEN], rows[POSITION], slots, reads])
        numbers = torch.from_numpy(packed).to(device, torch.long, non_blocking=True)
        self.tokens_T, self.positions_T, self.slots_T, self.reads_R = numbers.split([offset, offset, offset, len(reads)])
        self._sights: dict[tuple[int, int | None, torch.dtype], Tensor | None] = {}
        self._padded: dict[int | None, Padded] = {}

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


def stack(values: Sequence[Any], device: torch.device) -> Tensor | None:
    """One argument of a rule for many sequences, batch first: laws are padded with zeros, token lists with -1."""
    first = values[0]
    if first is None:
        return None
    if not isinstance(first, Tensor):
        longest = max(len(v) for v in values)
        return torch.tensor([[*v, *[-1] * (longest - len(v))] for v in values], dtype=torch.long, device=device)
    values = [v.to(device) for v in values]
    if len(values) == 1:
        return values[0][None]
    if len({v.shape for v in values}) == 1:
        return torch.stack(list(values))
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)
