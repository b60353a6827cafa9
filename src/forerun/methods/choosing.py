"""What `auto` decides by: who drafts how many tokens in the next step, or that nobody does.

The best choice gives most tokens per second: the tokens that a draft of k is expected to bring,
over what the step costs with k more rows, here and in this company.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forerun.drafters.base import NO_DRAFT, Draft, Drafter, without_waste
from forerun.families.base import ChainScorer
from forerun.methods.sources import Source, sources_of
from forerun.sequence.canvas import Canvas

GAIN = 1.04  # a draft must promise so much more than none: estimates are noisy
PROBES = 0.01  # share of the time that may go into drafts which do not promise to pay
ASKS_ALL = 8  # steps between two looks at sources that have not drafted
PROBE_EVERY = 16  # steps between two of them
PROBE_STEPS = 3  # drafts of one probe: a source may need some to get going
PROBE_LENGTH = 4
log = logging.getLogger("forerun")


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
    tokens: float = 0.0

    def change(self, before: Wish, after: Wish) -> None:
        self.rows += after.rows - before.rows
        self.tokens += after.tokens - before.tokens

    def join(self, wish: Wish, sequences: int = 1) -> None:
        self.sequences += sequences
        self.rows += sequences * wish.rows
        self.tokens += sequences * wish.tokens


class Chooser:
    """Chooses for one sequence."""

    def __init__(
        self, seq: Canvas, target: ChainScorer, drafter: Drafter | None, most: int, learn: bool
    ):
        self.seq = seq
        self.costs = target.costs
        self.most = most
        self.nobody = Source(seq, target)
        self.sources = sources_of(seq, target, drafter, learn)
        self._company = Company()
        if self.costs.shared:
            self._company = target.shared_state.setdefault("auto company", self._company)
        self._wish = Wish()
        self._company.join(self._wish)
        self._account = Account()
        if learn:
            self._account = target.shared_state.setdefault("auto account", self._account)
        self._drafted = False  # in the last step
        self._waited = False  # for a step that nothing is begun behind
        self._choices = 0
        self._busy = 0  # steps for which a source that must be asked counts as at work
        self._steps = 0  # since the last probe
        self._probed: list[Source] = []  # and what is left of one

    def leave(self) -> None:
        """The sequence is over."""
        self._company.join(self._wish, -1)

    def choose(self) -> tuple[Source, int]:
        """Who drafts how many tokens now."""
        most = min(self.most, self.seq.remaining - 1)
        if not self.costs.known or most < 1:
            return self._decide(self.nobody, 0, (1.0, 0.0, 0.0))
        company = self._company
        strangers = max(0, self.costs.sequences - company.sequences) if self.costs.shared else 0
        plain = self.costs.plain(company.sequences + strangers)
        beside = company.tokens - self._wish.tokens + strangers
        steps = self.costs.steps_with(company.rows - self._wish.rows + strangers, most)
        source, k, expected, seconds = self._best(most, steps, beside)
        wish = Wish(1 + k, expected)
        company.change(self._wish, wish)
        self._wish = wish
        if (beside + expected) / seconds < GAIN * (company.sequences + strangers) / plain:
            source, k, expected, seconds = self.nobody, 0, 1.0, plain
        self._account.all += seconds
        if source is self.nobody and (probed := self._probe(most, steps)):
            source = probed
            k = min(most, PROBE_LENGTH)
        return self._decide(source, k, (expected, seconds, plain))

    def _best(
        self, most: int, steps: Sequence[float], beside: float
    ) -> tuple[Source, int, float, float]:
        """Who promises most tokens per second, all sequences of the batch taken together: the
        source, its tokens, what comes of them and how long it takes."""
        best = (self.nobody, 0, 1.0, steps[0])
        highest = (beside + 1) / steps[0]
        for source in self._worth_asking():
            expected = 1.0
            reached = 1.0  # the chance that all tokens so far are accepted
            for k, chance in enumerate(source.chances(most), 1):
                reached *= chance
                expected += reached
                if k in source.lengths:
                    seconds = steps[k] + source.seconds(k)
                    if (beside + expected) / seconds > highest:
                        highest = (beside + expected) / seconds
                        best = (source, k, expected, seconds)
        return best

    def _worth_asking(self) -> list[Source]:
        """All sources; while only those draft that learn unasked, others are asked rarely."""
        self._choices += 1
        self._busy -= 1
        if self._choices % ASKS_ALL == 1 or self._busy > 0:
            return self.sources
        return [each for each in self.sources if each.learns_unasked]

    def _probe(self, most: int, steps: Sequence[float]) -> Source | None:
        """Now and then, a source of which only drafts tell whether they pay: as long as that costs
        next to nothing."""
        self._steps += 1
        if self._probed:
            return self._probed.pop()
        unsure = [each for each in self.sources if not each.learns_unasked]
        if self._steps % PROBE_EVERY or not unsure:
            return None
        source = unsure[self._steps // PROBE_EVERY % len(unsure)]
        k = min(most, PROBE_LENGTH)
        loss = PROBE_STEPS * (steps[k] + source.seconds(k) - steps[0])
        if self._account.probes + loss > PROBES * self._account.all or not source.chances(k):
            return None
        self._account.probes += max(0.0, loss)
        self._probed = [source] * (PROBE_STEPS - 1)
        return source

    def _decide(
        self, source: Source, k: int, expected: tuple[float, float, float]
    ) -> tuple[Source, int]:
        self.seq.draft_follows = False
        if k and not self._drafted and self.costs.begins_ahead and not self._waited:
            # The plain step has begun: take it, and have nothing begun behind it.
            self.seq.draft_follows = self._waited = True
            source, k, expected = self.nobody, 0, (1.0, expected[2], expected[2])
        else:
            self._waited = False
        self._drafted = k > 0
        if k and not source.learns_unasked:
            self._busy = 4 * ASKS_ALL
        self.seq.note_choice(source.name, k, expected)
        return source, k

    async def draft(self, source: Source, k: int) -> Draft:
        """The draft that was chosen. A source that fails is dropped, and the trace says so."""
        if not k:
            return NO_DRAFT
        try:
            return without_waste(self.seq, await source.propose(k))
        except Exception as error:
            self.sources.remove(source)
            self._probed.clear()
            words = f"drafter '{source.name}' failed and was dropped for this request: {error}"
            self.seq.trace.notes.append(words)
            log.warning(words)
            return NO_DRAFT
