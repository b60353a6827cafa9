"""A forward that begins before the host knows its tokens.

Whoever asks what follows a text, and draws a token of the answer, will ask what follows that token.
Whoever judges a guess will ask about the next guess, as far on as tokens were accepted. Both are
arithmetic on numbers that the device has. So the next forward can be queued behind the draw, with
tokens taken from where they were drawn, and positions and slots moved on there. What the host does
for one token then happens while the device works on the next. It is a guess: if a text has ended,
or something else is asked, nobody looks at the result. A prefetched forward writes only unclaimed
slots. Prompts that are read beside plain text are read in it, too: their tokens are known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import is_
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.engine.cache import Memo
from forerun.engine.host import Host
from forerun.engine.pack import Batch, Moved
from forerun.engine.ticket import Running
from forerun.engine.turns import Part
from forerun.probability.outcomes import JacobiStep, Outcome, Token
from forerun.probability.transfer import to_device
from forerun.sequence.question import Continuation, NextToken, Question
from forerun.sequence.rows import PlainText, Plan, next_token_plan, text_and_chain

# Below so many parameters a forward is over before the host could have hidden anything behind it.
LEAST_COST = 5e7


def hides_host(host: Host) -> bool:
    """Do its forwards take so long that the host's work is hidden behind them?"""
    return host.backbone.cost >= LEAST_COST


class Source(Protocol):
    """Outcomes that are on their way to the host: of a rule, or what a draft model wrote."""

    device: torch.device

    def column(self, name: str) -> Tensor:
        """One field of all outcomes, on the device."""
        ...

    @property
    def type(self) -> type[Outcome]:
        """What they are."""
        ...


class Prefetch(ABC):
    """A forward whose tokens are drawn but not known."""

    drafting = False  # is it a draft model's?

    def __init__(self, host: Host, running: Sequence[Running]):
        self.host = host
        self.running = running
        # what some will ask, once the tokens are known; all rows that are read must run
        self.foreseen: dict[Running, PlainText] = {}
        self.logits_RV: Tensor | None = None
        self.rows_of: dict[Running, int] = {}  # of the logits, in their order
        self.reading: list[Part] = []  # of prompts, beside them

    @abstractmethod
    def batch(self, applied: Source) -> Batch:
        """The forward, with what was drawn where it is on the device."""

    def prepare(self, batch: Batch) -> bool:
        """Can it begin? Only a captured forward takes its positions from the device."""
        return batch.moved is None or self.host.runner.has_captured(batch)

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """The forward is about to begin."""

    def follow(self, logits_RV: Tensor) -> int:
        """The forward has begun. How many more were queued behind it."""
        self.logits_RV = logits_RV
        return 0

    def in_vain(self) -> None:  # noqa: B027
        """Something else is asked for."""

    @abstractmethod
    def learn(self, answers: Sequence[object]) -> None:
        """What was drawn has arrived."""

    def plan_of(self, one: Running) -> PlainText | None:
        """What it will ask, if that was foreseen."""
        return self.foreseen.get(one)

    def matches(self, one: Running) -> bool:
        """Does it wait for what was foreseen?"""
        question = one.waits_for
        if not isinstance(question, Question) or question.host is not self.host:
            return False
        foreseen = self.plan_of(one)
        return foreseen is not None and _same(foreseen, question.plan)

    def ran(self, one: Running) -> None:
        """Note that the rows ran that it waits for."""
        plan = self.plan_of(one)
        assert plan is not None
        self.host.memos[one.lane].ran(plan, plan.first_read)

    def logits_of(self, running: Sequence[Running]) -> Tensor:
        """The result, for those who are left."""
        assert self.logits_RV is not None
        if len(running) == len(self.rows_of) and all(map(is_, running, self.rows_of)):
            return self.logits_RV
        ends = dict(zip(self.rows_of, accumulate(self.rows_of.values())))
        kept = [np.arange(ends[one] - self.rows_of[one], ends[one]) for one in running]
        return self.logits_RV[to_device(np.concatenate(kept), torch.long, self.logits_RV.device)]


def foresee(
    running: Sequence[Running], applied: Source, alone: bool = True, in_step: bool = False
) -> Prefetch | None:
    """The forward that all these will ask for if they keep what they draw now, where there is one,
    of one model; or, if they are not `alone`, one beside which others can read. `in_step`: the
    forward that they draw from was begun ahead, too."""
    question = running[0].last_question
    if question is None:
        return None
    host = question.host
    assert isinstance(host, Host)
    if any(_is_elsewhere(one, host) for one in running):
        return None
    if alone and _had_rather_write(running, host):
        return None
    if applied.type is Token:
        return TokenPrefetch.guess(running, host, in_step)
    if applied.type is JacobiStep and alone:
        return ChainPrefetch.guess(running, host)
    return None


def _had_rather_write(running: Sequence[Running], host: Host) -> bool:
    """Did all ask for several tokens, and can they have them? Whoever is given the next one ahead
    would go on token by token to the end."""
    asked = all(isinstance(one.last_question, Continuation) for one in running)
    return asked and host.writer is not None and host.writer.has_written(len(running))


def _is_elsewhere(one: Running, host: Host) -> bool:
    question = one.last_question
    ends = one.seq.at_last or one.seq.draft_follows
    return question is None or question.drafting or question.host is not host or ends


class TokenPrefetch(Prefetch):
    """One row per sequence: plain text one token longer."""

    def __init__(self, host: Host, running: Sequence[Running]):
        super().__init__(host, running)
        self.rows_of = dict.fromkeys(running, 1)
        self.pages = 0  # that they need more
        self._asked: list[Question] = []  # what each draws from
        self._lengths: list[int] = []  # of the texts, with the token that is drawn
        self._drawn: list[int] = []  # as soon as they have arrived
        self._number = {one: number for number, one in enumerate(running)}

    @classmethod
    def guess(
        cls, running: Sequence[Running], host: Host, in_step: bool = False
    ) -> TokenPrefetch | None:
        """What follows the tokens of these. `in_step`: their last forward was begun ahead, so
        slots hold what was asked."""
        self = cls(host, running)
        most = min(host.room, host.backbone.context)
        for one in running:
            asked = one.last_question
            assert asked is not None
            memo = host.memos[one.lane]
            length = asked.length + 1
            if length > most or not (in_step or _holds(memo, asked.plan)):
                return None
            self._asked.append(asked)
            self._lengths.append(length)
            if not memo.owns(length - 1):
                self.pages += memo.pages_needed(length - 1, length)
        return self if not self.pages or host.pool.ensure(self.pages) else None

    def read_beside(self, parts: Sequence[Part]) -> bool:
        """Read this of prompts in the same forward, if there is room."""
        memos = self.host.memos
        self.pages += sum(memos[p.one.lane].pages_needed(p.start, p.plan.length) for p in parts)
        if not self.host.pool.ensure(self.pages):
            return False
        for part in parts:
            self.rows_of[part.one] = part.plan.read_count
            if part.is_whole:
                if not isinstance(part.plan, PlainText) or part.plan.read_count != 1:
                    return False
                self.foreseen[part.one] = part.plan
        self.reading = list(parts)
        return True

    def plan_of(self, one: Running) -> PlainText | None:
        number = self._number.get(one)
        if number is not None and one not in self.foreseen:
            plan = next_token_plan(self._asked[number].plan)
            assert plan is not None, "of plain text"
            self.foreseen[one] = plan
            if self._drawn:
                plan.tokens[-1] = self._drawn[number]
        return self.foreseen.get(one)

    def _plans(self) -> list[PlainText]:
        return [plan for one in self.running if (plan := self.plan_of(one)) is not None]

    def batch(self, applied: Source) -> Batch:
        lanes = [one.lane for one in self.running]
        if self.reading:
            work: list[tuple[int, Plan, int]]
            work = [(lane, plan, plan.first_read) for lane, plan in zip(lanes, self._plans())]
            work += [(part.one.lane, part.plan, part.start) for part in self.reading]
            batch = self.host.batch(work)
        else:
            batch = self.host.next_rows(lanes, self._lengths, self._plans)
        drawn_B = applied.column("token")
        # A law without an outcome draws -1, which is no token.
        batch.drawn_T = drawn_B.clamp(0, self.host.backbone.vocab - 1)
        return batch

    def learn(self, answers: Sequence[object]) -> None:
        self._drawn = [one.token if isinstance(one, Token) else 0 for one in answers]
        for one, token in zip(self.running, self._drawn, strict=True):
            if one in self.foreseen:
                self.foreseen[one].tokens[-1] = token

    def matches(self, one: Running) -> bool:
        """Of a text that only grows, its length and its last token tell."""
        number = self._number.get(one)
        question = one.waits_for
        if number is not None and not self._drawn:  # an interrupt or an error came before that
            return False
        if number is None or type(question) is not NextToken or not question.reads_text:
            return super().matches(one)
        asked = self._asked[number]
        if type(asked) is not NextToken or asked.memory is not question.memory:
            return super().matches(one)
        length = self._lengths[number]
        same = question.length == length and question.memory[length - 1] == self._drawn[number]
        return same and question.host is self.host

    def ran(self, one: Running) -> None:
        number = self._number.get(one)
        if number is None:
            super().ran(one)
        else:
            self.host.memos[one.lane].wrote_one(self._lengths[number] - 1, self._drawn[number])


def _holds(memo: Memo, plan: Plan) -> bool:
    """Do the slots hold a plain text that was asked about?"""
    return plan.is_plain_text and memo.holds_text(plan.tokens)


@dataclass(frozen=True)
class Judged:
    """The last question of a sequence: a text, and a guess after it."""

    known: int  # tokens of the text
    plan: PlainText
    lane: int

    @property
    def text(self) -> np.ndarray:
        return self.plan.tokens[: self.known]


class ChainPrefetch(Prefetch):
    """The next guess of every sequence, as far on as the last one is accepted. All guesses are
    equally long."""

    length: int
    judged: dict[Running, Judged]

    @classmethod
    def guess(cls, running: Sequence[Running], host: Host) -> ChainPrefetch | None:
        if not hides_host(host) or not host.runner.capture_enabled:
            return None
        self = cls(host, running)
        self.judged = {}
        for one in running:
            judged = _judged(one)
            if judged is None:
                return None
            self.judged[one] = judged
        lengths = {judged.plan.stored - judged.known for judged in self.judged.values()}
        self.length = lengths.pop()
        self.rows_of = dict.fromkeys(running, self.length + 1)
        most = min(host.room, host.backbone.context)
        fits = all(
            judged.plan.stored + 1 + self.length <= most and one.seq.remaining > 2 * self.length + 1
            for one, judged in self.judged.items()
        )
        if not fits or lengths or not self.length:
            return None
        ahead = 1 + 2 * self.length
        pages = sum(
            host.memos[judged.lane].pages_needed(judged.known, judged.known + ahead)
            for judged in self.judged.values()
        )
        return self if host.pool.ensure(pages) else None

    def batch(self, applied: Source) -> Batch:
        work = []
        for judged in self.judged.values():
            # as if nothing were accepted
            tokens = text_and_chain(judged.text, [0] * (1 + self.length))
            work.append((judged.lane, PlainText.of(tokens, judged.known), judged.known))
        batch = self.host.batch(work, ahead=self.length)
        token_B1 = applied.column("token")[:, None]
        guess_BK = applied.column("repeated")[:, : self.length]
        tokens_BL = torch.cat([token_B1, guess_BK], 1)
        batch.drawn_T = tokens_BL.flatten().clamp_(0, self.host.backbone.vocab - 1)
        batch.moved = Moved(applied.column("accepted").clamp(min=0), self.length)
        return batch

    def begin(self) -> None:
        """The guesses that were judged lie where the next ones will be written."""
        for judged in self.judged.values():
            self.host.memos[judged.lane].keep(judged.known)

    def learn(self, answers: Sequence[object]) -> None:
        for (one, judged), answer in zip(self.judged.items(), answers, strict=True):
            if isinstance(answer, JacobiStep):
                kept = judged.known + answer.accepted
                self.host.memos[judged.lane].keep(kept)
                text = judged.plan.tokens[:kept]
                guess = [answer.token, *answer.repeated[: self.length]]
                self.foreseen[one] = PlainText.of(text_and_chain(text, guess), kept)


def _judged(one: Running) -> Judged | None:
    """The last question, if it was about plain text and a guess after it."""
    assert one.last_question is not None
    plan = one.last_question.plan
    known = one.seq.known
    if not isinstance(plan, PlainText) or plan.first_read != known - 1:
        return None
    return Judged(known, plan, one.lane)


def _same(one: PlainText, other: Plan) -> bool:
    return (
        isinstance(other, PlainText)
        and one.first_read == other.first_read
        and one.tokens.tobytes() == other.tokens.tobytes()
    )
