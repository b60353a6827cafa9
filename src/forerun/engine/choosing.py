"""Which drafts pay, all sequences of a batch taken together: who drafts how many tokens in the next
step, or that nobody does.

The best choice gives most tokens per second: the tokens that a draft of k is expected to bring,
over what the step costs with k more rows, here and in this company. It looks at costs and at what
was accepted before, never at a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

from forerun.engine.costs import StepCosts
from forerun.sequence.canvas import Canvas
from forerun.sequence.choosing import O

GAIN = 1.03  # a draft must promise so much more than none: estimates are noisy
GAIN_OF_MANY = 1.06  # in a full batch: whoever drafts does so at the expense of all
PROBES = 0.005  # share of the time that may go into drafts which do not promise to pay
ASKS_ALL = 8  # steps between two looks at offers that have not drafted
PROBE_EVERY = 16  # steps between two of them
PROBE_STEPS = 3  # drafts of one probe: a source may need some to get going
PROBE_LENGTH = 4
MANY = 8  # sequences, from which on it counts what looking costs
IDLE = 16  # steps without a draft, after which a sequence looks seldom
SELDOM = 4  # steps between two looks then


@dataclass
class Account:
    """Seconds that steps were expected to take, and how many of them went into trying drafts."""

    all: float = 0.0
    probes: float = 0.0


class Wish(NamedTuple):
    """What a sequence would have of a step if drafts paid: rows, and the tokens that they bring."""

    rows: int = 1
    tokens: float = 1.0


@dataclass
class Company:
    """The wishes of all sequences that choose. One that drafts alone takes from all others what is
    begun ahead, and may never pay; all together may. So it is decided for all of them."""

    sequences: int = 0
    rows: int = 0
    drafting: int = 0  # sequences that would have more than one row
    tokens: float = 0.0

    def join(self, wish: Wish, sequences: int = 1) -> None:
        self.sequences += sequences
        self.rows += sequences * wish.rows
        self.drafting += sequences * (wish.rows > 1)
        self.tokens += sequences * wish.tokens


class Bet(NamedTuple, Generic[O]):
    """A choice: who drafts, how many tokens, what comes of it and how long the step takes."""

    offer: O | None
    k: int
    tokens: float
    seconds: float


class BatchChooser:
    """Chooses for one sequence of a batch."""

    def __init__(self, seq: Canvas, costs: StepCosts, company: Company, account: Account):
        self.seq = seq
        self.costs = costs
        self._company = company
        self._account = account
        self._wish = Wish()
        self._company.join(self._wish)
        self._drafted = False  # in the last step
        self._waited = False  # for a step that nothing is begun behind
        self._choices = 0
        self._looks = 0  # steps in which a draft might have paid
        self._paid = 0  # the last of them in which one was wished for
        self._busy = 0  # steps for which an offer that must be asked counts as at work
        self._steps = 0  # since the last probe
        self._probed: str | None = None  # who is being tried
        self._tries = 0  # that are left of it

    def leave(self) -> None:
        """The sequence is over."""
        self._company.join(self._wish, -1)

    def choose(self, offers: Sequence[O], most: int) -> tuple[O | None, int]:
        """Who drafts how many tokens now."""
        most = min(most, self.seq.remaining - 1)
        if not self.costs.known or most < 1:
            return self._decide(Bet(None, 0, 1.0, 0.0), 0.0)
        company = self._company
        strangers = max(0, self.costs.sequences - company.sequences) if self.costs.shared else 0
        sequences = company.sequences + strangers
        plain = self.costs.plain(sequences)
        if self._need_not_look(sequences):
            self._wish_for(Wish())
            self._account.all += plain / sequences
            return self._decide(Bet(None, 0, 1.0, plain), plain)
        beside = company.tokens - self._wish.tokens + strangers
        others = company.rows - self._wish.rows + strangers
        drafting = company.drafting - (self._wish.rows > 1)
        steps = self.costs.steps_with(others, drafting, most)
        bet = self._best(self._worth_asking(offers), most, steps, beside)
        self._wish_for(Wish(1 + bet.k, bet.tokens))
        if bet.k:
            self._paid = self._looks
        gain = GAIN if sequences < MANY else GAIN_OF_MANY
        if (beside + bet.tokens) / bet.seconds < gain * sequences / plain:
            bet = Bet(None, 0, 1.0, plain)
        self._account.all += bet.seconds / sequences  # all of them share a step
        if bet.offer is None and (probed := self._probe(offers, most, steps)):
            bet = Bet(probed, min(most, PROBE_LENGTH), 1.0, plain)
        return self._decide(bet, plain)

    def _need_not_look(self, sequences: int) -> bool:
        """In a full batch looking costs time, too: where no draft could pay, nobody looks; where
        none did for a while, everybody looks now and then."""
        if not self.costs.worth_drafting(sequences):
            return True
        self._looks += 1
        idle = self._looks - self._paid > IDLE
        return sequences >= MANY and idle and self._looks % SELDOM > 0

    def _wish_for(self, wish: Wish) -> None:
        self._company.join(self._wish, -1)
        self._company.join(wish)
        self._wish = wish

    @staticmethod
    def _best(offers: Sequence[O], most: int, steps: Sequence[float], beside: float) -> Bet[O]:
        """Who promises most tokens per second, all sequences of the batch taken together."""
        best: Bet[O] = Bet(None, 0, 1.0, steps[0])
        highest = (beside + 1) / steps[0]
        for offer in offers:
            expected = 1.0
            reached = 1.0  # the chance that all tokens so far are accepted
            for k, chance in enumerate(offer.chances(most), 1):
                reached *= chance
                expected += reached
                if k in offer.lengths:
                    seconds = steps[k] + offer.seconds(k)
                    if (beside + expected) / seconds > highest:
                        highest = (beside + expected) / seconds
                        best = Bet(offer, k, expected, seconds)
        return best

    def _worth_asking(self, offers: Sequence[O]) -> Sequence[O]:
        """All offers; while only those draft that learn unasked, others are asked rarely."""
        self._choices += 1
        self._busy -= 1
        if self._choices % ASKS_ALL == 1 or self._busy > 0:
            return offers
        return [each for each in offers if each.learns_unasked]

    def _probe(self, offers: Sequence[O], most: int, steps: Sequence[float]) -> O | None:
        """Now and then, an offer of which only drafts tell whether they pay: as long as that costs
        next to nothing."""
        self._steps += 1
        unsure = [each for each in offers if not each.learns_unasked]
        if self._tries:
            self._tries -= 1
            return next((each for each in unsure if each.name == self._probed), None)
        if self._steps % PROBE_EVERY or not unsure:
            return None
        offer = unsure[self._steps // PROBE_EVERY % len(unsure)]
        k = min(most, PROBE_LENGTH)
        loss = PROBE_STEPS * (steps[k] + offer.seconds(k) - steps[0])
        if self._account.probes + loss > PROBES * self._account.all or not offer.chances(k):
            return None
        self._account.probes += max(0.0, loss)
        self._probed = offer.name
        self._tries = PROBE_STEPS - 1
        return offer

    def _decide(self, bet: Bet[O], plain: float) -> tuple[O | None, int]:
        self.seq.draft_follows = False
        if bet.k and not self._drafted and self.costs.begins_ahead and not self._waited:
            # The plain step has begun: take it, and have nothing begun behind it.
            self.seq.draft_follows = self._waited = True
            bet = Bet(None, 0, 1.0, plain)
        else:
            self._waited = False
        self._drafted = bet.k > 0
        name = "none"
        if bet.offer is not None:
            name = bet.offer.name
            if not bet.offer.learns_unasked:
                self._busy = 4 * ASKS_ALL
        self.seq.note_choice(name, bet.k, (bet.tokens, bet.seconds, plain))
        return bet.offer, bet.k
