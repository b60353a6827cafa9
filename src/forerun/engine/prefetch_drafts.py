"""Forwards around a draft that begin before the host knows it, or the verdict on it.

Whoever has a draft written will have it judged: rows of the text's last token and of the draft,
which the device has. Whoever has had it judged will mostly have another one written, as long as the
last, as far on as tokens were accepted: arithmetic on what the device has, too. So draft model and
target are both set to work before their tokens are known, and the host does its part meanwhile. So
is a drafter that looks into its target: its next block stands as far on as tokens are accepted.
Both are guesses, as all that is prefetched (`prefetch.py`): a method that asks for something else
gets that. A sequence that was foreseen wrongly twice in a row is not foreseen any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.engine.continuation import Continuations, KnownProgram, WrittenBatch
from forerun.engine.host import Host
from forerun.engine.pack import Batch, Moved
from forerun.engine.prefetch import Prefetch, Source, hides_host
from forerun.engine.ticket import Running
from forerun.probability.noise import uniforms_ahead
from forerun.probability.outcomes import Tokens, Verdict
from forerun.probability.transfer import to_device
from forerun.sequence.canvas import Draw
from forerun.sequence.question import Continuation, Question, Written
from forerun.sequence.rows import POSITION, TOKEN, PlainText, Plan, text_and_chain

ALIKE = 2  # drafts in a row, before the next one is taken for another such
SURPRISES = 2  # in a row, after which a sequence is not foreseen any more


class Drafted(NamedTuple):
    """The last drafts that a model wrote, and for whom."""

    running: Sequence[Running]
    asked: Sequence[Continuation]
    tokens: Sequence[Sequence[int]]
    tokens_Bk: Tensor  # the same on the device

    def is_of(self, running: Sequence[Running]) -> bool:
        """Is it what all these have just had judged?"""
        return len(running) == len(self.running) and all(
            one is other and _judged_tokens(one) == list(tokens) and one.seq.known == asked.length
            for one, other, asked, tokens in zip(running, self.running, self.asked, self.tokens)
        )


def _judged_tokens(one: Running) -> list[int]:
    question = one.last_question
    return list(question.chains[0].tokens) if question is not None else []


class PrefetchAroundDraft(Prefetch):
    """What is asked after a draft was written, or judged. Surprises of the two count apart."""

    def in_vain(self) -> None:
        for one in self.running:
            one.surprises[type(self)] = self._surprises(one) + 1

    def ran(self, one: Running) -> None:
        super().ran(one)
        one.surprises[type(self)] = 0

    def _surprises(self, one: Running) -> int:
        return one.surprises.get(type(self), 0)

    def _prepare_or_capture(self, batch: Batch) -> bool:
        """Can it begin? If not, the next such one can, where it can be captured."""
        if super().prepare(batch):
            return True
        if self.host.runner.can_capture(batch):
            self.begin()  # what the draft model's slots hold of the last draft is lost on this
            self.host.runner.capture_unmoved(batch)
        return False

    def _last_tokens_B1(self) -> Tensor:
        """Of the texts as the host knows them, on the device."""
        last = [[int(one.seq.text[-1])] for one in self.running]
        return to_device(last, torch.long, self.host.device)


class JudgePrefetch(PrefetchAroundDraft):
    """The target's forward about a draft of every sequence. All drafts are equally long."""

    def __init__(self, host: Host, running: Sequence[Running], length: int):
        super().__init__(host, running)
        self.rows_of = dict.fromkeys(running, length + 1)
        self.length = length  # of the drafts
        self.texts = [one.seq.text for one in running]

    @classmethod
    def guess(cls, running: Sequence[Running], target: Host, length: int) -> JudgePrefetch | None:
        """Of drafts that are so long."""
        self = cls(target, running, length)
        if not all(map(self._is_likely, running)):
            return None
        pages = sum(
            target.memos[one.lane].pages_needed(len(text) - 1, len(text) + length)
            for one, text in zip(running, self.texts)
        )
        return self if target.pool.ensure(pages) else None

    def _is_likely(self, one: Running) -> bool:
        """Will it ask for this, and are there slots for it?"""
        seq = one.seq
        memo = self.host.memos[one.lane]
        most = min(self.host.room, self.host.backbone.context)
        fits = 0 < seq.known <= most - self.length and seq.remaining > self.length
        return fits and self._surprises(one) < SURPRISES and memo.holds_text(seq.text[:-1])

    def batch(self, applied: Source) -> Batch:
        unknown = [0] * self.length
        work: list[tuple[int, Plan, int]] = []
        for one, text in zip(self.running, self.texts):
            last = len(text) - 1
            work.append((one.lane, PlainText.of(text_and_chain(text, unknown), last), last))
        batch = self.host.batch(work)
        tokens_BL = torch.cat(
            [self._last_tokens_B1(), applied.column("tokens")[:, : self.length]], 1
        )
        batch.drawn_T = tokens_BL.flatten().clamp_(0, self.host.backbone.vocab - 1)
        return batch

    def begin(self) -> None:
        """What was judged last lies where this draft will be written."""
        for one, text in zip(self.running, self.texts):
            self.host.memos[one.lane].keep(len(text) - 1)

    def learn(self, answers: Sequence[object]) -> None:
        for one, text, answer in zip(self.running, self.texts, answers, strict=True):
            chain = answer.tokens if isinstance(answer, (Tokens, Written)) else []
            if len(chain) >= self.length:  # else the text ends in it, and fewer rows are asked for
                chain = chain[: self.length]
                self.foreseen[one] = PlainText.of(text_and_chain(text, chain), len(text) - 1)


class DraftPrefetch(PrefetchAroundDraft):
    """The draft model's next draft of every sequence, as far on as the last one is accepted."""

    drafting = True

    def __init__(self, host: Host, running: Sequence[Running], drafted: Drafted):
        super().__init__(host, running)
        self.rows_of = dict.fromkeys(running, 1)
        self.drafted = drafted
        # Draws that each will have made when it asks for the next draft: the verdict's is one.
        self.draws = [one.seq.draws + 1 for one in running]
        self.program: KnownProgram | None = None
        self.written: WrittenBatch | None = None
        self._number = {one: number for number, one in enumerate(running)}

    @classmethod
    def guess(cls, running: Sequence[Running], drafted: Drafted) -> DraftPrefetch | None:
        host = drafted.asked[0].host
        assert isinstance(host, Host)
        self = cls(host, running, drafted)
        if not drafted.is_of(running) or not all(map(self._is_likely, running)):
            return None
        pages = sum(
            host.memos[one.lane].pages_needed(one.seq.known - 1, one.seq.known + self._ahead)
            for one in running
        )
        return self if host.pool.ensure(pages) else None

    @property
    def length(self) -> int:
        return self.drafted.asked[0].tokens

    @property
    def _ahead(self) -> int:
        """Slots behind the text that may be written: of what is accepted, and of the next draft."""
        return 2 * self.length + 1

    def _is_likely(self, one: Running) -> bool:
        seq = one.seq
        memo = self.host.memos[one.lane]
        most = min(self.host.room, self.host.backbone.context)
        goes_on = seq.remaining > self._ahead and seq.known + self._ahead <= most
        asks_alike = one.alike >= ALIKE and self._surprises(one) < SURPRISES
        return goes_on and asks_alike and memo.holds_text(seq.text)

    def batch(self, applied: Source) -> Batch:
        """The last token that is accepted once more, since the draft model may not have run it,
        and the one after it."""
        batch = self._rows(2)
        accepted_B = applied.column("accepted").clamp(min=0)
        chain_BL = torch.cat([self._last_tokens_B1(), self.drafted.tokens_Bk], 1)
        accepted_B1 = chain_BL.gather(1, accepted_B[:, None])
        tokens_B2 = torch.cat([accepted_B1, applied.column("token")[:, None]], 1)
        batch.drawn_T = tokens_B2.flatten().clamp_(0, self.host.backbone.vocab - 1)
        batch.moved = Moved(accepted_B, self.length)
        rows = self._rows(3, start=2)
        rows.moved = batch.moved
        assert isinstance(self.host.writer, Continuations)
        self.program = self.host.writer.known_program(self.drafted.asked, rows)
        return batch

    def _rows(self, count: int, start: int = 0) -> Batch:
        """So many rows from the text's last token on, or from `start` of them on, as if nothing
        were accepted. The last one is read."""
        work: list[tuple[int, Plan, int]] = []
        for one in self.running:
            before = one.seq.text[:-1]
            tokens = text_and_chain(before, [0] * count)
            plan = PlainText.of(tokens, len(tokens) - 1)
            work.append((one.lane, plan, len(before) + start))
        return self.host.batch(work, ahead=self._ahead + 1 - count)

    def prepare(self, batch: Batch) -> bool:
        return self.program is not None and self._prepare_or_capture(batch)

    def begin(self) -> None:
        for one in self.running:
            self.host.memos[one.lane].keep(one.seq.known - 1)

    def follow(self, logits_RV: Tensor) -> int:
        """Have the draft written, behind its first forward."""
        assert self.program is not None
        keys = [one.seq.noise_key for one in self.running]
        u_Bk = uniforms_ahead(list(zip(keys, self.draws)), self.length)
        self.written = self.program.run(logits_RV, u_Bk)
        return self.length - 1

    def learn(self, answers: Sequence[object]) -> None:
        for one, chain, answer in zip(self.running, self.drafted.tokens, answers, strict=True):
            if isinstance(answer, Verdict):
                text = one.seq.text
                kept = list(chain[: answer.accepted])
                self.host.memos[one.lane].wrote(len(text) - 1, [int(text[-1]), *kept])
                tokens = text_and_chain(text, [*kept, answer.token])
                self.foreseen[one] = PlainText.of(tokens, len(tokens) - 1)

    def matches(self, one: Running) -> bool:
        asked = one.waits_for
        if not isinstance(asked, Continuation) or not super().matches(one):
            return False
        number = self._number[one]
        last = self.drafted.asked[number]
        alike = (asked.tokens, asked.temperature) == (last.tokens, last.temperature)
        return alike and one.seq.draws == self.draws[number]

    def written_for(self, served: Sequence[Running]) -> WrittenBatch:
        """What was written for those who are left."""
        assert self.written is not None
        if len(served) == len(self.running):
            return self.written
        return self.written.only([self._number[one] for one in served])


class LookPrefetch(PrefetchAroundDraft):
    """The next block of a drafter that looks into its target, for every sequence, as far on as the
    last draft is accepted. Before a block the hidden states of as many tokens as may be new are
    projected: those that were before come out as they did. All drafts are equally long."""

    drafting = True

    def __init__(self, host: Host, running: Sequence[Running], last: Sequence[Question]):
        super().__init__(host, running)
        self.last = last  # the question about the last block of each
        self.drafted = last[0].plan.read_count
        self.rows_of = dict.fromkeys(running, self.drafted)
        self._expected: dict[Running, tuple[int, int]] = {}  # length and last token of a text

    @classmethod
    def guess(cls, running: Sequence[Running]) -> LookPrefetch | None:
        last = [one.looked for one in running if one.looked is not None]
        if len(last) < len(running) or len({(q.host, *_block_of(q.plan)) for q in last}) > 1:
            return None
        host = last[0].host
        assert isinstance(host, Host)
        if not host.runner.capture_enabled:
            return None
        self = cls(host, running, last)
        if not all(map(self._is_likely, running, last)):
            return None
        pages = sum(
            host.memos[one.lane].pages_needed(one.seq.known - self._new, self._end(question))
            for one, question in zip(running, last)
        )
        return self if host.pool.ensure(pages) else None

    @property
    def _new(self) -> int:
        """The most tokens of context that may be new: the last one, and those of the draft."""
        return self.drafted + 1

    def _end(self, last: Question) -> int:
        """The slots that the next block may reach."""
        return last.plan.length + self._new

    def _is_likely(self, one: Running, last: Question) -> bool:
        """Was the last draft of its text judged, and will there be another one as long?"""
        known = one.seq.known
        fits = self._new <= known and self._end(last) <= min(self.host.room, self.host.most_rows)
        goes_on = one.seq.remaining > 2 * self._new
        asked = last.plan.stored == known - 1 and len(_judged_tokens(one)) <= self.drafted
        return fits and goes_on and asked and self._sees(one) and self._surprises(one) < SURPRISES

    def _sees(self, one: Running) -> bool:
        """Are its context, and the hidden states of the text, where they were?"""
        target = self.host.looks_into
        assert target is not None
        held = self.host.memos[one.lane].holds_rows(one.seq.known - 1)
        return held and target.memos[one.lane].holds_text(one.seq.text)

    def batch(self, applied: Source) -> Batch:
        work: list[tuple[int, Plan, int]] = []
        for one, last in zip(self.running, self.last):
            start = one.seq.known - self._new
            work.append((one.lane, one_longer(last.plan, self.host.backbone.vocab), start))
        batch = self.host.batch(work, ahead=self.drafted)
        tokens_BL = to_device(batch.rows_5T[TOKEN], torch.long, batch.device)
        tokens_BL = tokens_BL.view(len(self.running), -1)
        tokens_BL[:, self._new] = applied.column("token").clamp(0, self.host.backbone.vocab - 1)
        batch.drawn_T = tokens_BL.flatten()
        batch.moved = Moved(applied.column("accepted").clamp(min=0), self.drafted)
        return batch

    def prepare(self, batch: Batch) -> bool:
        return self._prepare_or_capture(batch)

    def begin(self) -> None:
        for one in self.running:
            self.host.memos[one.lane].keep_at_most(one.seq.known - self._new)

    def learn(self, answers: Sequence[object]) -> None:
        for one, answer in zip(self.running, answers, strict=True):
            if isinstance(answer, Verdict):
                length = one.seq.known + answer.accepted + 1
                self._expected[one] = (length, answer.token)

    def matches(self, one: Running) -> bool:
        """Of a text that only grows, its length and its last token tell."""
        asked = one.waits_for
        if not isinstance(asked, Question) or asked.host is not self.host:
            return False
        expected = self._expected.get(one)
        text = one.seq.text
        same_text = expected == (len(text), int(text[-1])) and asked.plan.stored == len(text) - 1
        return same_text and _block_of(asked.plan) == _block_of(self.last[0].plan)

    def ran(self, one: Running) -> None:
        asked = one.waits_for
        assert isinstance(asked, Question)
        plan = asked.plan
        self.host.memos[one.lane].ran(plan, plan.stored - self._new)
        one.surprises[type(self)] = 0


def _block_of(plan: Plan) -> tuple[int, int]:
    """How many rows a drafter's question has behind the context, and how many of them are read."""
    return plan.length - plan.stored, plan.read_count


def one_longer(plan: Plan, vocab: int) -> Plan:
    """What is asked of a drafter that looks into its target when the text is one token longer."""
    context = plan.stored
    rows = np.empty((5, plan.length + 1), np.int32)
    rows[:, :context] = plan.rows[:, :context]
    rows[:, context] = (vocab, context, 0, context, context + 1)  # a row of context sees itself
    rows[:, context + 1 :] = plan.rows[:, context:]
    rows[POSITION:, context + 1 :] += 1
    return Plan(rows, [read + 1 for read in plan.reads], stored=context + 1)


def foresee_around_draft(
    running: Sequence[Running], applied: Source, target: Host, drafted: Drafted | None
) -> Prefetch | None:
    """What all these will ask after a draft, or after the verdict on one, that is on its way."""
    if not hides_host(target):
        return None
    if applied.type is Verdict:
        if drafted is not None:
            return DraftPrefetch.guess(running, drafted)
        return LookPrefetch.guess(running)
    lengths = {_drafted_length(one, target) for one in running}
    length = lengths.pop()
    return None if lengths or not length else JudgePrefetch.guess(running, target, length)


def _drafted_length(one: Running, target: Host) -> int:
    """How many tokens of a draft of the next blanks are on their way; 0: it is no draft."""
    waits = one.waits_for
    if isinstance(waits, Continuation):
        return waits.tokens if waits.drafting else 0
    asked: Question | None = one.last_question
    if not isinstance(waits, Draw) or asked is None or not asked.drafting or asked.host is target:
        return 0
    positions = waits.arguments[0]
    blanks = positions if isinstance(positions, list) else []
    return len(blanks) if blanks == one.seq.next(len(blanks)) else 0
