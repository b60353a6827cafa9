"""Rounds of draft and verdict that a model makes by itself, behind a verdict that was asked for.

On a CPU a small model's forward takes no longer than what the host does for a verdict. Where
nothing is left to chance, and the next draft will be made as the last one was, both are arithmetic:
a copy of the text's own, or the likeliest tokens of a draft model, and the likeliest tokens behind
them. So the backbone goes on for several rounds in one call, for all sequences together. Methods
find what came of it on their canvas (`Canvas.rounds_ahead`).

It is as if the rounds had been asked for one by one: the same drafts, verdicts and forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from forerun.engine.backbone import DraftingText, RoundsAsked, RoundsMade, TextRound
from forerun.engine.cache import Memo
from forerun.engine.continuation import LAUNCH_SECONDS_ON_CPU, Continuations
from forerun.engine.flag import Flag
from forerun.engine.host import Host
from forerun.engine.ticket import Running
from forerun.probability.outcomes import Verdict
from forerun.sequence.canvas import Canvas, Round
from forerun.sequence.question import Continuation, Question
from forerun.sequence.rows import BlockPlan, MaskedText, PlainText, text_and_chain

MOST_ROUNDS = 32  # in one launch
# Of a launch: longer than one of plain text, as it takes the host two steps to begin, not one.
ROUNDS_SECONDS = 2 * LAUNCH_SECONDS_ON_CPU
LEAST_ROUNDS = 2  # fewer are not worth one
MOST_ROWS = 256  # of one forward
AHEAD = 64  # slots that are claimed: more rounds than fill them are another launch


@dataclass
class Drafting:
    """One sequence behind its verdict, and how its next draft is made."""

    one: Running
    text: np.ndarray  # with what the verdict has brought
    most: int  # tokens of a draft
    run: int = 0  # of last tokens that is looked up for a copy
    reach: int | None = None  # of the next copy
    drafter: Host | None = None  # else the model that drafts
    held: int = 0  # tokens that this one has run
    # What it was asked, if it fills blanks, or if it looks into its target.
    blanks: MaskedText | None = None
    look: BlockPlan | None = None

    @property
    def repeats(self) -> int:
        """How many drafts will be made and judged in the same way."""
        asked = self.one.waits_for
        assert isinstance(asked, Question)
        return asked.repeats

    def round(self, made: TextRound) -> Round:
        """As the method takes it."""
        drafted, accepted, token = made
        if self.drafter is None:
            # as often as plain decoding would have drawn
            return Round(drafted, accepted, token, draws=1 + accepted, draft_forwards=0)
        if self.look is not None:  # which is certain of its drafts, too
            looked = min(1, len(drafted))
            return Round(drafted, accepted, token, 1 + accepted + looked, draft_forwards=looked)
        forwards = len(drafted) if self.blanks is None else min(1, len(drafted))
        return Round(drafted, accepted, token, draws=1 + forwards, draft_forwards=forwards)

    @property
    def most_new(self) -> int:
        """Tokens that the model which drafts has not run, at most. One that looks into its target
        has not run the last one of the text before, either."""
        return 1 + self.most + (self.look is not None)

    @property
    def drafted_rows(self) -> int:
        """Slots behind its text that the next draft takes."""
        return self.block - 1 if self.block else min(self.most, AHEAD)

    @property
    def block(self) -> int:
        """Rows of a block, if a drafter looks into its target."""
        return 0 if self.look is None else len(self.look.block)

    def held_by(self, memo: Memo) -> int:
        """How many tokens the model that drafts has run."""
        if self.look is None:
            return memo.start(PlainText.of(self.text, len(self.text) - 1))
        return memo.start(self.look.about(self.text))

    def note_drafted(self, memo: Memo, text: np.ndarray, held: int) -> None:
        """It has run so many tokens of a text now."""
        if self.look is None:
            memo.wrote(self.held, text[self.held : held])
        else:
            memo.ran(self.look.about(text[: held + 1]), self.held)

    @property
    def full(self) -> int:
        """Tokens that the text has when it is full."""
        return len(self.one.seq.tokens)


class Rounds:
    """Some sequences that go on together."""

    def __init__(self, host: Host, drafting: Sequence[Drafting], drafter: Host | None):
        self.host = host
        self.forwards = 0  # of both models
        self.tokens: list[int] = []  # that came of each round
        self._drafting = drafting
        self._drafter = drafter

    @classmethod
    def after(cls, served: Sequence[Running], answers: Sequence[object]) -> Rounds | None:
        """Of all whose text has not ended with these verdicts; None where somebody does something
        else or gets his first tokens, which do not wait, or where it would not pay."""
        host = _host_that_goes_on(served, answers)
        if host is None or not all(one.seq.history.generated for one in served):
            return None
        drafting = []
        for one, verdict in zip(served, answers):
            assert isinstance(verdict, Verdict)
            found = _drafting(one, verdict)
            if found is None:
                return None
            if not _has_ended(found, verdict):
                drafting.append(found)
        drafters = {each.drafter for each in drafting} - {None}
        rows = sum(1 + each.most for each in drafting)
        if not drafting or len(drafters) > 1 or rows > MOST_ROWS:
            return None
        self = cls(host, drafting, next(iter(drafters), None))
        return self if self._can_run() and self._has_slots() else None

    def make(self, stop: Flag, first_ends: bool) -> None:
        """Make them, until `stop` is set or all texts have ended, or one with `first_ends`; and
        leave them on the canvases."""
        for each in self._drafting:
            self._claim(each)
        asked = RoundsAsked(
            [self._asked(each) for each in self._drafting],
            rounds=self._count(),
            seconds=ROUNDS_SECONDS,
            first_ends=first_ends,
            impossible=self.host.impossible_tokens,
            never_drafted=() if self._drafter is None else self._drafter.impossible_tokens,
            stop=stop,
        )
        self._hand_over(self.host.go_on(asked, self._drafter))

    def _count(self) -> int:
        """How many rounds fit into a launch, while all draft as they did."""
        alike = min(each.repeats for each in self._drafting)
        times = ROUNDS_SECONDS / LAUNCH_SECONDS_ON_CPU
        fit = int(times * writer_of(self.host).forwards_in_a_launch)
        return min(MOST_ROUNDS, fit, alike)

    def _can_run(self) -> bool:
        """Is the model small enough, and the one that drafts of the same kind?"""
        host, drafter = self.host, self._drafter
        if self._count() < LEAST_ROUNDS:
            return False
        if drafter is None:
            return True
        if drafter.backbone.vocab != host.backbone.vocab:
            return False
        looks = drafter.looks_into is host and getattr(drafter.backbone, "drafts_in_rounds", False)
        return looks or _moves_rows(drafter)

    def _has_slots(self) -> bool:
        """Are there slots for the next rows of all, and has the draft model run what comes before
        them?"""
        for each in self._drafting:
            if each.drafter is not None:
                memo = each.drafter.memos[each.one.lane]
                each.held = each.held_by(memo)
                if memo.gave_back or len(each.text) - each.held > each.most_new:
                    return False
                if self._room(each, each.drafter) < len(each.text) + each.drafted_rows:
                    return False
            if self._room(each, self.host) < len(each.text) + min(each.most, AHEAD):
                return False
        return all(self._has_pages(host) for host in self._hosts)

    @property
    def _hosts(self) -> list[Host]:
        return [self.host] if self._drafter is None else [self.host, self._drafter]

    def _has_pages(self, host: Host) -> bool:
        needed = sum(
            host.memos[each.one.lane].pages_needed(self._first(each, host), self._room(each, host))
            for each in self._drafting
            if host is self.host or host is each.drafter
        )
        return host.pool.ensure(needed)

    def _room(self, each: Drafting, host: Host) -> int:
        """Slots that a text may have written."""
        rooms = [min(other.room, other.backbone.context) for other in self._hosts]
        ahead = min(len(each.text) + max(AHEAD, each.most), each.full, *rooms)
        if host is self.host or not each.block:
            return ahead
        return min(ahead + each.block, host.room)  # where a block stands behind the last token

    def _first(self, each: Drafting, host: Host) -> int:
        """The first slot that is written: those before it hold what they should."""
        return each.held if host is each.drafter else len(each.text) - 1

    def _claim(self, each: Drafting) -> None:
        """Should the launch fail, nothing is known of what slots hold from there on."""
        for host in self._hosts:
            if host is self.host or host is each.drafter:
                first = self._first(each, host)
                memo = host.memos[each.one.lane]
                if host is each.drafter and each.look is not None:
                    memo.keep_at_most(first)
                else:
                    memo.keep(first)
                host.claim([(each.one.lane, first, self._room(each, host))])

    def _asked(self, each: Drafting) -> DraftingText:
        return DraftingText(
            each.text,
            each.one.lane,
            wanted=each.full,
            room=self._room(each, self.host),
            draft_room=0 if each.drafter is None else self._room(each, each.drafter),
            most=each.most,
            ends=each.one.seq.history.stop_tokens,
            run=each.run,
            reach=each.reach,
            held=each.held,
            mask=None if each.blanks is None else each.blanks.mask_token,
            shifted=each.blanks is not None and each.blanks.shifted,
            block=each.block,
        )

    def _hand_over(self, made: RoundsMade) -> None:
        for each, text, held, rounds in zip(self._drafting, made.texts, made.held, made.rounds):
            first = self._first(each, self.host)
            self.host.memos[each.one.lane].wrote(first, text[first:-1])
            if each.drafter is not None:
                each.note_drafted(each.drafter.memos[each.one.lane], text, held)
            each.one.seq.rounds = [each.round(one) for one in rounds]
        gained = [[one.accepted + 1 for one in rounds] for rounds in made.rounds]
        self.tokens = [sum(each) for each in zip_longest(*gained, fillvalue=0)]
        self.forwards = made.forwards.total
        if made.drafting is not None:
            self.forwards += made.drafting.total


def _host_that_goes_on(served: Sequence[Running], answers: Sequence[object]) -> Host | None:
    """The model that all have had a verdict of, if all will draft and judge again."""
    first = served[0].waits_for
    host = first.host if isinstance(first, Question) else None
    if not isinstance(host, Host) or not _moves_rows(host):
        return None
    for one, answer in zip(served, answers):
        asked = one.waits_for
        if not isinstance(answer, Verdict) or not isinstance(asked, Question):
            return None
        if not asked.repeats or type(asked.plan) is not PlainText or not _is_certain(one.seq):
            return None
    return host


def _is_certain(seq: Canvas) -> bool:
    """Is nothing left to chance, and nothing but blanks behind the text?"""
    to_its_end = seq.remaining == len(seq.tokens) - seq.known
    return to_its_end and seq.final_end == len(seq.tokens) and not seq.history.sampling.temperature


def _drafting(one: Running, verdict: Verdict) -> Drafting | None:
    """How a sequence will draft, if it does so as the last time."""
    asked = one.waits_for
    assert isinstance(asked, Question)
    known = one.seq.known
    chain = asked.plan.tokens[known:].tolist()
    text = text_and_chain(one.seq.text, [*chain[: verdict.accepted], verdict.token])
    copies = one.seq.copies
    if copies is not None and copies.known == known:
        reach = copies.reach
        if chain and reach is not None:
            reach = 2 * verdict.accepted + 1
        return Drafting(one, text, copies.most, copies.run, reach)
    return _drafting_by_model(one, text, chain)


def _drafting_by_model(one: Running, text: np.ndarray, chain: Sequence[int]) -> Drafting | None:
    """If a model has drafted this chain, and its draft was that of all it was asked."""
    drafted = one.draft_question
    if drafted is None or not isinstance(drafted.host, Host):
        return None
    if isinstance(drafted, Continuation):
        if drafted.length != one.seq.known or list(one.written) != chain:
            return None
        return Drafting(one, text, drafted.tokens, drafter=drafted.host)
    plan = drafted.plan
    if isinstance(plan, BlockPlan):
        if plan.causal_block or plan.stored != one.seq.known - 1 or not chain:
            return None
        return Drafting(one, text, plan.read_count, drafter=drafted.host, look=plan)
    if not isinstance(plan, MaskedText) or plan.stored != one.seq.known or not chain:
        return None
    return Drafting(one, text, plan.masks, drafter=drafted.host, blanks=plan)


def _has_ended(each: Drafting, verdict: Verdict) -> bool:
    """Has a text ended with its verdict?"""
    seq = each.one.seq
    new = each.text[len(each.text) - verdict.accepted - 1 :].tolist()
    return len(each.text) >= each.full or not seq.history.stop_tokens.isdisjoint(new)


def _moves_rows(host: Host) -> bool:
    writes = isinstance(host.writer, Continuations) and host.looks_into is None
    return writes and host.runner.moves_rows


def writer_of(host: Host) -> Continuations:
    """What a model writes on with."""
    assert isinstance(host.writer, Continuations)
    return host.writer
