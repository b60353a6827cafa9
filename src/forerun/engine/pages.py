"""Pages: the slots of a lane are a list of pages, and a page is found by the rows that it was
computed from.

A page is held by the lanes whose texts begin with it, and counted. One that nobody holds stays
where it is until its memory is wanted; the one that was let go longest ago goes first. A page can
be found only while it is full, and while all of its rows saw nothing but itself and the pages
before it: then its keys are a function of those rows. Whoever writes into a page that others hold
takes one of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PAGE = 64  # slots; attention kernels take as many at a time, so that they look up one page

CPU = torch.device("cpu")


@dataclass(frozen=True)
class PageShape:
    """How many pages there are, and how many slots each has."""

    count: int
    size: int = PAGE


def pages_for(slots: int, size: int = PAGE) -> int:
    """How many pages so many slots take."""
    return -(-slots // size)


class PageTable:
    """From a lane's slot to where it lives: the first slot in memory of each of its pages.

    As it begins, pages follow one another, lane after lane. Behind the last page is one more slot,
    `scratch_slot`, for rows that only pad a forward.
    """

    def __init__(
        self,
        lanes: int,
        context: int,
        pages: PageShape | None = None,
        device: torch.device = CPU,
    ):
        self.size = pages.size if pages else PAGE
        self.per_lane = pages_for(context, self.size)
        self.count = pages.count if pages else lanes * self.per_lane
        self.scratch_slot = self.count * self.size
        # Two entries more: padding rows have the first, and kernels may load both.
        self._flat = np.full(lanes * self.per_lane + 2, self.scratch_slot, np.int64)
        places = min(lanes * self.per_lane, self.count)
        self._flat[:places] = np.arange(places) * self.size
        self.starts_LP = self._flat[:-2].reshape(lanes, self.per_lane)
        self._changed = False
        shared = torch.from_numpy(self._flat)  # the same memory on a CPU
        self.on_device: Tensor = shared
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._staged = shared.pin_memory()
            self._copied = torch.cuda.Event()
            self.on_device = shared.to(device)

    @property
    def padding(self) -> int:
        """The entry of rows that only pad a forward."""
        return self.starts_LP.size

    def set(self, lane: int, index: int, page: int) -> None:
        self.starts_LP[lane, index] = page * self.size
        self._changed = True

    def to_device(self) -> None:
        """Let forwards that are queued from now on see what has changed."""
        if self._changed and self._copied is not None:
            self._copied.synchronize()
            self._staged.copy_(torch.from_numpy(self._flat))
            self.on_device.copy_(self._staged, non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self.on_device.device))
        self._changed = False

    def places(self, lanes_T: np.ndarray, slots_T: np.ndarray) -> np.ndarray:
        """Where slots of lanes live."""
        pages_T, within_T = np.divmod(slots_T, self.size)
        return self.starts_LP[lanes_T, pages_T] + within_T

    def span(self, lane: int, end: int) -> slice | np.ndarray:
        """Where the first slots of a lane live: in one piece, if they do."""
        pages = -(-end // self.size)
        starts = self.starts_LP[lane, :pages]
        first = int(starts[0])
        if pages == 1 or (np.diff(starts) == self.size).all():
            return slice(first, first + end)
        return (starts[:, None] + np.arange(self.size)).reshape(-1)[:end]


CopyPages = Callable[[int, int, int], None]  # from a slot, to a slot, so many


@dataclass
class PageStats:
    """What pages were good for."""

    asked_rows: int = 0  # of prompts, before the first row that is read
    found_rows: int = 0  # of those, in pages that were there already
    evicted: int = 0  # pages whose content was let go
    taken_back: int = 0  # times that a sequence gave its pages to an older one
    copied: int = 0

    @property
    def hit_rate(self) -> float:
        return self.found_rows / self.asked_rows if self.asked_rows else 0.0


class Content(NamedTuple):
    """What a page holds: its rows, after the page with this number."""

    after: int
    rows: bytes


class PagePool:
    """The pages of one model: who holds them, and what they hold.

    With `copies` a page that is found is copied, and a lane's pages lie side by side where they
    can: a CPU goes through them as one piece. Else it is held together.
    """

    def __init__(self, table: PageTable, copy: CopyPages, copies: bool):
        self.table = table
        self.size = table.size
        self.copies = copies
        self.holders = [0] * table.count
        self.stats = PageStats()
        self._copy = copy
        self._free = dict.fromkeys(reversed(range(table.count)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # held by nobody; the oldest first
        self._found_by: dict[Content, int] = {}
        self._content: dict[int, Content] = {}
        self._number: dict[int, int] = {}  # of what a page holds; never used again
        self._last_number = 0
        # Lanes without a request. They hold what they had, until it is wanted.
        self._resting: OrderedDict[int, Callable[[], None]] = OrderedDict()

    @property
    def in_use(self) -> int:
        """Pages that lanes hold."""
        return self.table.count - len(self._free) - len(self._kept)

    @property
    def kept(self) -> int:
        """Pages that nobody holds and that can be found."""
        return len(self._kept)

    def ensure(self, count: int) -> bool:
        """Can so many pages be taken? Lanes that rest give theirs, if need be."""
        while len(self._free) + len(self._kept) < count and self._resting:
            _, release = self._resting.popitem(last=False)
            release()
        return len(self._free) + len(self._kept) >= count

    def rest(self, lane: int, release: Callable[[], None]) -> None:
        self._resting[lane] = release

    def wake(self, lane: int) -> None:
        self._resting.pop(lane, None)

    def take(self, wanted: int) -> int:
        """A page for new rows, if possible this one."""
        if wanted in self._free:
            page = wanted
        elif self.copies and wanted in self._kept:
            page = self._evicted(wanted)
        elif self._free:
            page = next(reversed(self._free))
        else:
            page = self._evicted(next(iter(self._kept)))
        self._free.pop(page)
        self.holders[page] = 1
        return page

    def _evicted(self, page: int) -> int:
        self.stats.evicted += 1
        self._kept.pop(page)
        self.hide(page)
        self._free[page] = None
        return page

    def hold(self, page: int) -> None:
        self.holders[page] += 1
        self._kept.pop(page, None)

    def drop(self, page: int) -> None:
        self.holders[page] -= 1
        if self.holders[page]:
            return
        if page in self._content:
            self._kept[page] = None
        else:
            self._free[page] = None

    def copy(self, source: int, target: int) -> None:
        self.stats.copied += 1
        self._copy(source * self.size, target * self.size, self.size)

    def find(self, content: Content) -> int | None:
        return self._found_by.get(content)

    def number_of(self, page: int) -> int:
        return self._number[page]

    def held_prefix(self, rows: np.ndarray) -> int:
        """How many leading pages of these rows are held by somebody."""
        number = 0
        for index in range(rows.shape[1] // self.size):
            part = rows[:, index * self.size : (index + 1) * self.size]
            page = self.find(Content(number, part.tobytes()))
            if page is None or not self.holders[page]:
                return index
            number = self.number_of(page)
        return rows.shape[1] // self.size

    def publish(self, page: int, content: Content) -> int:
        """Let a page be found, and number what it holds. Where another page holds the same, that
        one is found."""
        known = self._found_by.get(content)
        if known is None:
            self._last_number += 1
            self._found_by[content] = page
            self._content[page] = content
            self._number[page] = self._last_number
            known = page
        return self._number[known]

    def hide(self, page: int) -> None:
        """A page is about to be written over: it is not found any more."""
        content = self._content.pop(page, None)
        if content is not None:
            del self._found_by[content]
            del self._number[page]

    def clear(self) -> None:
        """Let go of everything that nobody works with."""
        while self._resting:
            _, release = self._resting.popitem(last=False)
            release()
        for page in list(self._kept):
            self._evicted(page)

    def check(self, lists: Sequence[Sequence[int]]) -> None:
        """Do the counts agree with what lanes hold? For tests."""
        counted = [0] * self.table.count
        for pages in lists:
            for page in pages:
                counted[page] += 1
        assert counted == self.holders, "pages are held that no lane has"
        unheld = {page for page, held in enumerate(counted) if not held}
        assert unheld == set(self._free) | set(self._kept), "a page was lost"
        assert not set(self._free) & set(self._kept)
        assert set(self._kept) <= set(self._content)
        assert {page: content for content, page in self._found_by.items()} == self._content
