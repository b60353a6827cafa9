"""Forwards around a draft that begin before the host knows it, or the verdict on it.

Whoever has a draft written will have it judged: rows of the text's last token and of the draft,
which the device has. Whoever has had it judged will mostly have another one written, as long as the
last, as far on as tokens were accepted: arithmetic on what the device has, too. So draft model and
target are both set to work before their tokens are known, and the host does its part meanwhile.
Both are guesses, as all that is prefetched (`prefetch.py`): a method that asks for something else
gets that. A sequence that was foreseen wrongly twice in a row is not foreseen any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.engine.continuation import Continuations, KnownProgram, WrittenBatch
from forerun.engine.host import Host
from forerun.engine.pack import Batch, Moved
from forerun.engine.prefetch import Prefetch, Source
from forerun.engine.ticket import Running
from forerun.probability.noise import uniforms_ahead
from forerun.probability.outcomes import Tokens, Verdict
from forerun.probability.transfer import to_device
from forerun.sequence.canvas import Draw
from forerun.sequence.question import Continuation, Question, Written
from forerun.sequence.rows import PlainText, Plan, text_and_chain

ALIKE = 2  # drafts in a row, before the next one is taken for another such
# Tokens that a text may grow by before rows about it need another capture.
FURTHER = 192
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
            one is other and judged_tokens(one) == list(tokens) and one.seq.known == asked.length
            for one, other, asked, tokens in zip(running, self.running, self.asked, self.tokens)
        )


def judged_tokens(one: Running) -> list[int]:
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

    def logits_of(self, running: Sequence[Running]) -> Tensor:
        """The result for those who are left: of each as many rows, from its first on, as it
        asks for."""
        asked = [reads_of(one) for one in running]
        if asked == [self.rows_of[one] for one in running]:
            return super().logits_of(running)
        assert self.logits_RV is not None
        starts = dict(zip(self.rows_of, accumulate(self.rows_of.values(), initial=0)))
        kept = [np.arange(starts[one], starts[one] + rows) for one, rows in zip(running, asked)]
        return self.logits_RV[to_device(np.concatenate(kept), torch.long, self.logits_RV.device)]

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


def reads_of(one: Running) -> int:
    """How many rows it asks for."""
    assert isinstance(one.waits_for, Question)
    return one.waits_for.plan.read_count


class JudgeBegun(PrefetchAroundDraft):
    """A target's forward about drafts. Those that turn out to be shorter, because a text or a draft
    ends there, are judged by its first rows."""

    def matches(self, one: Running) -> bool:
        """Does it ask about the draft that was foreseen, or its beginning?"""
        question = one.waits_for
        if not isinstance(question, Question) or question.host is not self.host:
            return False
        foreseen = self.foreseen.get(one)
        return foreseen is not None and _begins_with(foreseen, question.plan)

    def ran(self, one: Running) -> None:
        assert isinstance(one.waits_for, Question)
        plan = one.waits_for.plan
        self.host.memos[one.lane].ran(plan, plan.first_read)
        one.surprises[type(self)] = 0


class JudgePrefetch(JudgeBegun):
    """The target's forward about a draft of every sequence."""

    def __init__(self, host: Host, running: Sequence[Running], length: int):
        super().__init__(host, running)
        self.rows_of = dict.fromkeys(running, length + 1)
        self.length = length  # of the longest draft
        self.texts = [one.seq.text for one in running]

    @classmethod
    def guess(cls, running: Sequence[Running], target: Host, length: int) -> JudgePrefetch | None:
        """Of drafts that are at most so long."""
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
        fits = 0 < seq.known <= most - self.length
        return fits and self._surprises(one) < SURPRISES and memo.holds_text(seq.text[:-1])

    def batch(self, applied: Source) -> Batch:
        unknown = [0] * self.length
        work: list[tuple[int, Plan, int]] = []
        for one, text in zip(self.running, self.texts):
            last = len(text) - 1
            work.append((one.lane, PlainText.of(text_and_chain(text, unknown), last), last))
        batch = self.host.batch(work)
        batch.ahead = FURTHER  # as where they move on
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
            self._foresee(one, text, chain)

    def _foresee(self, one: Running, text: np.ndarray, chain: Sequence[int]) -> None:
        """Rows of this draft run after this text."""
        tokens = text_and_chain(text, chain[: self.length])
        self.foreseen[one] = PlainText.of(tokens, len(text) - 1)


def _begins_with(foreseen: PlainText, asked: Plan) -> bool:
    """Are these the first of the foreseen rows, all of which are read?"""
    if not isinstance(asked, PlainText) or asked.first_read != foreseen.first_read:
        return False
    return foreseen.tokens[: asked.length].tobytes() == asked.tokens.tobytes()


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


def foresee_judging(running: Sequence[Running], target: Host) -> JudgePrefetch | None:
    """The forward about drafts of all these that are on their way."""
    lengths = [_drafted_length(one, target) for one in running]
    return JudgePrefetch.guess(running, target, max(lengths)) if all(lengths) else None


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
