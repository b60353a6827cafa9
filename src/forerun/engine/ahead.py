"""A forward that is begun before the host knows its tokens.

Whoever asks what follows a text, and draws a token of the answer, will ask what follows that token. So the next forward can be
queued behind the draw, with tokens taken from where they were drawn, and all that the host has to do for one token is done while
the device works on the next. It is a guess at what will be asked: where a text has ended, or something else is asked, what was
begun is not looked at. It has written only slots of which nobody says that they hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.engine.pack import Batch
from forerun.rows import TOKEN, Plan, one_later
from forerun.transfer import sent

if TYPE_CHECKING:
    from forerun.engine.serve import Host, Ticket


class Ahead:
    """A forward of one row per sequence, whose tokens are drawn but not known."""

    def __init__(self, host: Host, tickets: Sequence[Ticket], plans: Sequence[Plan]):
        self.host, self.plans = host, dict(zip(tickets, plans))
        self.logits_RV: Tensor | None = None

    @classmethod
    def guess(cls, tickets: Sequence[Ticket]) -> Ahead | None:
        """What all these will ask next if they keep what they draw now, where that is plain text one token longer."""
        first = tickets[0].asked
        plans = [_next_plan(ticket, first.host) for ticket in tickets] if first is not None else [None]
        return None if first is None or None in plans else cls(first.host, tickets, plans)  # type: ignore[arg-type]

    def batch(self, drawn_B: Tensor) -> Batch:
        work = [(ticket.lane, plan, plan.stored - 1) for ticket, plan in self.plans.items()]
        batch = Batch(work, self.host.room, self.host.backbone.device)  # type: ignore[arg-type]
        # What is no token is not asked about: -1 of a law without an outcome, or what a rule drew that is about something else.
        batch.drawn_T = drawn_B.clamp(0, self.host.backbone.vocab - 1)
        return batch

    def learn(self, tokens: Sequence[int]) -> None:
        """The tokens have arrived."""
        for plan, token in zip(self.plans.values(), tokens, strict=True):
            plan.rows[TOKEN, -1] = token

    def foresaw(self, ticket: Ticket) -> bool:
        """Is it waiting for what was guessed?"""
        plan, ask = self.plans.get(ticket), ticket.waits_for
        return plan is not None and ask.host is self.host and _same(plan, ask.plan)  # type: ignore[union-attr]

    def logits_of(self, tickets: Sequence[Ticket]) -> Tensor:
        """What was begun, for those who are left."""
        assert self.logits_RV is not None
        if len(tickets) == len(self.plans):
            return self.logits_RV
        rows = [row for row, ticket in enumerate(self.plans) if ticket in tickets]
        return self.logits_RV[sent(rows, torch.long, self.logits_RV.device)]


def _next_plan(ticket: Ticket, host: Host) -> Plan | None:
    """What one sequence will ask, if it can be known: its last question, to the same model and not for a draft, one token later."""
    ask = ticket.asked
    if ask is None or ask.drafting or ask.host is not host or ticket.seq.at_last:
        return None
    plan = one_later(ask.plan)
    if plan is None or plan.stored > min(host.room, host.backbone.context):
        return None
    return plan if host.memos[ticket.lane].start(plan) == plan.stored - 1 else None  # type: ignore[index]


def _same(one: Plan, other: Plan) -> bool:
    reads = ([read.tolist() for read in plan.reads] for plan in (one, other))
    return np.array_equal(one.rows, other.rows) and one.stored == other.stored and next(reads) == next(reads)
