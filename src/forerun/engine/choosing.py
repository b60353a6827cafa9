"""Which drafts pay, all sequences of a batch taken together: who drafts how many tokens in the next
step, or that nobody does.

The best choice gives most tokens per second: the tokens that a draft of k is expected to bring,
over what the step costs with k more rows, here and in this company. It looks at costs and at what
was accepted before, never at a draft.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Generic, NamedTuple

from forerun.engine.company import DEPTHS, IDLE, Company, Prospects, Wish
from forerun.engine.costs import StepCosts
from forerun.sequence.canvas import Canvas
from forerun.sequence.choosing import O, Offer

GAIN = 1.03  # a draft must promise so much more than none: estimates are noisy
GAIN_OF_MANY = 1.06  # in a full batch: whoever drafts does so at the expense of all
# and where steps are begun ahead: while somebody drafts, all think in every step, and none is begun
# before that. On an H200 batches of 8 lost up to 0.4 of their speed where few drafted.
GAIN_IN_STEP = 1.25
PROBES = 0.005  # share of the time that may go into drafts which do not promise to pay
ASKS_ALL = 8  # steps between two looks at offers that have not drafted
PROBE_EVERY = 16  # steps between two of them
PROBE_STEPS = 4  # drafts of one probe: a source may need some to get going, and costs three
PROBE_LENGTH = 4
MANY = 8  # sequences, from which on it counts what looking costs
TOO_MANY = 16  # from which on even a text's first looks do
IN_FULL_BATCH = 4  # tokens between two choices on a CPU, where nobody drafts
YOUNG = 3  # choices of a text, the first of which looks at nothing
FEWEST_ROUNDS = 2  # that follow a draft by themselves (`rounds.py`)


class Program(NamedTuple):
    """What a draft model runs to draft so many tokens: it is made when it is first asked for."""

    known_as: str
    k: int


@dataclass
class Account:
    """Seconds that steps were expected to take, and how many of them went into trying drafts."""

    all: float = 0.0
    probes: float = 0.0
    tried: set[str] = field(default_factory=set)  # draft models
    made: set[Program] = field(default_factory=set)
    missed: dict[Program, float] = field(default_factory=dict)  # seconds that one would have saved


class Bet(NamedTuple, Generic[O]):
    """A choice: who drafts, how many tokens, what comes of it and how long the step takes."""

    offer: O | None
    k: int
    tokens: float
    seconds: float


class RoundsBehind(NamedTuple):
    """Tokens and seconds of rounds that follow a draft."""

    tokens: float
    seconds: float


NO_ROUNDS = RoundsBehind(0.0, 0.0)


class BatchChooser:
    """Chooses for one sequence of a batch."""

    def __init__(self, seq: Canvas, costs: StepCosts, company: Company, account: Account):
        self.seq = seq
        self.costs = costs
        self.wish = Wish()
        self.stretch_end = 0
        self._company = company
        self._account = account
        self._seen = Prospects()  # at the last look
        self._drafted = False  # in the last step
        self._plain = 0  # choices in a row that nobody drafts
        self._waited = False  # for a step that nothing is begun behind
        self._choices = 0
        self._looks = 0  # steps in which a draft might have paid
        self._paid = 0  # the last of them in which one was wished for
        self._busy = 0  # steps for which an offer that must be asked counts as at work
        self._steps = 0  # since the last probe
        self._probed: str | None = None  # who is being tried
        self._tries = 0  # that are left of it
        company.join(self)

    def leave(self) -> None:
        """The sequence is over."""
        self._company.leave(self)

    @property
    def text_length(self) -> int:
        """Tokens that are written without a choice in between, as many as costs say at most:
        twice as many with every choice that nobody drafts. In a full batch it is enough that nobody
        just did; and where a launch has one length, a batch writes it whole, or all would wait for
        the one that does not. Where tokens come one by one, all choose in the same steps: drafts
        cost those beside them as much as those who draft."""
        if self._waited:  # for this one step, and drafts in the next
            return 1
        company = self._company
        any_length = self.costs.writes_any_length
        most = self.costs.between_choices
        # The first of several to come is alone; as many as were there last are taken to come.
        expected = max(company.sequences, self.costs.sequences if self.costs.shared else 1)
        if self.costs.begins_ahead and expected > 1:
            return company.until_next_choice(self, self._stretch(expected))
        if expected >= MANY and not company.just_drafted:
            return most if most > 1 else company.until_next_choice(self, self._stretch(expected))
        if expected > 1 and company.just_drafted:
            return 1
        if expected > 1 and not any_length:
            return most
        return min((1 if any_length else 2) << self._plain, most)

    def _stretch(self, sequences: int) -> int:
        """Tokens of plain text that all write before they choose again."""
        usual = self.costs.between_choices
        if sequences < MANY:
            return usual
        if self.costs.begins_ahead:
            return usual * self._company.patience
        return usual if usual > 1 else IN_FULL_BATCH * self._company.patience

    def prospects(self) -> Prospects:
        """What may come of drafts in this step, as far as it looked of late."""
        company = self._company
        if company.sequences >= MANY and self._looks_seldom and not company.is_time_to_look:
            return Prospects()
        return self._seen if self._asks_all else Prospects(self._seen.copied)

    def choose(self, offers: Sequence[O], most: int) -> tuple[O | None, int]:
        """Who drafts how many tokens now."""
        most = min(most, self.seq.remaining - 1)
        company = self._company
        begins = company.begins_step(self)
        if not self.costs.known or most < 1:
            self._seen = Prospects()
            company.wish_for(self, Wish())
            return self._decide(Bet(None, 0, 1.0, 0.0), 0.0)
        strangers = max(0, self.costs.sequences - company.sequences) if self.costs.shared else 0
        sequences = company.sequences + strangers
        plain = self.costs.plain(sequences)
        if self._need_not_look(sequences):
            company.wish_for(self, Wish())
            self._account.all += plain / sequences
            return self._decide(Bet(None, 0, 1.0, plain), plain)
        began = time.perf_counter()
        promises = self._look(self._worth_asking(offers), most)
        if begins:
            company.plan(self.costs, strangers, self._draft_forward(offers), self._depths(offers))
        bet = self._best_here(promises, most, strangers)
        company.wish_for(self, Wish(1 + bet.k, bet.tokens, self._draft_seconds(bet)))
        if bet.k:
            self._paid = self._looks
        if not self._pays(bet.seconds, plain / self._least_gain(sequences), strangers):
            if bet.offer is not None:  # it would not be drafted, so nothing is missed
                self._account.missed.pop(Program(bet.offer.known_as, bet.k), None)
            bet = Bet(None, 0, 1.0, plain)
        self._account.all += bet.seconds / sequences  # all of them share a step
        if bet.offer is None and (probed := self._probe(offers, most)):
            bet = Bet(probed, _probe_length(probed, most), 1.0, plain)
        elif bet.offer is not None:
            company.drafts()
        company.looked(time.perf_counter() - began, plain * self._stretch(sequences))
        return self._decide(bet, plain)

    def _least_gain(self, sequences: int) -> float:
        """What drafts must promise, times plain steps."""
        if sequences < MANY:
            return GAIN
        return GAIN_IN_STEP if self.costs.begins_ahead else GAIN_OF_MANY

    def _pays(self, seconds: float, plain: float, strangers: int) -> bool:
        """Is a step that takes so long better than plain ones, for all together? By tokens per
        second it is as soon as some get many; but if the others wait too long for them, those are
        done early and leave empty lanes, and all of them together are later. So it counts half, and
        half how much sooner a token comes, on average over sequences."""
        company = self._company
        sequences = company.sequences + strangers
        more = (company.tokens + strangers) / sequences
        sooner = sequences / (company.steps_per_token + strangers)
        return seconds <= plain * math.sqrt(more * sooner)

    @property
    def _looks_seldom(self) -> bool:
        """Has nobody drafted for a while? A text that has just begun looks twice all the same: what
        others found says little of it, and drafts that pay only together take two looks."""
        if self._looks <= YOUNG and self._company.sequences < TOO_MANY:
            return False
        return self._looks - self._paid > IDLE or self._company.is_idle

    @property
    def _asks_all(self) -> bool:
        """While only those draft that learn unasked, others are asked rarely: in the same steps by
        all, and in a text's second one. In the first its prompt is still to be read: no time for a
        draft model to read it, too."""
        if self._choices <= 1:
            return False
        return self._choices == 2 or self._busy > 0 or self._company.step % ASKS_ALL == 0

    def _need_not_look(self, sequences: int) -> bool:
        """In a full batch looking costs time, too: where no draft could pay, nobody looks; where
        none did for a while, everybody looks now and then, and nobody in a text's first step."""
        if not self.costs.worth_drafting(sequences):
            return True
        self._looks += 1
        if self._looks == 1 and sequences >= MANY and self.costs.begins_ahead:
            return True
        return sequences >= MANY and self._looks_seldom and not self._company.is_time_to_look

    def _look(self, offers: Sequence[O], most: int) -> list[tuple[O, list[float]]]:
        """The chances that so many tokens of each offer are accepted, by length."""
        promises = []
        best: dict[bool, tuple[float, list[float]]] = {}
        for offer in offers:
            reached = list(accumulate(offer.chances(most), mul))
            if not reached:
                continue
            promises.append((offer, reached))
            takes_time = offer.seconds(1) > 0
            worth = sum(reached) - self._company.price * len(reached)
            if takes_time not in best or worth > best[takes_time][0]:
                best[takes_time] = (worth, reached)
        copied = best[False][1] if False in best else []
        drafted = best[True][1] if True in best else self._seen.drafted
        self._seen = Prospects(copied, drafted)
        return promises

    @staticmethod
    def _draft_forward(offers: Sequence[O]) -> float:
        return max((offer.seconds(1) for offer in offers), default=0.0)

    @staticmethod
    def _draft_seconds(bet: Bet[O]) -> float:
        return bet.offer.seconds(bet.k) if bet.offer is not None else 0.0

    def _best_here(
        self, promises: Sequence[tuple[O, list[float]]], most: int, strangers: int
    ) -> Bet[O]:
        """Who promises most tokens per second, all sequences of the batch taken together, if the
        others do as is planned."""
        company = self._company
        rows = company.rows - self.wish.rows + strangers
        drafting = company.drafting - (self.wish.rows > 1)
        steps = self.costs.steps_with(rows, drafting, most)
        tokens = company.tokens - self.wish.tokens + strangers
        model_works = company.draft_seconds_beside(self)
        best: Bet[O] = Bet(None, 0, 1.0, steps[0] + model_works)
        # Rounds follow by themselves where nobody else is there, who would have to draft alike.
        alone = company.sequences + strangers == 1
        plain = self.costs.plain(1) if self.costs.launch and alone else 0.0
        highest = (tokens + 1) / best.seconds
        unmade: Bet[O] | None = None  # that would be better, but for what it takes at first
        highest_unmade = 0.0
        for offer, reached in promises:
            expected = 1.0
            to_begin = offer.seconds_to_begin() / self.seq.remaining  # a share for each token
            for k, chance in enumerate(reached, 1):
                expected += chance
                if k not in offer.lengths:
                    continue
                seconds = steps[k] + max(model_works, offer.seconds(k)) + to_begin * expected
                behind = self._rounds_behind(offer, k, expected, plain) if plain else NO_ROUNDS
                if behind.tokens:  # at the pace of both
                    seconds += behind.seconds
                    seconds *= expected / (expected + behind.tokens)
                rate = (tokens + expected) / seconds
                if self._is_made(offer, k):
                    if rate > highest:
                        highest = rate
                        best = Bet(offer, k, expected, seconds)
                elif rate > highest_unmade:
                    highest_unmade = rate
                    unmade = Bet(offer, k, expected, seconds)
        if unmade is not None and highest_unmade > highest:
            saved = unmade.seconds * (highest_unmade / highest - 1)
            if self._is_worth_making(unmade, saved):
                return unmade
        return best

    def _rounds_behind(self, offer: O, drafted: int, tokens: float, plain: float) -> RoundsBehind:
        """What follows a draft of this offer by itself, which is expected to bring so many tokens:
        rounds take no time of the host's. A step without a draft takes `plain`."""
        each = offer.round_behind(drafted, tokens)
        if each is None:
            return NO_ROUNDS
        slower = self.costs.forward(math.ceil(each.rows)) / self.costs.forward(1)
        seconds = slower * plain + each.seconds
        left = self.seq.remaining - drafted
        count = int(min(self.costs.launch / seconds, left / each.tokens))
        if count < FEWEST_ROUNDS:
            return NO_ROUNDS
        return RoundsBehind(count * each.tokens, count * seconds)

    def _is_made(self, offer: O, k: int) -> bool:
        if not self.costs.first_time or offer.seconds(1) == 0:
            return True
        return Program(offer.known_as, k) in self._account.made

    def _is_worth_making(self, bet: Bet[O], saved: float) -> bool:
        """What is drafted for the first time stops everybody. So it waits until it would have saved
        as much: then it cost at most twice what it must, whatever comes."""
        assert bet.offer is not None
        program = Program(bet.offer.known_as, bet.k)
        missed = self._account.missed
        steps = 1 if self._busy > 0 else ASKS_ALL  # that this look stands for
        missed[program] = missed.get(program, 0.0) + steps * saved
        return missed[program] >= self.costs.first_time

    def _depths(self, offers: Sequence[O]) -> Sequence[int]:
        """Depths of a draft model that are considered: those that are made, if others cost."""
        if not self.costs.first_time:
            return DEPTHS
        names = {each.known_as for each in offers}
        made = sorted({each.k for each in self._account.made if each.known_as in names})
        return (0, *made) if made else DEPTHS

    def _worth_asking(self, offers: Sequence[O]) -> Sequence[O]:
        self._choices += 1
        self._busy -= 1
        if self._asks_all:
            return offers
        if self._choices == 1:
            return [each for each in offers if each.seconds(1) == 0]
        return [each for each in offers if each.learns_unasked]

    def _probe(self, offers: Sequence[O], most: int) -> O | None:
        """Now and then, an offer of which only drafts tell whether they pay: as long as that costs
        next to nothing."""
        self._steps += 1
        unsure = [each for each in offers if not each.learns_unasked and _probe_length(each, most)]
        if self._tries:
            self._tries -= 1
            return next((each for each in unsure if each.name == self._probed), None)
        if self._steps % PROBE_EVERY or not unsure:
            return None
        offer = unsure[self._steps // PROBE_EVERY % len(unsure)]
        k = _probe_length(offer, most)
        beside = self._company.sequences - 1
        steps = self.costs.steps_with(beside, 0, most)
        # Where the others write several tokens at once, a draft is a step of its own.
        shared = 0.0 if beside and self.costs.at_once > 1 else steps[0]
        loss = PROBE_STEPS * (steps[k] + offer.seconds(k) - shared)
        account = self._account
        # Whoever names a draft model has a reason to: once, alone, it is tried whatever that takes.
        is_new = not beside and offer.seconds(1) > 0 and offer.known_as not in account.tried
        too_much = not is_new and account.probes + loss > PROBES * account.all
        if too_much or not offer.chances(k):
            return None
        if is_new:
            account.tried.add(offer.known_as)
        else:
            account.probes += max(0.0, loss)
        self._probed = offer.name
        self._tries = PROBE_STEPS - 1
        return offer

    def _decide(self, bet: Bet[O], plain: float) -> tuple[O | None, int]:
        self.seq.draft_follows = False
        if bet.offer is not None and not bet.offer.learns_unasked:
            self._busy = 4 * ASKS_ALL  # also if it must wait for a step: it is asked again then
        if bet.k and not self._drafted and self.costs.begins_ahead and not self._waited:
            # The plain step has begun: take it, and have nothing begun behind it.
            self.seq.draft_follows = self._waited = True
            bet = Bet(None, 0, 1.0, plain)
        else:
            self._waited = False
        self._drafted = bet.k > 0
        if bet.offer is not None and bet.offer.seconds(1) > 0:
            self._account.made.add(Program(bet.offer.known_as, bet.k))
        self._plain = 0 if bet.k else self._plain + 1
        name = "none" if bet.offer is None else bet.offer.name
        self.seq.note_choice(name, bet.k, (bet.tokens, bet.seconds, plain))
        return bet.offer, bet.k


def _probe_length(offer: Offer, most: int) -> int:
    """Tokens of a draft that is tried; none where it has no such lengths."""
    return max((k for k in offer.lengths if k <= min(most, PROBE_LENGTH)), default=0)
