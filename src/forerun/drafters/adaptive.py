"""How many tokens are worth drafting, from the outcome of the last drafts and from what forwards
cost here.

It is a function of what is decided already, and of costs. So whatever it says, exact methods stay
exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from forerun.families.base import ModelHandle
from forerun.options import Sampling
from forerun.sequence.canvas import Canvas

RECENT = 16  # verdicts that count
LEAST_CHANCE = 0.1  # a token is worth drafting if it is accepted at least this often
PRIOR_ACCEPTED = 2.0  # tokens that count as accepted before the first verdict
PRIOR_TRIED = 2.5
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # few: on a GPU each is captured
# Forwards in which drafts have the same length, at first and later: less is new then.
REVISED = 8
REVISED_LATER = 16
REVISED_AT_MOST = 32  # where the engine drafts on by itself
ALWAYS = 1 << 30  # as many as come
LONGER = 1.5  # how many times as long as with one guess a step may be


class DraftLength:
    """Options of a method that drafts: how many tokens, if the caller says so.

    Else as many as pay here, where that changes no text: drafts that are certain of themselves are
    judged by what plain decoding draws, and at temperature 0 all drafts are. Other drafts have the
    usual length, so that one seed gives one text.
    """

    k: int | None
    option: ClassVar[str] = "k"  # its name
    usual: ClassVar[int]
    most: ClassVar[int] = 16  # that are considered
    certain: ClassVar[bool] = False  # are drafts certain of themselves?

    @property
    def given(self) -> int | None:
        length: int | None = getattr(self, self.option)
        return length

    @property
    def lengths(self) -> list[int]:
        return [k for k in LENGTHS if k <= self.most]

    def follows_costs(self, sampling: Sampling) -> bool:
        """Is it left open, and does it change no text?"""
        return self.given is None and (self.certain or sampling.temperature == 0)


def one() -> int:
    return 1


class PayingLength:
    """How many tokens a text's next draft has, at most so many if `most` says so. `draft_seconds`
    says what drafting k of them takes, and `rows_each` how many rows of a forward one of them
    costs."""

    def __init__(
        self,
        seq: Canvas,
        target: ModelHandle,
        options: DraftLength,
        draft_seconds: Callable[[int], float] = lambda k: 0.0,
        rows_each: int = 1,
        most: int | None = None,
    ):
        self._seq = seq
        self._costs = target.costs
        self._lengths = options.lengths
        if most is not None:
            self._lengths = sorted({min(k, most) for k in self._lengths})
        self._draft_seconds = draft_seconds
        self._rows_each = rows_each
        self._follows = options.follows_costs(seq.history.sampling) and target.costs.known
        # Of copies either nothing is right or much of it: the mean would say too little.
        self._least = partial(guess_length, seq, target, options) if options.certain else one
        self._length = options.given or options.usual
        self._until = 0  # forwards of the target, after which the length is looked at again

    def __call__(self) -> int:
        forwards = self._seq.trace.forwards
        if self._follows and forwards >= self._until:
            rate = acceptance_rate(self._seq)
            self._length = max(self._least(), max(self._lengths, key=partial(self._speed, rate)))
            revised = min(max(forwards, REVISED), REVISED_LATER)
            alike = min(1 + self._rounds_in_a_launch(), REVISED_AT_MOST)
            self._until = forwards + max(revised, alike)
        return self._length

    def _rounds_in_a_launch(self) -> int:
        """Drafts of this length that the engine makes and judges by itself, one after the other: to
        look at the length again would stop it, which takes longer than another length saves."""
        rows = 1 + self._rows_each * self._length
        seconds = self._costs.forward(rows) + self._draft_seconds(self._length)
        return int(self._costs.launch / seconds)

    @property
    def stays(self) -> int:
        """How many drafts after the next one have this length, too."""
        return self._until - self._seq.trace.forwards - 1 if self._follows else ALWAYS

    def _speed(self, rate: float, k: int) -> float:
        tokens = (1 - rate ** (k + 1)) / (1 - rate)
        rows = 1 + self._rows_each * k
        return self._costs.tokens_per_second(rows, tokens, self._draft_seconds(k))


def guess_length(seq: Canvas, target: ModelHandle, options: DraftLength) -> int:
    """How many tokens of a text to guess at once. Guesses cost nothing but rows, and deep ones
    become right while those before them are mended: so they go as deep as a step is not much
    longer if all guess as many."""
    costs = target.costs
    if not options.follows_costs(seq.history.sampling) or not costs.known:
        return options.given or options.usual
    longest = LONGER * costs.seconds_if_all_have(2)
    return max(k for k in options.lengths if costs.seconds_if_all_have(1 + k) <= longest)


def acceptance_rate(seq: Canvas) -> float:
    """How often a drafted token was accepted of late, those before it being so; below 1."""
    accepted = PRIOR_ACCEPTED
    tried = PRIOR_TRIED
    seen = 0
    for event in reversed(seq.trace.events):
        if event.drafted:
            accepted += event.accepted
            tried += min(len(event.drafted), event.accepted + 1)
            seen += 1
        if seen == RECENT:
            break
    return accepted / tried


def adaptive_length(seq: Canvas, most: int) -> int:
    """At least one token, if any may be drafted, and at most `most`: while the chance that all are
    accepted is worth it."""
    rate = acceptance_rate(seq)
    return min(most, max(1, int(math.log(LEAST_CHANCE) / math.log(rate))))
