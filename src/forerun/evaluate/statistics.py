"""What can be said of two methods that answered the same questions, in plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
DRAWS = 10_000


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate of the chance that one of k samples passes, from `passed` of `samples`
    that did (Chen et al., 2021, equation 1)."""
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1 - k / n for n in range(samples - passed + 1, samples + 1))


@dataclass(frozen=True)
class Difference:
    """How much more one method scores than another on the same items: a paired bootstrap."""

    mean: float
    low: float
    high: float
    items: int
    differing: int  # items on which the two do not score the same
    level: float = LEVEL

    @property
    def largest(self) -> float:
        """The largest difference, either way, that the data leave room for. Where no item differs
        the bootstrap sees no spread: then the share of items that could differ is bounded."""
        if self.differing == 0:
            return float(1 - (1 - self.level) ** (1 / self.items))
        return max(abs(self.low), abs(self.high))

    @property
    def is_clear(self) -> bool:
        """Does the interval leave out no difference?"""
        return self.low > 0 or self.high < 0


def paired_bootstrap(
    ours: Sequence[float], theirs: Sequence[float], seed: int = 0, draws: int = DRAWS
) -> Difference:
    """Resample the items, again and again, and see how far the mean difference moves."""
    difference_N = np.asarray(ours, float) - np.asarray(theirs, float)
    items = len(difference_N)
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [
            difference_N[rng.integers(0, items, (size, items))].mean(1)
            for size in _shares(draws, max(1, 4_000_000 // items))
        ]
    )
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    differing = int(np.count_nonzero(difference_N))
    return Difference(float(difference_N.mean()), float(low), float(high), items, differing)


def _shares(total: int, most: int) -> list[int]:
    """A number in parts that are not too large."""
    return [min(most, total - first) for first in range(0, total, most)]


def mcnemar(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The exact two-sided p-value of McNemar's test: of the items that only one of two methods gets
    right, is either's share more than half?"""
    pairs = list(zip(ours, theirs, strict=True))
    only_ours = sum(a > b for a, b in pairs)
    only_theirs = sum(a < b for a, b in pairs)
    count = only_ours + only_theirs
    tail = sum(math.comb(count, i) for i in range(min(only_ours, only_theirs) + 1))
    return min(1.0, 2 * tail / 2**count)


def sentence(difference: Difference, p_value: float | None, percent: bool = True) -> str:
    """What the numbers say, in words."""
    scale = 100 if percent else 1
    unit = "points" if percent else "units"
    level = f"{100 * difference.level:.0f} %"
    if not difference.is_clear:
        return f"no difference larger than {scale * difference.largest:.1f} {unit} at {level}"
    word = "more" if difference.mean > 0 else "less"
    low, high = sorted((abs(scale * difference.low), abs(scale * difference.high)))
    said = f"{scale * abs(difference.mean):.1f} {unit} {word} ({low:.1f} to {high:.1f} at {level}"
    return said + (")" if p_value is None else f", p = {p_value:.2g})")
