"""Who goes next, and who need not begin: priorities and deadlines.

Higher priority goes first; of equal ones, whoever is due sooner; of those, whoever came first. A
request that would miss its deadline is refused before it takes a lane from others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import TYPE_CHECKING

from forerun.errors import TooLate

if TYPE_CHECKING:
    from forerun.engine.host import Host
    from forerun.engine.ticket import Ticket

RECENT = 32  # requests that tell how long texts get, and how long they take
ENOUGH = 4


@dataclass(frozen=True)
class Due:
    """When a request must be over, and on which model it runs."""

    seconds: float  # as asked
    host: Host
    partial: bool = False  # will a part of the text do?


def due_at(ticket: Ticket) -> float:
    """The moment at which a ticket must be over."""
    return inf if ticket.due is None else ticket.submitted + ticket.due.seconds


def next_ticket(queue: Sequence[Ticket]) -> Ticket:
    """The ticket of a queue that goes next."""
    best = min(range(len(queue)), key=lambda i: (-queue[i].priority, due_at(queue[i]), i))
    return queue[best]


class Foresight:
    """How long requests will take, from those that are over."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque(maxlen=RECENT)
        self._seconds: deque[float] = deque(maxlen=RECENT)

    def ended(self, ticket: Ticket) -> None:
        """A request is over. How long a text got says something only if nobody cut it off."""
        if ticket.started is None or ticket.ended is None or ticket.error is not None:
            return
        self._seconds.append(ticket.ended - ticket.started)
        if ticket.seq.finish_reason == "stop":
            self._tokens.append(ticket.seq.filled)

    def tokens(self, ticket: Ticket) -> float:
        """How many tokens a request will get: as many as it asks for, or as texts usually have. One
        before anything is known: nobody is refused on a guess."""
        most = len(ticket.seq.blanks)
        if ticket.due is not None and ticket.due.partial:
            return 1
        if ticket.ends_early:
            return min(most, median(self._tokens)) if len(self._tokens) >= ENOUGH else 1
        return most

    def seconds(self, ticket: Ticket) -> float:
        """How long a request will take once it has a lane."""
        due = ticket.due
        if due is None or not due.host.costs.known:
            return 0.0
        costs = due.host.costs
        steps = self.tokens(ticket) / max(1.0, costs.pace)
        return costs.forward(max(1, ticket.seq.known)) + (steps - 1) * costs.plain(costs.sequences)

    def wait(self, ahead: int, lanes: int) -> float:
        """How long a request will wait for a lane, if so many that wait go first and none is
        free."""
        if len(self._seconds) < ENOUGH:
            return 0.0
        return (ahead + 1) / lanes * median(self._seconds)

    def refusal(self, ticket: Ticket, waits: float) -> TooLate | None:
        """The error for a request that would miss its deadline, if it would."""
        needs = waits + self.seconds(ticket)
        left = due_at(ticket) - time.perf_counter()
        if ticket.due is None or needs <= left:
            return None
        waiting = f", {waits:.2g} of them waiting for a lane," if waits else ""
        return TooLate(
            f"deadline={ticket.due.seconds:g}: this request would take about {needs:.2g} seconds"
            f"{waiting} and {max(0.0, left):.2g} are left: give it more, or ask for fewer tokens."
        )


def overdue(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Those whose time is up."""
    now = time.perf_counter()
    return [ticket for ticket in tickets if ticket.due is not None and now > due_at(ticket)]
