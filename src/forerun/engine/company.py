"""The drafts of all sequences of a batch, planned together.

One that drafts alone may pay for all of what drafting costs: the next step of a cost curve,
forwards of a draft model, what would have been begun ahead. All together may gain where nobody
alone does. So once per step lengths are planned for everybody, from what each could expect when it
last looked; then each sequence mends its own part, with what it knows by now.

B sequences that choose, K places of a draft, D depths of a draft model, N drafted rows in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from forerun.engine.costs import FEW, StepCosts
from forerun.sequence.canvas import Canvas

DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # of drafts by a model, that are considered
A_FEW = 4  # sequences: for fewer, planning costs each of them more than it is worth in every step
SELDOM = 4  # steps between two plans then
IDLE = 16  # tokens of each in which nobody drafts, after which all look at drafts seldom
LOOKING = 0.01  # share of the time that looking may take then
RARELY = 64  # steps between two looks at most
IN_VAIN = 2  # looks of all, after which they wait once as long more before they choose again
PATIENT = 4  # times as long, at most
Floats = NDArray[np.float64]


class Wish(NamedTuple):
    """What a sequence would have of a step if drafts paid: rows, the tokens that they bring, and
    the seconds that a draft model works for them."""

    rows: int = 1
    tokens: float = 1.0
    seconds: float = 0.0


class Prospects(NamedTuple):
    """The chances of a sequence that so many drafted tokens are accepted, by length: of the best
    drafter that takes no time, and of a draft model."""

    copied: Sequence[float] = ()
    drafted: Sequence[float] = ()


class Member(Protocol):
    """Whoever chooses for one sequence."""

    seq: Canvas
    wish: Wish
    stretch_end: int  # the text's length at its next choice

    def prospects(self) -> Prospects:
        """As far as it will consider them in this step."""
        ...


class Company:
    """All sequences that choose, and what is planned for each."""

    def __init__(self) -> None:
        self.step = 0  # so many were planned
        self.rows = 0
        self.drafting = 0  # sequences that would have more than one row
        self.tokens = 0.0
        self.steps_per_token = 0.0  # of all members, added up
        self.price = 0.0  # a row that promises fewer tokens is not worth it
        self._members: dict[Member, None] = {}
        self._chose: set[Member] = set()  # in this step
        self._changed = False  # has somebody come since the last plan?
        self._came = False  # and before that?
        self._drafted = -2  # the last step in which somebody did
        self._since = IDLE + 1  # tokens of each since then
        self._stretch = 1  # tokens that each writes in this step
        self._looks = 0.0  # seconds that went into looking in this step
        self._step_seconds = 1.0
        self._look = 0.0  # and in one in which all look
        self._interval = SELDOM  # steps between two looks where nobody drafts
        self._in_vain = 0  # looks of all in a row
        self._waits = False  # do texts go on for some tokens before they choose again?

    @property
    def sequences(self) -> int:
        return len(self._members)

    def join(self, member: Member) -> None:
        self._members[member] = None
        self._count(member.wish, 1)
        self._changed = True

    def leave(self, member: Member) -> None:
        if member in self._members:
            del self._members[member]
            self._chose.discard(member)  # or it would live as long as the model
            self._count(member.wish, -1)
        if not self._members:  # fractions that were added and taken away leave something
            self.tokens = self.steps_per_token = 0.0

    def wish_for(self, member: Member, wish: Wish) -> None:
        self._count(member.wish, -1)
        self._count(wish, 1)
        member.wish = wish

    def _count(self, wish: Wish, sequences: int) -> None:
        self.rows += sequences * wish.rows
        self.drafting += sequences * (wish.rows > 1)
        self.tokens += sequences * wish.tokens
        self.steps_per_token += sequences / wish.tokens

    @property
    def is_idle(self) -> bool:
        """Has nobody drafted for a while, whoever was there?"""
        return self._since > IDLE

    @property
    def is_time_to_look(self) -> bool:
        """All look in the same steps: where drafts pay only together, nobody would begin."""
        return self.step % self._interval == 0

    @property
    def patience(self) -> int:
        """How many times as many tokens as usual are written between two choices: the more, the
        more often all looked in vain. To choose takes time, too."""
        return min(1 + self._in_vain // IN_VAIN, PATIENT) if self._waits else 1

    def drafts(self) -> None:
        """Somebody does in this step."""
        self._drafted = self.step
        self._since = 0
        self._in_vain = 0

    @property
    def just_drafted(self) -> bool:
        """Did somebody draft in this step or the last?"""
        return self.step - self._drafted <= 1

    def until_next_choice(self, member: Member, most: int) -> int:
        """Tokens that a text writes before it chooses again: until the others do, or while
        somebody drafts, one; after that as many as nobody has drafted for. A step without drafts
        may have been one in which somebody came, or was nearly done."""
        self._waits = True
        known = member.seq.known
        tokens = 1
        if not self.just_drafted:
            tokens = self._left_of_stretch(member) or min(most, max(1, self._since))
        self._stretch = max(self._stretch, tokens)
        member.stretch_end = known + tokens
        return tokens

    def _left_of_stretch(self, member: Member) -> int:
        """Tokens that the others still write, each as many as any other. In a step they get theirs
        in the order in which they came: those behind this one have not got it yet."""
        behind = 0
        for one in self._members:
            if one is member:
                behind = 1
                continue
            left = one.stretch_end - one.seq.known - behind
            if left > 0:
                return left
        return 0

    def looked(self, seconds: float, step_seconds: float) -> None:
        """A sequence took so long to look at drafts, where a step takes so long."""
        self._looks += seconds
        self._step_seconds = step_seconds

    def _count_looks(self) -> None:
        """Set when all look next, by what looking took in the last step: the same for everybody."""
        self._look += 0.5 * (self._looks - self._look)
        self._looks = 0.0
        self._in_vain += 1
        wanted = self._look / (LOOKING * self._step_seconds)
        self._interval = int(min(max(SELDOM // self.patience, wanted), RARELY))

    def draft_seconds_beside(self, member: Member) -> float:
        """How long a draft model works for the others: it serves all of them at once."""
        return max((one.wish.seconds for one in self._members if one is not member), default=0.0)

    def begins_step(self, member: Member) -> bool:
        """Is it time for a plan, since this one has chosen in this step already, or somebody has
        come? Those who come begin no step of their own: many may come at once, and steps are what
        looks are counted by."""
        chooses_again = member in self._chose
        begins = self._changed or chooses_again
        if begins:
            self._came = self._changed
            self._changed = False
        if chooses_again:
            self.step += 1
            self._since += self._stretch
            self._stretch = 1
            self._chose.clear()
            if self._looks:
                self._count_looks()
        self._chose.add(member)
        return begins

    def plan(
        self,
        costs: StepCosts,
        strangers: int,
        draft_forward: float,
        depths: Sequence[int] = DEPTHS,
    ) -> None:
        """Plan a step for everybody, beside so many sequences that never draft."""
        if self.sequences < 2 or (self.sequences < A_FEW and self.step % SELDOM and not self._came):
            return
        members = list(self._members)
        prospects = [one.prospects() for one in members]
        if not any(each.copied or each.drafted for each in prospects):
            for one in members:
                self.wish_for(one, Wish())
            return
        copied_BK = as_table([each.copied for each in prospects])
        drafted_BK = as_table([each.drafted for each in prospects])
        found = best_together(
            gains_by_depth(copied_BK, drafted_BK, self.price, depths),
            costs,
            strangers,
            draft_forward,
        )
        self.price = found.price
        models = (drafted_BK[:, 0] > 0) & (found.depth > 0)
        tokens = found.tokens_B.tolist()
        for i, k in enumerate(found.lengths_B.tolist()):
            seconds = draft_forward * min(k, found.depth) if models[i] else 0.0
            self.wish_for(members[i], Wish(1 + k, 1 + tokens[i], seconds))


class Plan(NamedTuple):
    """How many tokens each sequence drafts, and how many it may expect of them."""

    lengths_B: NDArray[np.int64]
    tokens_B: Floats
    depth: int  # of drafts by a model
    price: float


def as_table(rows: Sequence[Sequence[float]]) -> Floats:
    """Chances by sequence and place; 0 where nothing is said."""
    table_BK = np.zeros((len(rows), FEW))
    for row_K, row in zip(table_BK, rows):
        if row:
            row_K[: len(row)] = row[:FEW]
    return table_BK


def gains_by_depth(
    copied_BK: Floats, drafted_BK: Floats, price: float, depths: Sequence[int] = DEPTHS
) -> tuple[Sequence[int], Floats]:
    """Depths of a draft model, and the tokens that each place of a draft is expected to bring at
    each of them, [D, B, K]: of whichever drafter brings more than its rows are worth."""
    if not drafted_BK.any():
        return (0,), copied_BK[None]
    depths_D = np.array(depths)
    within_DK = np.arange(FEW) < depths_D[:, None]
    drafted_DBK = drafted_BK * within_DK[:, None]
    worth_DB = np.maximum(drafted_DBK - price, 0).sum(-1)
    copies_DB = np.maximum(copied_BK - price, 0).sum(-1) >= worth_DB
    return depths, np.where(copies_DB[..., None], copied_BK, drafted_DBK)


def best_together(
    gains: tuple[Sequence[int], Floats], costs: StepCosts, strangers: int, draft_forward: float
) -> Plan:
    """The lengths that give most tokens per second: rows are added by what they promise, and of all
    numbers of rows the best is taken.

    Whoever drafts has the host work, whatever the length. So the first rows of a sequence count as
    one, as many as are best on average: `slopes`.
    """
    depths, gains_DBK = gains
    many, sequences, places = gains_DBK.shape
    least = sequences + strangers
    rate = least / costs.plain(least)
    total_DBK = gains_DBK.cumsum(-1)
    average_DBK = (total_DBK - rate * costs.each_more) / np.arange(1, places + 1)
    first_DB1 = average_DBK.argmax(-1)[..., None]
    top_DB1 = np.take_along_axis(average_DBK, first_DB1, -1)
    slopes_DBK = np.where(np.arange(places) <= first_DB1, top_DB1, gains_DBK)
    order_DN = np.argsort(-slopes_DBK.reshape(many, -1), axis=1, kind="stable")
    tokens_DN = np.take_along_axis(gains_DBK.reshape(many, -1), order_DN, 1).cumsum(1)
    drafting_DN = (order_DN % places == 0).cumsum(1)
    judged_N = costs.judged_steps(least + order_DN.shape[1])[least + 1 :]
    model_D1 = draft_forward * np.array(depths)[:, None]
    rates_DN = (least + tokens_DN) / (judged_N + costs.each_more * drafting_DN + model_D1)
    d, last = divmod(int(rates_DN.argmax()), order_DN.shape[1])
    if rates_DN[d, last] <= rate:
        return Plan(np.zeros(sequences, np.int64), np.zeros(sequences), 0, 0.0)
    taken_N = order_DN[d, : last + 1]
    lengths_B = np.bincount(taken_N // places, minlength=sequences)
    ends_B = np.maximum(lengths_B - 1, 0)
    tokens_B = np.where(lengths_B > 0, total_DBK[d, np.arange(sequences), ends_B], 0.0)
    return Plan(lengths_B, tokens_B, depths[d], float(slopes_DBK[d].ravel()[taken_N[-1]]))
