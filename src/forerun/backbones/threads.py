"""How many threads a CPU's forwards use: all or one, whichever is faster now.

Beside a busy neighbour several threads wait for each other at every product: whoever has no core is
waited for, for as long as a time slice. One thread waits for nobody, and a small forward may be
faster with one at any time. So for each kind of forward (how many rows, roughly) the other choice
is tried soon after the first forwards, again when several in a row take far longer than they did,
and now and then. In a trial both take turns for a few forwards, fewer if one is much slower.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

FAR_LONGER = 4.0  # times what forwards of a kind take
MUCH_SLOWER = 2.0  # than the other choice: a trial is over early
STRIKES = 3
REMEMBERED = 7  # forwards that say how long one takes
TRIED = 4  # forwards of each choice in a trial
FEW_TRIED = 2  # after which it may be over
CLEARLY = 0.95  # of the time that the other choice takes: what is as fast is not changed
FIRST_PAUSE = 1.0  # seconds until the next trial; it doubles while nothing changes
LONGEST_PAUSE = 30.0
MANY_ROWS = 64  # a prompt: all threads have enough to do, and a trial would be felt
FEW_ROWS = 8  # up to which every number of rows is a kind: each row takes its time

Ran = TypeVar("Ran")


def once(ran: object) -> int:
    """The number of forwards, where it was one."""
    return 1


class _Trial:
    """Forwards of both choices in turn, so that both meet the same neighbours and texts as long.
    The first forwards of all are slow: what came before says little."""

    def __init__(self) -> None:
        self._other: list[float] = []
        self._own: list[float] = []

    @property
    def other_is_next(self) -> bool:
        return len(self._other) == len(self._own)

    def note(self, seconds: float) -> None:
        (self._other if self.other_is_next else self._own).append(seconds)

    def outcome(self) -> bool | None:
        """Is the other choice faster? None: nobody knows yet."""
        if not self.other_is_next or len(self._own) < FEW_TRIED:
            return None
        other = statistics.median(self._other)
        own = statistics.median(self._own)
        if len(self._own) < TRIED and max(other, own) < MUCH_SLOWER * min(other, own):
            return None
        return other < CLEARLY * own


class _Kind:
    """The choice for one kind of forward."""

    def __init__(self, most: int, has_trials: bool):
        self._most = most
        self._has_trials = has_trials
        self._chosen = most
        self._times: deque[float] = deque(maxlen=REMEMBERED)  # of the choice that was made
        self._trial: _Trial | None = None
        self._strikes = 0
        self._pause = FIRST_PAUSE
        self._try_at: float | None = None

    @property
    def threads(self) -> int:
        """Of the next forward."""
        trying = self._trial is not None and self._trial.other_is_next
        return self._other if trying else self._chosen

    @property
    def _other(self) -> int:
        return 1 if self._chosen == self._most else self._most

    def note(self, seconds: float, now: float) -> None:
        """Note how long a forward took, and choose for the next."""
        if self._trial is not None:
            self._trial.note(seconds)
            self._judge(self._trial.outcome(), now)
            return
        usual = statistics.median(self._times) if self._times else seconds
        self._strikes = self._strikes + 1 if seconds > FAR_LONGER * usual else 0
        if not self._strikes:
            self._times.append(seconds)
        if self._has_trials and self._try_at is None and len(self._times) >= STRIKES:
            self._try_at = now
        if self._strikes >= STRIKES:
            self._pause = FIRST_PAUSE
            self._try()
        elif self._try_at is not None and now >= self._try_at:
            self._try()

    def _try(self) -> None:
        self._strikes = 0
        self._times.clear()  # what was true may not be
        self._trial = _Trial()

    def _judge(self, other_is_faster: bool | None, now: float) -> None:
        if other_is_faster is None:
            return
        self._trial = None
        self._pause = FIRST_PAUSE if other_is_faster else min(2 * self._pause, LONGEST_PAUSE)
        if other_is_faster:
            self._chosen = self._other
        self._try_at = now + self._pause


class ThreadChoice:
    """Times forwards and chooses between all threads and one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._most = torch.get_num_threads()
        self._kinds: dict[int, _Kind] = {}  # by rows, or their magnitude
        self._noting = threading.Lock()  # engines that share weights note at the same time

    def threads(self, rows: int) -> int:
        """How many threads the next forward of so many rows uses."""
        return self._kind(rows).threads

    def run(
        self, rows: int, forward: Callable[[], Ran], forwards: Callable[[Ran], int] = once
    ) -> Ran:
        """Run a forward with the threads that are chosen now, or several: what comes of them says
        how many."""
        if self._most == 1:
            return forward()
        kind = self._kind(rows)
        start = self._clock()
        ran = forward() if kind.threads == self._most else self._alone(forward)
        end = self._clock()
        if count := forwards(ran):
            with self._noting:
                kind.note((end - start) / count, end)
        return ran

    def by_rows(self, most: int) -> list[int]:
        """How many threads the next forwards use, by their rows."""
        now = torch.get_num_threads()  # all of them, as `run` has it
        return [now if self.threads(rows) == self._most else 1 for rows in range(most + 1)]

    def note(self, forwards: Sequence[int], seconds: Sequence[float]) -> None:
        """Note what forwards took that were run elsewhere, by their rows; those of a kind together,
        as they all used as many threads."""
        if self._most == 1:
            return
        found: dict[_Kind, tuple[int, float]] = {}
        for rows, (count, spent) in enumerate(zip(forwards, seconds)):
            if count:
                kind = self._kind(rows)
                before, took = found.get(kind, (0, 0.0))
                found[kind] = before + count, took + spent
        now = self._clock()
        with self._noting:
            for kind, (count, took) in found.items():
                kind.note(took / count, now)

    def _kind(self, rows: int) -> _Kind:
        size = rows if rows <= FEW_ROWS else FEW_ROWS + rows.bit_length()
        if size not in self._kinds:
            self._kinds[size] = _Kind(self._most, has_trials=rows < MANY_ROWS)
        return self._kinds[size]

    def _alone(self, forward: Callable[[], Ran]) -> Ran:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return forward()
        finally:
            torch.set_num_threads(before)
