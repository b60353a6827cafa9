"""How often a drafter is right: what this request has shown, and before that what earlier requests
of the same model have.

It is a function of tokens that are decided, so whatever it says, exact methods stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence

FADES = 0.98  # what a request has shown counts for less with every token that is judged after it
MODEL_FADES = 0.9995
PRIOR = 4.0  # tokens that the model's odds count for at the beginning of a request
MORE_PRIOR = 8.0  # and so many more, once the model's odds come of many requests
PER_TOKEN = 1 / 16  # of that, for each token that they come of
RESTS = 0.005  # share of what a request has shown that is forgotten in a step without a verdict
LATE = 0.9  # what is left of a token's weight in how things go of late
SURE = 2.0  # tokens that count as right, and as hoped for, before any
MOST = 0.97
MODEL_PRIOR = 6.0  # tokens that the first odds of all count for


class Tally:
    """Right and judged tokens by place, newer ones counting for more."""

    def __init__(self, first: Sequence[float], weights: Sequence[float], fades: float):
        self.right = [weight * chance for chance, weight in zip(first, weights)]
        self.judged = list(weights)
        self.fades = fades

    def count(self, place: int, right: bool) -> None:
        self.right[place] = self.fades * self.right[place] + right
        self.judged[place] = self.fades * self.judged[place] + 1

    def chance(self, place: int) -> float:
        return self.right[place] / self.judged[place]


class ModelOdds:
    """What all requests of a model have shown of a drafter."""

    def __init__(self, first: Sequence[float]):
        self.tally = Tally(first, [MODEL_PRIOR] * len(first), MODEL_FADES)

    def of_request(self, learns: bool = True) -> Odds:
        """The odds that a request begins with. It `learns` for those that come after it."""
        return Odds(self.tally, learns)


class Odds:
    """The chance that a token at some place is right, given that those before it are. A place is
    whatever tells tokens apart: how deep in a draft, how much of the text before it agrees."""

    def __init__(self, model: Tally, learns: bool):
        self._last = len(model.judged) - 1
        places = range(self._last + 1)
        self._model = model
        self._learns = learns
        self._weights = [
            PRIOR + min(MORE_PRIOR, PER_TOKEN * (model.judged[place] - MODEL_PRIOR))
            for place in places
        ]
        self._prior = list(self._weights)  # what is left of them
        self._own = Tally(self._weights, [0.0] * len(places), FADES)

    def count(self, place: int, right: bool) -> None:
        """A token at this place was judged."""
        place = min(place, self._last)
        self._own.count(place, right)
        self._prior[place] *= FADES
        if self._learns:
            self._model.count(place, right)

    def chance(self, place: int) -> float:
        """Requests that run beside this one teach the model, too: a batch learns together."""
        place = min(place, self._last)
        own = self._own
        prior = self._prior[place]
        right = own.right[place] + prior * self._model.chance(place)
        return min(MOST, right / (own.judged[place] + prior))

    @property
    def seen(self) -> float:
        """Tokens at the first place that were judged, in all requests."""
        return self._model.judged[0] - MODEL_PRIOR

    def count_draft(self, drafted: int, accepted: int) -> None:
        """A verdict: places are depths, and nothing is known of those behind a rejected one."""
        for depth in range(min(accepted + 1, drafted)):
            self.count(depth, depth < accepted)

    def rest(self) -> None:
        """A step in which nothing was judged: odds that kept a drafter from drafting are forgotten,
        for nothing would ever mend them."""
        own = self._own
        for place, weight in enumerate(self._weights):
            own.right[place] -= RESTS * own.right[place]
            own.judged[place] -= RESTS * own.judged[place]
            self._prior[place] += RESTS * (weight - self._prior[place])


class Trend:
    """How things go of late, wherever: tokens that were right, over as many as should have been. A
    text that changes shows at one place before it shows at all of them."""

    def __init__(self) -> None:
        self._right = SURE
        self._hoped = SURE

    def count(self, right: bool, hoped: float) -> None:
        self._right = LATE * self._right + (1 - LATE) * SURE + right
        self._hoped = LATE * self._hoped + (1 - LATE) * SURE + hoped

    @property
    def factor(self) -> float:
        """Never more than 1: a run of luck is no reason to draft more."""
        return min(1.0, self._right / self._hoped)
