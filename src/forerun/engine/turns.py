"""Who takes part in a forward, and with which of their rows.

Everybody who waits for a model takes part, with two exceptions. A long prompt is read a chunk at a
time while others write, so that no stream stands still for it. And where pages run out, a younger
sequence gives its own to an older one: nothing is lost, it is computed again when there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.engine.cache import Memo
from forerun.engine.host import Host
from forerun.engine.pages import pages_for
from forerun.engine.ticket import Running
from forerun.sequence.question import Continuation, Question
from forerun.sequence.rows import HI, HORIZON, Plan, causal_rows

GROWTH = 2  # pages that are left for each sequence at work when another begins
FEW = 4  # rows that are not read: so many are no prompt
ALONE = 2048  # rows of prompts in one forward where nobody writes


class Part(NamedTuple):
    """What one sequence runs in a forward: its plan from `start` on, or the beginning of that."""

    one: Running
    plan: Plan
    start: int
    is_whole: bool
    is_prompt: bool = False  # does it read many rows that nobody asks about?


class Found(NamedTuple):
    """What of a plan must run, beginning with so many rows before the first one that is read."""

    one: Running
    plan: Plan
    start: int
    unread: int

    @property
    def rows(self) -> int:
        return self.plan.length - self.start


class Turn:
    """One forward in the making."""

    def __init__(self, host: Host, running: Sequence[Running], from_all: bool = False):
        """With `from_all` even those give pages back whose slots cannot be computed again as they
        were: an approximate cache is then refreshed before its time."""
        self._host = host
        self._from_all = from_all
        self._running = running
        self._older = {one: older for older, one in enumerate(running)}
        self._waiting = [one for one in running if _question(one, host) is not None]
        self._being_read: set[tuple[bytes, ...]] = set()
        self.gave_back = False  # did somebody give pages back?

    def parts(self, beside: float | None = None) -> list[Part]:
        """Whoever takes part. A draft model is told what a step takes `beside` which it reads."""
        found = [self._found(one) for one in self._waiting if self._may_go_on(one)]
        reading = {each.one for each in found if each.unread > FEW}
        left = ALONE
        if reading and self._somebody_writes(reading):
            writing = [each.rows for each in found if each.unread <= FEW]
            behind = max(0, len(reading) - 1)  # the first one
            company = sum(writing) + behind * max(writing, default=1)
            left = self._host.pace.budget(sum(writing), company, beside)
        parts = []
        for one, plan, start, unread in found:
            if self._memo(one).gave_back:  # to an older one, just now
                continue
            if unread > FEW:
                part = self._part(one, start, left)
            else:
                part = Part(one, plan, start, is_whole=True)
            if part is None or not self._make_room(part):
                continue
            if part.is_prompt:
                left -= part.plan.length - start
            parts.append(part)
        return parts

    def beside(self, writers: Sequence[Running]) -> list[Part] | None:
        """What all others read beside those who write a token each, whatever these wait for as yet.
        None if somebody wants something else, or has no pages."""
        write = set(writers)
        waiting = [one for one in self._waiting if one not in write]
        if any(self._memo(one).gave_back for one in waiting):
            return None
        if len(writers) + len(waiting) < len(self._running):  # some wait for another model
            return None
        found = [self._found(one) for one in waiting]
        if any(each.unread <= FEW for each in found):
            return None
        left = self._host.pace.budget(len(writers), len(writers) + len(found) - 1)
        parts = []
        for one, plan, start, _ in found:
            part = self._part(one, start, left)
            if part is not None:
                self._memo(one).count_found(plan, start)
                left -= part.plan.length - start
                parts.append(part)
        return parts

    def _found(self, one: Running) -> Found:
        plan = plan_of(one)
        start = self._host.memos[one.lane].find(plan)
        return Found(one, plan, start, _unread(plan, start))

    def _somebody_writes(self, reading: set[Running]) -> bool:
        return any(one.seq.trace.forwards and one not in reading for one in self._running)

    def _may_go_on(self, one: Running) -> bool:
        """Is there room again for a sequence that gave its pages back, and for those before it to
        grow?"""
        memo = self._memo(one)
        if not memo.gave_back:
            return True
        older = self._older[one]
        if not older:
            memo.gave_back = False
            return True
        rows = plan_of(one).rows
        needed = pages_for(rows.shape[1], self._host.pool.size) + GROWTH * older
        if not self._host.pool.copies:
            needed -= self._host.pool.held_prefix(rows)
        memo.gave_back = not self._host.pool.ensure(needed)
        return not memo.gave_back

    def _memo(self, one: Running) -> Memo:
        return self._host.memos[one.lane]

    def _part(self, one: Running, start: int, left: int) -> Part | None:
        """What a sequence that reads runs if so many rows of prompts are left to run; None: nothing
        yet."""
        plan = plan_of(one)
        unread = _unread(plan, start)
        if left <= 0 or self._is_being_read(plan, start):
            return None
        end = last_closed(plan, start, start + left) if unread > left else None
        if end is None:
            return Part(one, plan, start, is_whole=True, is_prompt=True)
        return Part(one, beginning(plan, end), start, is_whole=False, is_prompt=True)

    def _is_being_read(self, plan: Plan, start: int) -> bool:
        """Does another read the same page in this forward? Then it will be found in the next."""
        size = self._host.pool.size
        end = (start // size + 1) * size
        if end > plan.stored or last_closed(plan, end - 1, end) is None:
            return False
        page = (plan.rows[:, :end].tobytes(),)
        if page in self._being_read:
            return True
        self._being_read.add(page)
        return False

    def _make_room(self, part: Part) -> bool:
        """Give a sequence the pages that it needs now, if need be those of younger ones."""
        memo = self._memo(part.one)
        asked = part.one.waits_for
        ahead = asked.tokens if isinstance(asked, Continuation) else 0
        plan = plan_of(part.one)
        while True:
            needed = memo.pages_needed(part.start, plan.length + ahead)
            if not needed or self._host.pool.ensure(needed):
                break
            if not self._take_from_youngest(self._older[part.one]):
                return False
        memo.count_found(plan, part.start)
        memo.claim(part.start, part.plan.length + ahead)
        return True

    def _take_from_youngest(self, older: int) -> bool:
        for one in reversed(self._running[older + 1 :]):
            memo = self._memo(one)
            if memo.pages and (self._from_all or not memo.relied_on):
                memo.release()
                memo.gave_back = True
                self._host.pool.stats.taken_back += 1
                self.gave_back = True
                return True
        return False


def _question(one: Running, host: Host) -> Question | None:
    asked = one.waits_for
    return asked if isinstance(asked, Question) and asked.host is host else None


def plan_of(one: Running) -> Plan:
    assert isinstance(one.waits_for, Question)
    return one.waits_for.plan


def _unread(plan: Plan, start: int) -> int:
    """Rows that must run before the first one that is read."""
    return 0 if plan.trusted else plan.first_read - start


def last_closed(plan: Plan, start: int, limit: int) -> int | None:
    """The last place up to `limit` at which a plan can be cut: rows before it see nothing behind
    it, and are remembered."""
    limit = min(limit, plan.stored)
    if start < limit <= plan.causal:
        return limit
    sees = np.maximum(plan.rows[HORIZON, :limit], plan.rows[HI, :limit])
    closed = np.flatnonzero(np.maximum.accumulate(sees) <= np.arange(1, limit + 1)) + 1
    return int(closed[-1]) if len(closed) and closed[-1] > start else None


def beginning(plan: Plan, end: int) -> Plan:
    """The first rows of a plan. The last one is read, though nobody asked: a forward without
    reads would be a case of its own."""
    rows = plan.rows[:, :end]
    causal = min(plan.causal, end)
    reads = [np.array([end - 1])]
    return Plan(rows, reads, end, plan.trusted, plan.relied_on, causal, first_read=end - 1)


def has_room(host: Host, text: np.ndarray, running: int) -> bool:
    """Is there room for a text, and for so many others to grow?"""
    pool = host.pool
    needed = pages_for(len(text) + 1, pool.size) + GROWTH * running
    if pool.ensure(needed):
        return True
    return not pool.copies and pool.ensure(needed - pool.held_prefix(causal_rows(text)))
