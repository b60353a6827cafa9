"""How often a drafter is right: what this request has shown, and before that what earlier requests
of the same model have.

It is a function of tokens that are decided, so whatever it says, exact methods stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence

FADES = 0.98  # what a request has shown counts for less with every token that is judged after it
MODEL_FADES = 0.9995
PRIOR = 4.0  # tokens that the model's odds count for at the beginning of a request
LATE = 0.95  # what is left of a token's weight in how things go of late
RESTS = 0.02  # share of it that is forgotten in a step without a verdict
SURE = 4.0  # tokens that count as right, and as hoped for, before any
MOST = 0.97
MODEL_PRIOR = 6.0  # tokens that the first odds of all count for


class Tally:
    """Right and judged tokens by place, newer ones counting for more."""

    def __init__(self, first: Sequence[float], weight: float, fades: float):
        self.right = [weight * chance for chance in first]
        self.judged = [weight] * len(first)
        self.fades = fades

    def count(self, place: int, right: bool) -> None:
        self.right[place] = self.fades * self.right[place] + right
        self.judged[place] = self.fades * self.judged[place] + 1

    def chance(self, place: int) -> float:
        return self.right[place] / self.judged[place]


class ModelOdds:
    """What all requests of a model have shown of a drafter."""

    def __init__(self, first: Sequence[float]):
        self.tally = Tally(first, MODEL_PRIOR, MODEL_FADES)

    def of_request(self, learns: bool = True) -> Odds:
        """The odds that a request begins with. It `learns` for those that come after it."""
        return Odds(self.tally, learns)


class Odds:
    """The chance that a token at some place is right, given that those before it are. A place is
    whatever tells tokens apart: how deep in a draft, how much of the text before it agrees."""

    def __init__(self, model: Tally, learns: bool):
        chances = [model.chance(place) for place in range(len(model.judged))]
        self._own = Tally(chances, PRIOR, FADES)
        self._model = model if learns else None
        self._last = len(chances) - 1
        # of late, wherever: tokens that were right, and as many as should have been
        self._right = SURE
        self._hoped = SURE

    def count(self, place: int, right: bool) -> None:
        """A token at this place was judged."""
        place = min(place, self._last)
        self._right = LATE * self._right + (1 - LATE) * SURE + right
        self._hoped = LATE * self._hoped + (1 - LATE) * SURE + self._own.chance(place)
        self._own.count(place, right)
        if self._model is not None:
            self._model.count(place, right)

    def chance(self, place: int) -> float:
        """What was seen at this place, and more or less if all places do better or worse of late: a
        text that changes shows at one place before it shows at all of them."""
        place = min(place, self._last)
        return min(MOST, self._own.chance(place) * min(1.0, self._right / self._hoped))

    def rest(self) -> None:
        """A step in which nothing was judged: how things went of late counts for less."""
        self._right += RESTS * (SURE - self._right)
        self._hoped += RESTS * (SURE - self._hoped)

    def count_draft(self, drafted: int, accepted: int) -> None:
        """A verdict: places are depths, and nothing is known of those behind a rejected one."""
        for depth in range(min(accepted + 1, drafted)):
            self.count(depth, depth < accepted)
