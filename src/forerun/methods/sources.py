"""Whoever can draft for a sequence, as `auto` sees them: what they promise, cost and say."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from forerun.drafters.adaptive import ALWAYS
from forerun.drafters.base import (
    NO_DRAFT,
    Draft,
    Drafter,
    ModelDraft,
    draft_seconds,
    drafts_alike,
    most_drafted,
    spelled_out,
    without_waste,
)
from forerun.drafters.copying import FIRST_ODDS, FIRST_SHARE, LONGEST_RUN, Copying
from forerun.drafters.odds import ModelOdds, Odds
from forerun.families.base import ChainScorer
from forerun.methods.jacobi import guess, judge_guess
from forerun.methods.speculative import judge
from forerun.sequence.canvas import Canvas
from forerun.sequence.canvas import Copies as Copied
from forerun.sequence.choosing import ExpectedRound

# Odds of a draft by depth, before anything was seen.
FIRST_DRAFTED = (0.7,) * 8
FIRST_SPELLED = (0.9,) * 4
FIRST_GUESSED = (0.08, 0.05, 0.05, 0.05)
MOST_IN_ROUNDS = 8  # tokens of a copy that the engine follows by itself
GIVE_UP = 3  # verdicts that no rounds followed
DEEPEST = 64
UNTRIED = 4  # tokens of a draft by a model of which nothing is known; one more for each verdict
log = logging.getLogger("forerun")


class Source(ABC):
    """A drafter, and what it offers (`sequence/choosing.py`)."""

    name: str
    learns_unasked = True  # or must it draft for anybody to know whether that pays?
    lengths: Collection[int]  # that are worth considering

    def __init__(self, seq: Canvas, target: ChainScorer):
        self.seq = seq
        self.target = target
        self.known_as = self.name
        self._alone = 0  # verdicts in a row that no rounds followed

    @abstractmethod
    def chances(self, most: int) -> Sequence[float]:
        """Of each of the next tokens to be accepted, given those before it; none where there is
        nothing to say."""

    def seconds(self, k: int) -> float:
        """What drafting k tokens costs, beside their rows."""
        return 0.0

    def seconds_to_begin(self) -> float:
        """What must be done once before it can draft."""
        return 0.0

    @property
    def goes_on(self) -> bool:
        """May the engine draft on in the same way, behind a verdict? On a CPU, where a step takes
        the host as long as a forward of a small model, it does so for a few rounds before anything
        is chosen again, if it need not ask anybody what a token's law is."""
        seq = self.seq
        certain = not seq.history.sampling.temperature and seq.history.constraint is None
        if not certain or self.target.rows_are_cheap or self.target.writes_token_by_token(seq):
            return False
        return self.drafts_alike

    @property
    def drafts_alike(self) -> bool:
        """Is the next draft made as the last one was, whatever the verdict?"""
        return False

    def round_behind(self, k: int, tokens: float) -> ExpectedRound | None:
        """Each of the rounds that follow a draft of k tokens by themselves, if any do. The draft is
        expected to bring so many."""
        if self._alone >= GIVE_UP or not self.goes_on:
            return None
        return self.expected_round(k, tokens)

    def expected_round(self, k: int, tokens: float) -> ExpectedRound | None:
        """One of them, for who goes on."""
        return None

    @abstractmethod
    async def propose(self, k: int) -> Draft:
        """A draft of up to k tokens."""

    async def judge(self, draft: Draft) -> int:
        """Have a draft judged. How many of its tokens were accepted."""
        seq = self.seq
        before = seq.trace.forwards
        accepted = await judge(seq, self.target, draft, repeats=ALWAYS if self.goes_on else 0)
        self._alone = 0 if seq.trace.forwards > before + 1 else self._alone + 1
        return accepted

    @abstractmethod
    def learn(self, drafted: int, accepted: int) -> None:
        """A verdict on a draft of its."""


class Copies(Source):
    """The text, where it repeats itself."""

    name = "lookup"
    lengths = range(1, DEEPEST + 1)

    def __init__(self, seq: Canvas, target: ChainScorer, odds: Odds, share: Odds):
        super().__init__(seq, target)
        self._copying = Copying(odds, share)

    def chances(self, most: int) -> Sequence[float]:
        return self._copying.chances(most) if self._copying.follow(self.seq) else ()

    async def propose(self, k: int) -> Draft:
        return self._copying.draft(self.seq, k)

    @property
    def drafts_alike(self) -> bool:
        return True

    def expected_round(self, k: int, tokens: float) -> ExpectedRound:
        """As many tokens as are right in a row, and one more; about twice as many rows."""
        most = 1.0 + MOST_IN_ROUNDS
        tokens = min(1 / (1 - self._copying.share_right), most)
        return ExpectedRound(tokens, rows=min(2 * tokens, most))

    async def judge(self, draft: Draft) -> int:
        if self.goes_on:
            k = len(draft)
            most = max(k, MOST_IN_ROUNDS)
            self.seq.copies = Copied(self.seq.known, LONGEST_RUN, k, most=most, reach=k)
        return await super().judge(draft)

    def learn(self, drafted: int, accepted: int) -> None:
        """It follows the text: a verdict tells it nothing new."""


class ByDepth(Source):
    """A source whose odds go by how deep in a draft a token stands."""

    learns_unasked = False
    lengths: Collection[int] = (1, 2, 3, 4, 6, 8, 12, 16)

    def __init__(self, seq: Canvas, target: ChainScorer, odds: Odds):
        super().__init__(seq, target)
        self._odds = odds

    def chances(self, most: int) -> Sequence[float]:
        self._odds.rest()
        return [self._odds.chance(depth) for depth in range(most)]

    def learn(self, drafted: int, accepted: int) -> None:
        self._odds.count_draft(drafted, accepted)


class Spelled(ByDepth):
    """What a constraint says must come next, spelled as usual."""

    name = "constraint"
    learns_unasked = True  # it has something to say only where it is nearly certain

    def chances(self, most: int) -> Sequence[float]:
        return super().chances(min(most, len(spelled_out(self.seq, most))))

    async def propose(self, k: int) -> Draft:
        return spelled_out(self.seq, k)


class Drafted(ByDepth):
    """The request's own drafter: a draft model, or whatever `draft=` names."""

    name = "draft"

    def __init__(
        self,
        seq: Canvas,
        target: ChainScorer,
        odds: Odds,
        drafter: Drafter,
        known_as: str = "draft",
    ):
        super().__init__(seq, target, odds)
        self._drafter = drafter
        self._asks_model = drafter if isinstance(drafter, ModelDraft) else None
        self._draft_seconds = draft_seconds(drafter)
        most = most_drafted(drafter)
        self._most = DEEPEST if most is None else most
        self.lengths = sorted({min(k, self._most) for k in self.lengths})
        self._has_read = 0  # tokens of the text, its model
        self.known_as = known_as

    def chances(self, most: int) -> Sequence[float]:
        return super().chances(min(most, self._most, UNTRIED + int(self._odds.seen)))

    def seconds(self, k: int) -> float:
        """Of its model's forwards, as steps have shown them; else by what they were measured to
        take."""
        drafter = self._asks_model
        seen = self.target.costs.draft_forward()
        if drafter is None or seen is None:
            return self._draft_seconds(k)
        return len(drafter.forwards(k)) * seen

    def seconds_to_begin(self) -> float:
        """Of reading what it has not read yet: at first a whole prompt."""
        drafter = self._asks_model
        unread = self.seq.known - self._has_read
        if drafter is None or unread <= 1 or not drafter.model.costs.known:
            return 0.0
        costs = drafter.model.costs
        return costs.forward(unread) - costs.forward(1)

    @property
    def drafts_alike(self) -> bool:
        return drafts_alike(self._drafter)

    def expected_round(self, k: int, tokens: float) -> ExpectedRound | None:
        drafter = self._asks_model
        if drafter is None or not drafter.model.costs.known:
            return None
        return ExpectedRound(tokens, 1.0 + k, self._draft_seconds(k))

    async def propose(self, k: int) -> Draft:
        self._has_read = self.seq.known
        return await self._drafter.propose(self.seq, k)

    async def judge(self, draft: Draft) -> int:
        events = self.seq.trace.events
        first = len(events)
        accepted = await super().judge(draft)
        verdicts = [event for event in events[first:] if event.drafted]
        for event in verdicts[1:]:  # of rounds; of the first one it is told
            self.learn(len(event.drafted), event.accepted)
        if verdicts[1:]:
            self._has_read = self.seq.known
        return accepted


class Guesses(ByDepth):
    """Jacobi's guesses: what the model finds likeliest behind wrong tokens."""

    name = "jacobi"
    lengths = (4, 8, 16)

    def __init__(self, seq: Canvas, target: ChainScorer, odds: Odds):
        super().__init__(seq, target, odds)
        self._said: list[int] = []  # of the blanks from `_begin` on
        self._begin = 0
        self._carried = False  # was the last guess one that the model had corrected?

    async def propose(self, k: int) -> Draft:
        known = self._said[self.seq.filled - self._begin :][:k]
        self._carried = bool(known)
        tokens = [*known, *guess(self.seq, known, k - len(known), "repeat")]
        return Draft(self.seq.next(k), tokens)

    async def judge(self, draft: Draft) -> int:
        self._begin = self.seq.filled
        step = await judge_guess(self.seq, self.target, draft.tokens)
        self._said = step.likeliest[: len(draft)]
        return step.accepted

    def learn(self, drafted: int, accepted: int) -> None:
        if self._carried:  # a first guess says nothing of those that follow it
            super().learn(drafted, accepted)


async def draft_by(source: Source, k: int, sources: list[Source]) -> Draft:
    """The draft that was chosen. A source that fails is dropped, and the trace says so."""
    try:
        return without_waste(source.seq, await source.propose(k))
    except Exception as error:
        sources.remove(source)
        words = f"drafter '{source.name}' failed and was dropped for this request: {error}"
        source.seq.trace.notes.append(words)
        log.warning(words)
        return NO_DRAFT


def sources_of(
    seq: Canvas, target: ChainScorer, drafter: Drafter | None, learn: bool
) -> list[Source]:
    """Whoever can draft for this sequence. If they `learn`, from earlier requests and for later
    ones."""
    known: dict[str, ModelOdds] = {}
    if learn:
        known = target.shared_state.setdefault("auto odds", known)

    def odds(name: str, first: Sequence[float]) -> Odds:
        if name not in known:
            known[name] = ModelOdds(first)
        return known[name].of_request(learn)

    share = odds("lookup, of all tokens", FIRST_SHARE)
    found: list[Source] = [Copies(seq, target, odds("lookup", FIRST_ODDS), share)]
    if seq.history.constraint is not None:
        found.append(Spelled(seq, target, odds("constraint", FIRST_SPELLED)))
    found.append(Guesses(seq, target, odds("jacobi", FIRST_GUESSED)))
    if drafter is not None:
        # A request has its own handle of a draft model; what was learnt of the model stays.
        host = getattr(getattr(drafter, "model", None), "host", None)
        name = f"{type(drafter).__name__} {id(host)}"
        found.append(Drafted(seq, target, odds(name, FIRST_DRAFTED), drafter, name))
    return found
