"""How many threads a CPU's forwards use, looked at again while they run.

Beside a busy neighbour several threads wait for each other at every product: whoever has no core is
waited for, for as long as a time slice. One thread waits for nobody. So a forward that takes far
longer than those like it did, several times in a row, goes on with one thread. After a while all
threads are tried again, and whichever is faster stays.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

FAR_LONGER = 4.0  # times what forwards of as many rows take
STRIKES = 3
TRIED = 4  # forwards with all threads, to see whether the neighbour is gone
FIRST_PAUSE = 1.0  # seconds until all threads are tried again; it doubles
LONGEST_PAUSE = 30.0


class ThreadChoice:
    """Times forwards and chooses between all threads and one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._most = torch.get_num_threads()
        self.threads = self._most
        # seconds that a forward of so many rows usually takes, by threads and rows' magnitude
        self._usual: dict[tuple[int, int], float] = {}
        self._strikes: dict[int, int] = defaultdict(int)
        self._pause = FIRST_PAUSE
        self._try_at = 0.0
        self._trials = 0

    def run(self, rows: int, forward: Callable[[], Tensor]) -> Tensor:
        """Run a forward with the threads that are chosen now."""
        if self._most == 1:
            return forward()
        start = self._clock()
        try:
            return self._alone(forward) if self.threads == 1 else forward()
        finally:
            end = self._clock()
            self._note(rows, end - start, end)

    def _alone(self, forward: Callable[[], Tensor]) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return forward()
        finally:
            torch.set_num_threads(before)

    def _note(self, rows: int, seconds: float, now: float) -> None:
        size = rows.bit_length()
        key = (self.threads, size)
        usual = self._usual.get(key)
        if self.threads == 1:
            self._usual[key] = seconds if usual is None else 0.7 * usual + 0.3 * seconds
            if now >= self._try_at:
                self._trials = TRIED
                self.threads = self._most
        elif self._trials:
            self._note_trial(size, seconds, now)
        elif usual is None:
            self._usual[key] = seconds
        elif seconds > FAR_LONGER * usual:
            self._strike(size, now)
        else:
            self._strikes[size] = 0
            self._usual[key] = 0.9 * usual + 0.1 * seconds

    def _note_trial(self, size: int, seconds: float, now: float) -> None:
        """One of a few forwards with all threads: is any of them slower than one thread was?"""
        alone = self._usual.get((1, size))
        if alone is not None and seconds > alone:
            self._trials = 0
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._rest(now)
            return
        self._trials -= 1
        if not self._trials:
            self._pause = FIRST_PAUSE

    def _strike(self, size: int, now: float) -> None:
        self._strikes[size] += 1
        if self._strikes[size] >= STRIKES:
            self._strikes.clear()
            self._rest(now)

    def _rest(self, now: float) -> None:
        self.threads = 1
        self._try_at = now + self._pause
