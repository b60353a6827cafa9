"""Who may go next: a bounded queue before a model's lanes, fair between clients.

An engine serves first come, first served. So only as many requests are handed to it as it has
lanes for, and a few more so that no lane waits; the others wait here, where they can be ordered.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from dataclasses import dataclass, field

from forerun.serve.errors import ApiError, busy, too_late, unavailable

LONGEST_RETRY = 60  # seconds
MEMORY = 0.9  # weight of the past in the mean time that a sequence takes


@dataclass(eq=False)
class Visit:
    """A request before and inside the gate."""

    client: str
    weight: int  # sequences that it brings
    priority: int
    number: int
    entered: asyncio.Future[None] = field(repr=False)
    since: float = field(default_factory=time.monotonic)
    inside: bool = False


class Gate:
    """Lets requests in: those of higher priority first, then clients that have least inside, then
    in the order of arrival."""

    def __init__(self, lanes: int, queue: int):
        self.lanes = lanes
        self.queue = queue
        self.inside = 0  # sequences
        self.waiting: list[Visit] = []
        self._by_client: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._seconds = 1.0  # that a sequence took, of late
        self._closed: ApiError | None = None

    @property
    def room(self) -> int:
        """Sequences that may be inside: a few wait in the engine, so that no lane does."""
        return self.lanes + max(1, self.lanes // 4)

    async def enter(
        self, client: str, weight: int = 1, priority: int = 0, timeout: float | None = None
    ) -> Visit:
        """Wait for a place. Refused at once if too many wait already."""
        if self._closed is not None:
            raise self._closed
        loop = asyncio.get_running_loop()
        visit = Visit(client, weight, priority, next(self._numbers), loop.create_future())
        self._join(visit)
        self._admit()
        try:
            await asyncio.wait_for(visit.entered, timeout)
        except BaseException as error:
            self._give_up(visit)
            if isinstance(error, TimeoutError):
                words = "the deadline passed while this request waited for a lane."
                raise too_late(words) from None
            raise
        return visit

    def _give_up(self, visit: Visit) -> None:
        """Wherever it is: it may have been let in at the very moment."""
        if visit in self.waiting:
            self.waiting.remove(visit)
        self.leave(visit)

    def _join(self, visit: Visit) -> None:
        """Take a place in the queue. Where it is full, a client that has far more waiting than
        this one gives up its latest place."""
        if len(self.waiting) >= self.queue and (self.inside or self.waiting):
            held = Counter(each.client for each in self.waiting)
            greediest, most = held.most_common(1)[0]
            if most <= held[visit.client] + 1:
                raise self._full()
            latest = max(
                (each for each in self.waiting if each.client == greediest),
                key=lambda each: (-each.priority, each.number),
            )
            self.waiting.remove(latest)
            latest.entered.set_exception(self._full())
        self.waiting.append(visit)

    def _full(self) -> ApiError:
        waits = len(self.waiting) * self._seconds / max(1, self.lanes)
        seconds = min(LONGEST_RETRY, max(1, math.ceil(waits)))
        return busy(
            f"{len(self.waiting)} requests wait already, and {self.queue} are the most: try again "
            f"in {seconds} seconds.",
            seconds,
        )

    def _admit(self) -> None:
        while self.waiting and self.inside < self.room:
            best = min(
                self.waiting,
                key=lambda each: (-each.priority, self._by_client[each.client], each.number),
            )
            self.waiting.remove(best)
            if best.entered.done():  # gave up
                continue
            best.inside = True
            self.inside += best.weight
            self._by_client[best.client] += best.weight
            best.since = time.monotonic()
            best.entered.set_result(None)

    def leave(self, visit: Visit) -> None:
        """A request is over; the next may come. Leaving twice does nothing."""
        if not visit.inside:
            return
        visit.inside = False
        self.inside -= visit.weight
        self._by_client[visit.client] -= visit.weight
        if not self._by_client[visit.client]:
            del self._by_client[visit.client]
        took = time.monotonic() - visit.since
        self._seconds = MEMORY * self._seconds + (1 - MEMORY) * took
        self._admit()

    def close(self, code: str = "shutting_down") -> None:
        """Let nobody in any more; those who wait are told."""
        self._closed = unavailable("this server is shutting down.", code)
        for visit in self.waiting:
            if not visit.entered.done():
                visit.entered.set_exception(self._closed)
        self.waiting.clear()
