"""How many rows of prompts a forward reads while others write: as many as leave their steps below
twice the usual time, by what steps have taken.

Usual is a step of the whole company, those included who wait for a prompt before theirs: they will
write in every step soon. Where few write and many wait, prompts would else be read by a few rows at
a time, and those who wait would be let in one by one.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from math import inf

import torch

from forerun.engine.costs import StepCosts, rows_bucket

FIRST = {"cpu": 4}  # rows to begin with, or as many as are written, if those are more
FIRST_ELSEWHERE = 128
LEAST = 2
MOST = 2048
MORE = 0.7  # of a usual step, that reading may take: what it takes is known from the last chunks
LOOKS = 3  # chunks whose middle one counts
RECENT = 9  # steps of one size that count, and chunks
AS_CHEAP = 1.3  # times what a chunk takes: one of more rows that takes no more is as good
TRIES = 2  # chunks of more rows, before it is said what those take: one may be counted late
MOST_TRIED = 512  # rows: on a GPU, forwards of more are not captured
LOOK_AGAIN = 64  # chunks one after the other, after which a step reads nothing


class Added:
    """Seconds that the last chunks of some size added to their steps."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=LOOKS)
        self.last = 0  # the number of the last one

    @property
    def usual(self) -> float:
        return statistics.median(self.seconds)

    def count(self, seconds: float, number: int) -> None:
        if number - self.last > LOOK_AGAIN:
            self.seconds.clear()
        self.seconds.append(seconds)
        self.last = number


class Pace:
    """The rows of one model. They are powers of two, so that few sizes of forwards are captured.

    Processes that share a model must all do the same, so there they stay as they are.
    """

    def __init__(self, costs: StepCosts, rows: int | None = None):
        self.costs = costs
        self.rows = rows or FIRST.get(costs.device_type, FIRST_ELSEWHERE)  # that were allowed last
        self._fixed = rows is not None or several_processes()
        self._first = self.rows
        self._usual: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._per_row: deque[float] = deque(maxlen=LOOKS)  # seconds, of rows that were read
        self._added: dict[int, Added] = {}  # by rows of a chunk
        self._number = 0  # of the last chunk
        self._read = 0  # rows of the last chunk
        self._chunks = 0  # since a step that read nothing
        self._looked: set[int] = set()  # sizes of steps that were to read nothing

    def budget(self, writing: int, company: int = 0, beside: float | None = None) -> int:
        """How many rows of prompts a forward may read in which others have so many, and will have
        as many as a `company` when all write. A draft model holds up steps of another one: of those
        it may add to what one takes `beside` it."""
        if self._fixed:
            return self.rows
        if beside is not None:
            self.rows = self._fits(writing, MORE * beside)
            return self.rows
        if writing and self._must_look(rows_bucket(writing)):
            return 0
        allowed, most = self._allowed(writing, max(writing, company))
        self.rows = self._as_cheap(allowed, most, self._usual_step(writing) or inf)
        return self.rows

    def _must_look(self, size: int) -> bool:
        """Is this a step that reads nothing, to see what one takes? Once for each size, and now and
        then while prompts never end: or what further writers cost would be taken for the price of
        rows that are read, and ever fewer would be."""
        if (size in self._usual or size in self._looked) and self._chunks < LOOK_AGAIN:
            return False
        self._looked.add(size)
        self._chunks = 0
        return True

    def _as_cheap(self, rows: int, most: int, usual: float) -> int:
        """More rows than are allowed, up to so many, if those were seen to take hardly longer than
        fewer: what a chunk adds to a step may be the price of reading at all. Where even the fewest
        add more than they may, twice as many are tried now and then."""
        added = {
            size: each
            for size, each in self._added.items()
            if rows <= size <= most and each.last > self._number - RECENT
        }
        if not added:
            return rows
        least = min(added)
        enough = AS_CHEAP * added[least].usual
        cheap = [n for n, each in added.items() if len(each.seconds) >= TRIES]
        largest = max((n for n in cheap if added[n].usual <= enough), default=least)
        more = 2 * largest
        over = added[least].usual > MORE * usual and more <= min(most, MOST_TRIED)
        if over and len(added[largest].seconds) >= TRIES and self._may_try(more):
            return more
        return largest if largest > least else rows

    def _may_try(self, rows: int) -> bool:
        tried = self._added.get(rows)
        if tried is None or len(tried.seconds) < TRIES:
            return True
        return self._number - tried.last > LOOK_AGAIN

    def _allowed(self, writing: int, company: int) -> tuple[int, int]:
        """Rows that are allowed, and the most that the costs of forwards allow.

        Where a row that is read costs what a written one does, as many as are written are fine.
        Later it is known better; then too, no chunk is more than twice as long as the last."""
        usual = self._usual_step(writing)
        if usual is None or not self._per_row:
            first = power_of_two(max(self._first, MORE * company))
            return first, first
        per_row = max(self._per_row[-1], statistics.median(self._per_row), 1e-9)
        allowed = MORE * usual / per_row + (1 + MORE) * (company - writing)
        more = inf
        if self.costs.known:  # a launch of plain text is a step
            whole = self.costs.forward(max(1, company))
            more = MORE * self.costs.at_once * whole + whole - self.costs.forward(max(1, writing))
        most = power_of_two(self._fits(writing, more))
        return min(power_of_two(min(allowed, 2 * max(self._read, self._first))), most), most

    def _fits(self, writing: int, more: float) -> int:
        """What fits into so many more seconds by the costs of forwards, where those are known: they
        say where more rows begin to cost, before it is tried."""
        rows = MOST
        if self.costs.known:
            most = more + (self.costs.forward(writing) if writing else 0.0)
            while rows > LEAST and self.costs.forward(writing + rows) > most:
                rows //= 2
        return rows

    def _usual_step(self, writing: int) -> float | None:
        """What a step takes that reads nothing: as seen, or as one of fewer rows took."""
        sizes = [size for size in self._usual if size <= rows_bucket(writing)]
        return statistics.median(self._usual[max(sizes)]) if sizes else None

    def stepped(self, seconds: float, writing: int, reading: int) -> None:
        """A step of those who write took so long. It had so many rows of theirs, and read so many
        rows of prompts."""
        if self._fixed or not writing:
            return
        if not reading:
            self._usual[rows_bucket(writing)].append(seconds)
            self._chunks = 0
            return
        self._chunks += 1
        usual = self._usual_step(writing)
        if usual is not None:
            added = max(0.0, seconds - usual)
            self._per_row.append(added / reading)
            self._number += 1
            self._added.setdefault(power_of_two(reading), Added()).count(added, self._number)
            self._read = reading


def power_of_two(rows: float) -> int:
    """The largest one up to so many, within bounds."""
    whole = int(min(max(rows, LEAST), MOST))
    return 1 << (whole.bit_length() - 1)


def several_processes() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
