"""A whole step of a drafter that looks into its target, begun before the verdict on the last draft
is known.

Where its next block stands is arithmetic on what the device has: as far on as tokens are accepted.
What is drawn from the block, and the rows that judge it, stand there, too. So verdict, block, draft
and the next forward of the target are queued one behind the other, and the host does its part of
all of them while the device works. All three are guesses, as all that is prefetched: whoever asks
for another block, or draws from it in another way, gets that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import is_
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from forerun.engine.graphs import Replayed
from forerun.engine.host import Host
from forerun.engine.pack import Batch, Moved, MovedOn, Placed
from forerun.engine.prefetch import Source
from forerun.engine.prefetch_drafts import (
    FURTHER,
    SURPRISES,
    JudgePrefetch,
    PrefetchAroundDraft,
    judged_tokens,
    reads_of,
)
from forerun.engine.rules import Applied, Late, Rules
from forerun.engine.ticket import Running
from forerun.probability.outcomes import Tokens, Verdict
from forerun.probability.pending import LawRows, PendingLaws
from forerun.probability.transfer import to_device
from forerun.sequence.canvas import Draw
from forerun.sequence.question import Question
from forerun.sequence.rows import POSITION, TOKEN, BlockPlan, PlainText, Plan, text_and_chain

# With room for fewer slots, rows are made anew, or rounds (`prefetch_rounds.py`) would be few.
LEAST_ROOM = 64


class Verdicts(NamedTuple):
    """Verdicts that are on their way, in memory of their own: programs of rules share theirs, so
    that the next one writes over what the last one left."""

    accepted_B: Tensor
    token_B: Tensor

    @classmethod
    def of(cls, applied: Source, vocab: int) -> Verdicts:
        accepted_B = applied.column("accepted").clamp(min=0)
        return cls(accepted_B, applied.column("token").clamp(0, vocab - 1))


class MovesOn(PrefetchAroundDraft):
    """A forward whose rows stand as far on as drafts are accepted. What follows it, for the same
    sequences, is mostly the same rows further on, which the device has already: then nothing is
    made of it on the host, and nothing sent."""

    def __init__(self, host: Host, running: Sequence[Running]):
        super().__init__(host, running)
        self.replayed: Replayed | None = None  # as what it was run
        self._expected: dict[Running, tuple[int, int]] = {}  # length and last token of a text

    def follow(self, logits_RV: Tensor) -> int:
        self.replayed = self.host.runner.replayed
        return super().follow(logits_RV)

    def expect(self, one: Running, verdict: Verdict) -> None:
        """The verdict on its last draft has arrived; its text is still as it was."""
        self._expected[one] = (one.seq.known + verdict.accepted + 1, verdict.token)

    def expect_text(self, one: Running, length: int, token: int) -> None:
        """Its text will be so long, with this token at its end."""
        self._expected[one] = (length, token)

    def surprised(self, one: Running) -> None:
        """Its text will not be what the device takes it for."""
        self._expected.pop(one, None)

    def expects(self, one: Running) -> bool:
        """Is its text now what was foreseen? Of one that only grows, its length and its last token
        tell."""
        text = one.seq.text
        return self._expected.get(one) == (len(text), int(text[-1]))

    def can_move(self, running: Sequence[Running], slots: int) -> bool:
        """Was it begun for these sequences, is each where it was foreseen to be, and is there room
        for rows that look at so many slots?"""
        replayed = self.replayed
        if replayed is None or not replayed.can_move(slots):
            return False
        same = len(self.running) == len(running) and all(map(is_, self.running, running))
        stays = not self.host.runner.had_better_capture(replayed)
        return same and stays and all(map(self.expects, running))

    def moved_on(self, verdicts: Verdicts, most: int) -> MovedOn:
        """Its rows, as far on as tokens are accepted, and by the verdict's own."""
        assert self.replayed is not None
        self.host.runner.replayed = self.replayed
        return MovedOn(self.replayed.batch, Moved(verdicts.accepted_B, most, more=1), most)

    def prepare(self, batch: Batch) -> bool:
        return isinstance(batch, MovedOn) or super().prepare(batch)

    def _hold(self, batch: Batch, most: int) -> bool:
        """Leave rows, which stand as if nothing were accepted, where they can be moved on from,
        though they were not run."""
        nowhere_B = torch.zeros(len(self.running), dtype=torch.long, device=batch.device)
        batch.moved = Moved(nowhere_B, most, more=-1)
        if not self.host.runner.hold(batch):
            return False
        self.replayed = self.host.runner.replayed
        return True


class LookPrefetch(MovesOn):
    """The next block of every sequence, as far on as the last draft is accepted. Before a block the
    hidden states of as many tokens as may be new are projected: those that were before come out as
    they did. Whoever reads less of its block than the last time gets its first rows."""

    drafting = True

    def __init__(self, host: Host, running: Sequence[Running], last: Sequence[Question]):
        super().__init__(host, running)
        self.last = last  # the question about the last block of each
        self.rows_of = {one: each.plan.read_count for one, each in zip(running, last)}
        self.drafted = max(self.rows_of.values())  # tokens of the longest draft
        self.drawn: DrawnAhead | None = None  # from its blocks
        self.verdicts: Verdicts | None = None  # on the last drafts, on the device
        self.before: LookPrefetch | None = None  # the last one, if this is the same further on
        # The first row that was run again, where rounds were queued behind the first one.
        self.starts: dict[Running, int] = {}

    @classmethod
    def guess(
        cls, running: Sequence[Running], before: LookPrefetch | None = None
    ) -> LookPrefetch | None:
        """The next block of all these; `before` is what was begun last."""
        last = [one.looked for one in running if one.looked is not None]
        if len(last) < len(running) or len({(q.host, _block_rows(q.plan)) for q in last}) > 1:
            return None
        host = last[0].host
        assert isinstance(host, Host)
        if not host.runner.capture_enabled:
            return None
        self = cls(host, running, last)
        if not all(map(self._is_likely, running, last)):
            return None
        if all(one.seq.remaining <= self._new for one in running):  # each may be over
            return None
        pages = sum(
            host.memos[one.lane].pages_needed(one.seq.known - self._new, self._end(question))
            for one, question in zip(running, last)
        )
        if before is not None and self._goes_on_from(before):
            self.before = before
        return self if host.pool.ensure(pages) else None

    def _goes_on_from(self, before: LookPrefetch) -> bool:
        """Is it the same for the same sequences, whose rows on the device stand where the last
        block of each was?"""
        if before.host is not self.host or before.rows_of != self.rows_of:
            return False
        return before.can_move(self.running, max(self.ends()) + LEAST_ROOM)

    @property
    def _new(self) -> int:
        """The most tokens of context that may be new: the last one, and those of the draft."""
        return self.drafted + 1

    def _end(self, last: Question) -> int:
        """The slots that the next block may reach."""
        return last.plan.length + self._new

    def _is_likely(self, one: Running, last: Question) -> bool:
        """Was the last draft of its text judged, and is there room for another one?"""
        known = one.seq.known
        fits = self._new <= known and self._end(last) <= min(self.host.room, self.host.most_rows)
        asked = last.plan.stored == known - 1 and len(judged_tokens(one)) <= self.drafted
        return fits and asked and self._sees(one) and self._surprises(one) < SURPRISES

    def _sees(self, one: Running) -> bool:
        """Are its context, and the hidden states of the text, where they were?"""
        target = self.host.looks_into
        assert target is not None
        held = self.host.memos[one.lane].holds_rows(one.seq.known - 1)
        return held and target.memos[one.lane].holds_text(one.seq.text)

    def batch(self, applied: Source) -> Batch:
        self.verdicts = Verdicts.of(applied, self.host.backbone.vocab)
        if self.before is not None:
            return self._moved_on(self.before, self.verdicts)
        batch = self._rows()
        tokens_BL = to_device(batch.rows_5T[TOKEN], torch.long, batch.device)
        tokens_BL = tokens_BL.view(len(self.running), -1)
        tokens_BL[:, self._new] = self.verdicts.token_B
        batch.drawn_T = tokens_BL.flatten()
        batch.moved = Moved(self.verdicts.accepted_B, self.drafted)
        return batch

    def hold(self, applied: Source) -> bool:
        """Have its rows ready for a program that runs them."""
        self.verdicts = Verdicts.of(applied, self.host.backbone.vocab)
        return self._hold(self._rows(), self.drafted)

    def _rows(self) -> Batch:
        """As if nothing were accepted."""
        work: list[tuple[int, Plan, int]] = []
        for one, last in zip(self.running, self.last):
            start = one.seq.known - self._new
            work.append((one.lane, OneLonger(last.plan), start))
        batch = self.host.batch(work, ahead=self.drafted)
        batch.ahead = FURTHER
        return batch

    def _moved_on(self, before: LookPrefetch, verdicts: Verdicts) -> Batch:
        """The rows of the last block of each, further on."""
        spans = [
            (one.lane, one.seq.known - self._new, last.plan.length + 1)
            for one, last in zip(self.running, self.last)
        ]
        self.host.claim(spans, ahead=self.drafted)
        return before.further(verdicts)

    def further(self, verdicts: Verdicts) -> Batch:
        """Its rows, further on: but for the last token all is as it was."""
        batch = self.moved_on(verdicts, self._new)
        if batch.source_table is not None:
            batch.source_table.to_device()
        batch.placed = Placed(self._new, verdicts.token_B)
        return batch

    def ends(self) -> list[int]:
        """The slots that the block of each may reach."""
        return list(map(self._end, self.last))

    def prepare(self, batch: Batch) -> bool:
        return isinstance(batch, MovedOn) or self._prepare_or_capture(batch)

    def begin(self) -> None:
        for one in self.running:
            self.host.memos[one.lane].keep_at_most(one.seq.known - self._new)

    def learn(self, answers: Sequence[object]) -> None:
        for one, answer in zip(self.running, answers, strict=True):
            if isinstance(answer, Verdict):
                self.expect(one, answer)
        if self.drawn is not None and self.drawn.judging is not None:
            self.drawn.judging.learn_verdicts(answers)

    def matches(self, one: Running) -> bool:
        asked = one.waits_for
        if not isinstance(asked, Question) or asked.host is not self.host:
            return False
        plan = asked.plan
        same_text = self.expects(one) and plan.stored == one.seq.known - 1
        same_block = _block_rows(plan) == _block_rows(self.last[0].plan)
        return same_text and same_block and 0 < plan.read_count <= self.rows_of[one]

    def ran(self, one: Running) -> None:
        asked = one.waits_for
        assert isinstance(asked, Question)
        plan = asked.plan
        self.host.memos[one.lane].ran(plan, self.starts.get(one, plan.stored - self._new))
        one.surprises[type(self)] = 0

    def forget_before(self) -> None:
        """All is queued: what was before is not needed any more, nor what was before that."""
        self.before = None
        if self.drawn is not None:
            self.drawn.before = None
            if self.drawn.judging is not None:
                self.drawn.judging.before = None

    def logits_of(self, running: Sequence[Running]) -> Tensor:
        logits_RV = super().logits_of(running)
        if self.drawn is not None:
            self.drawn.hand_over(running, logits_RV)
        return logits_RV


def _block_rows(plan: Plan) -> int:
    """How many rows a drafter's question has behind the context."""
    return plan.length - plan.stored


class OneLonger(Plan):
    """What is asked of a drafter that looks into its target when the text is one token longer. Only
    its last rows are ever looked at."""

    def __init__(self, plan: Plan):
        assert isinstance(plan, BlockPlan)
        self.plan = plan
        self.length = plan.length + 1
        self.stored = plan.stored + 1
        self.first_read = plan.first_read + 1
        self.reads = [read + 1 for read in plan.reads]

    def rows_between(self, start: int, end: int) -> np.ndarray:
        plan, context = self.plan, self.plan.stored
        assert start <= context and end == self.length
        rows = np.empty((5, end - start), np.int32)
        new = context - start
        rows[:, :new] = plan.rows_between(start, context)
        # context sees itself; what it is made of is not its token
        rows[:, new] = (plan.context_from, context, 0, context, context + 1)
        rows[:, new + 1 :] = plan.rows_between(context, plan.length)
        rows[POSITION:, new + 1 :] += 1
        return rows


class DrawnAhead:
    """What each sequence will draw from a block that was begun ahead, if it draws as it did from
    the last one: by the same rule, of laws, of the next blanks and of the text's last token."""

    def __init__(self, look: LookPrefetch, kinds: Sequence[str], drew: Sequence[Draw[Any]]):
        self.running = look.running
        self.kinds = kinds  # what each argument is
        self.rule = drew[0].rule
        self._drew = drew  # from the last block; of a text that ends, nobody else keeps that
        self.before: DrawnAhead | None = None  # what was drawn last, if this is the same again
        # With the blanks as if nothing were accepted, once there is something to draw from.
        self.draws: list[Draw[Any]] = []
        self.applied: Applied | None = None  # once they are queued
        self.judging: JudgeDrawn | None = None  # the forward about them, if it is queued, too
        self._number = {one: number for number, one in enumerate(look.running)}
        self._before = [(one.seq.known, one.seq.draws) for one in look.running]
        self._logits_RV: Tensor | None = None  # that the laws are of which were handed over
        self._first: dict[Running, int] = {}  # of its rows

    @classmethod
    def guess(cls, look: LookPrefetch) -> DrawnAhead | None:
        kinds = [argument_kinds(one) for one in look.running]
        drew = [one.drew for one in look.running if one.drew is not None]
        if kinds[0] is None or any(each != kinds[0] for each in kinds):
            return None
        if len(drew) < len(kinds) or any(each.rule is not drew[0].rule for each in drew):
            return None
        self = cls(look, kinds[0], drew)
        before = None if look.before is None else look.before.drawn
        if before is not None and self._repeats(before):
            self.before = before
        return self

    def apply(self, rules: Rules, look: LookPrefetch) -> bool:
        """Queue the draws from a block that stands behind some verdicts, if that can be."""
        assert look.verdicts is not None and look.logits_RV is not None
        late = self.late(look.verdicts)
        if self.applied is None and self.before is not None:
            self.applied = self.before.applied
        self.draws = self._next_draws(look, look.logits_RV)
        if self.applied is not None:
            self.applied = rules.apply_again(self.applied, look.logits_RV, late)
        if self.applied is None:
            self.applied = rules.apply_ahead(self.draws, late)
        return self.applied is not None

    def _next_draws(self, look: LookPrefetch, logits_RV: Tensor) -> list[Draw[Any]]:
        firsts = accumulate(look.rows_of.values(), initial=0)
        pairs = zip(self._drew, firsts)
        return [_next_draw(drew, self.kinds, logits_RV, first) for drew, first in pairs]

    def _repeats(self, before: DrawnAhead) -> bool:
        return before.kinds == self.kinds and before.rule is self.rule

    def late(self, verdicts: Verdicts) -> list[Late]:
        """What only the device knows: how far on the blanks are, and the last token."""
        late = []
        for number, kind in enumerate(self.kinds):
            if kind == "blanks":
                late.append(Late(number, verdicts.accepted_B + 1, is_shift=True))
            elif kind == "last token":
                late.append(Late(number, verdicts.token_B, is_shift=False))
        return late

    def hand_over(self, served: Sequence[Running], logits_RV: Tensor) -> None:
        """Note which logits those get who draw now."""
        self._logits_RV = logits_RV
        self._first = dict(zip(served, accumulate(map(reads_of, served), initial=0)))

    def holds(self, one: Running) -> bool:
        """Is what it wants drawn now just what was drawn?"""
        number = self._number.get(one)
        draw = one.waits_for
        if number is None or one not in self._first or not isinstance(draw, Draw):
            return False
        assert self.applied is not None
        foreseen = self.draws[number]
        known, draws = self._before[number]
        if draw.rule is not foreseen.rule or len(draw.arguments) != len(self.kinds):
            return False
        if self.applied.used_noise and one.seq.draws != draws + 1:  # the verdict's is one
            return False
        grown = one.seq.known - known
        return all(
            self._is_same(one, kind, asked, used, grown)
            for kind, asked, used in zip(self.kinds, draw.arguments, foreseen.arguments)
        )

    def _is_same(self, one: Running, kind: str, asked: object, used: object, grown: int) -> bool:
        if kind == "laws":
            return self._are_same_laws(one, asked, cast("PendingLaws", used))
        if kind == "last token":
            return asked == [int(one.seq.text[-1])]
        return asked == [place + grown for place in cast("list[int]", used)]

    def _are_same_laws(self, one: Running, asked: object, used: PendingLaws) -> bool:
        if not isinstance(asked, PendingLaws) or asked.single or len(asked.parts) != 1:
            return False
        [part] = asked.parts
        rows = (self._first[one], used.parts[0].rows, used.parts[0].sampling)
        unmasked = part.logits_RV is self._logits_RV and part.masks_RW is None and part.step == 1
        return unmasked and (part.first, part.rows, part.sampling) == rows

    def outcomes(self, running: Sequence[Running]) -> Applied:
        """What these drew."""
        assert self.applied is not None
        return self.applied.only([self._number[one] for one in running])


def argument_kinds(one: Running) -> tuple[str, ...] | None:
    """What the arguments were of what a sequence drew from its last block; None where one of them
    cannot be foreseen."""
    seq = one.seq
    if one.drew is None or one.looked is None:
        return None
    if seq.history.constraint is not None or seq.history.edits_logits:
        return None
    kinds: list[str] = []
    for argument in one.drew.arguments:
        if isinstance(argument, PendingLaws):
            rows = [part.rows for part in argument.parts]
            if argument.single or rows != [one.looked.plan.read_count]:
                return None
            kinds.append("laws")
        elif argument == [int(seq.text[-1])]:
            kinds.append("last token")
        elif isinstance(argument, list) and argument == seq.next(len(argument)):
            kinds.append("blanks")
        else:
            return None
    return tuple(kinds)


def _next_draw(drew: Draw[Any], kinds: Sequence[str], logits_RV: Tensor, first: int) -> Draw[Any]:
    """What is drawn next, as the last time, from these logits, from such a row on."""
    arguments: list[object] = []
    for kind, argument in zip(kinds, drew.arguments):
        if kind == "laws":
            part = cast("PendingLaws", argument).parts[0]
            argument = PendingLaws([LawRows(logits_RV, first, part.rows, part.sampling)])
        arguments.append(argument)
    return Draw(drew.rule, tuple(arguments), drew.seq)


class JudgeDrawn(JudgePrefetch, MovesOn):
    """The target's forward about drafts that were drawn ahead: they, too, stand as far on as the
    last ones are accepted."""

    def __init__(self, target: Host, look: LookPrefetch, drawn: DrawnAhead):
        super().__init__(target, look.running, look.drafted)
        assert look.verdicts is not None
        self.drawn = drawn
        self.verdicts = look.verdicts
        self.before: JudgeDrawn | None = None  # the last one, if this is the same further on

    @classmethod
    def after(cls, look: LookPrefetch, drawn: DrawnAhead, target: Host) -> JudgeDrawn | None:
        self = cls(target, look, drawn)
        if not all(map(self._is_likely, self.running)):
            return None
        pages = sum(
            target.memos[one.lane].pages_needed(len(text), len(text) + self._ahead)
            for one, text in zip(self.running, self.texts)
        )
        before = None if drawn.before is None else drawn.before.judging
        if before is not None and self._goes_on_from(before):
            self.before = before
        return self if target.pool.ensure(pages) else None

    def _goes_on_from(self, before: JudgeDrawn) -> bool:
        if before.host is not self.host or before.length != self.length:
            return False
        return before.can_move(self.running, max(self.ends()) + LEAST_ROOM)

    @property
    def _ahead(self) -> int:
        """Slots behind the text that may be written: of what is accepted, of the token after it,
        and of the next draft."""
        return 2 * self.length + 1

    def _is_likely(self, one: Running) -> bool:
        seq = one.seq
        most = min(self.host.room, self.host.backbone.context)
        fits = 0 < seq.known <= most - self._ahead
        # with what is judged: of that, some may stay
        asked = one.last_question
        held = asked is not None and self.host.memos[one.lane].holds_text(asked.plan.tokens)
        return fits and held and self._surprises(one) < SURPRISES

    def ends(self) -> list[int]:
        """The slots that the draft of each may reach."""
        return [len(text) + self._ahead for text in self.texts]

    def batch(self, applied: Source) -> Batch:
        tokens_BK = applied.column("tokens")[:, : self.length]
        if self.before is not None:
            self._claim()
            return self.before.further(self.verdicts, tokens_BK)
        batch = self._rows()
        tokens_BL = torch.cat([self.verdicts.token_B[:, None], tokens_BK], 1)
        batch.drawn_T = tokens_BL.flatten().clamp_(0, self.host.backbone.vocab - 1)
        batch.moved = Moved(self.verdicts.accepted_B, self.length)
        return batch

    def hold(self) -> bool:
        """Have its rows ready for a program that runs them."""
        return self._hold(self._rows(), self.length)

    def further(self, verdicts: Verdicts, tokens_BK: Tensor) -> Batch:
        """Its rows, further on, with other tokens."""
        batch = self.moved_on(verdicts, 1 + self.length)
        batch.placed = Placed(0, verdicts.token_B, tokens_BK)
        return batch

    def _rows(self) -> Batch:
        work: list[tuple[int, Plan, int]] = []
        unknown = [0] * (1 + self.length)
        for one, text in zip(self.running, self.texts):  # as if nothing were accepted
            tokens = text_and_chain(text, unknown)
            work.append((one.lane, PlainText.of(tokens, len(text)), len(text)))
        batch = self.host.batch(work, ahead=self.length)
        batch.ahead = FURTHER
        return batch

    def _claim(self) -> None:
        """The slots that its rows may be written to."""
        rows = 1 + self.length
        pairs = zip(self.running, self.texts)
        spans = [(one.lane, len(text), len(text) + rows) for one, text in pairs]
        self.host.claim(spans, ahead=self.length)

    def begin(self) -> None:
        """What is accepted of the last draft stays, but how much that is, is not known yet."""
        for one, text in zip(self.running, self.texts):
            self.host.memos[one.lane].keep(len(text))

    def learn_verdicts(self, answers: Sequence[object]) -> None:
        """The verdicts have arrived: rows of what is accepted are where they were."""
        for one, text, answer in zip(self.running, self.texts, answers, strict=True):
            if isinstance(answer, Verdict):
                kept = judged_tokens(one)[: answer.accepted]
                self.host.memos[one.lane].wrote(len(text), kept)
                self.expect(one, answer)

    def learn(self, answers: Sequence[object]) -> None:
        """What was drawn ahead has arrived, whoever of them wants it."""
        assert self.drawn.applied is not None
        for one, drawn in zip(self.running, self.drawn.applied.outcomes(), strict=True):
            if self.expects(one) and isinstance(drawn, Tokens):
                self._foresee(one, one.seq.text, drawn.tokens)
