"""A forward that begins before the host knows its tokens.

Whoever asks what follows a text, and draws a token of the answer, will ask what follows that token.
So the next forward can be queued behind the draw, with tokens taken from where they were drawn.
What the host does for one token then happens while the device works on the next. It is a guess: if
a text has ended, or something else is asked, nobody looks at the result. A prefetched forward
writes only unclaimed slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.engine.host import Host
from forerun.engine.pack import Batch
from forerun.engine.ticket import Running
from forerun.probability.transfer import to_device
from forerun.sequence.question import Question
from forerun.sequence.rows import TOKEN, Plan, next_token_plan


class Prefetch:
    """A forward of one row per sequence, whose tokens are drawn but not known."""

    def __init__(self, host: Host, plans: dict[Running, Plan]):
        self.host = host
        self.plans = plans
        self.logits_RV: Tensor | None = None

    @classmethod
    def guess(cls, running: Sequence[Running]) -> Prefetch | None:
        """What all these will ask next if they keep what they draw now, where that is plain text
        one token longer, of one model."""
        question = running[0].last_question
        if question is None:
            return None
        host = question.host
        assert isinstance(host, Host)
        plans: dict[Running, Plan] = {}
        for one in running:
            plan = _next_plan(one, host)
            if plan is None:
                return None
            plans[one] = plan
        return cls(host, plans)

    def batch(self, drawn_B: Tensor) -> Batch:
        work = [(one.lane, plan, plan.stored - 1) for one, plan in self.plans.items()]
        batch = self.host.batch(work)
        # A law without an outcome draws -1, which is no token.
        batch.drawn_T = drawn_B.clamp(0, self.host.backbone.vocab - 1)
        return batch

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """The tokens have arrived."""
        for plan, token in zip(self.plans.values(), tokens, strict=True):
            plan.rows[TOKEN, -1] = token

    def matches(self, one: Running) -> bool:
        """Does it wait for what was guessed?"""
        plan = self.plans.get(one)
        question = one.waits_for
        if plan is None or not isinstance(question, Question):
            return False
        return question.host is self.host and _same(plan, question.plan)

    def logits_of(self, running: Sequence[Running]) -> Tensor:
        """The result, for those who are left."""
        assert self.logits_RV is not None
        if len(running) == len(self.plans):
            return self.logits_RV
        rows = [row for row, one in enumerate(self.plans) if one in running]
        return self.logits_RV[to_device(rows, torch.long, self.logits_RV.device)]


def _next_plan(one: Running, host: Host) -> Plan | None:
    """What one sequence will ask, if it can be known: its last question, to the same model and not
    for a draft, one token later."""
    question = one.last_question
    if question is None or question.drafting or question.host is not host or one.seq.at_last:
        return None
    plan = next_token_plan(question.plan)
    if plan is None or plan.stored > min(host.room, host.backbone.context):
        return None
    starts_at_last_row = host.memos[one.lane].start(plan) == plan.stored - 1
    return plan if starts_at_last_row else None


def _same(one: Plan, other: Plan) -> bool:
    return (
        one.stored == other.stored
        and np.array_equal(one.rows, other.rows)
        and [read.tolist() for read in one.reads] == [read.tolist() for read in other.reads]
    )
