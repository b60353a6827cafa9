"""Noise without state: the noise of a draw is a hash of (seed, sample, draw, call) and of nothing
else.

So the same seed gives the same output whatever shares the batch, however it is padded, and in
whatever order it is served. One uniform number decides one draw (by the inverse of the cumulative
law), so no noise is ever made per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import NotAble
from forerun.probability.transfer import can_fuse, to_device

_MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_16, _27, _30, _31 = (np.uint64(n) for n in (16, 27, 30, 31))
LARGE = 4096  # outcomes
FEW = 12  # numbers, which are hashed sooner one by one


def mix(*numbers: int) -> int:
    """A 64-bit hash of some integers (splitmix64's finaliser, chained)."""
    h = 0
    for number in numbers:
        h = (h + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 31
    return h


def uniform(key: int, draw: int, call: int) -> float:
    """A number in (0, 1). 48 bits, so that multiplying it by a law's total can never round up to
    that total."""
    return ((mix(key, draw, call) >> 16) + 0.5) * 2.0**-48


def uniforms(draws: Sequence[tuple[int, int]], first: int, count: int) -> np.ndarray:
    """`uniform` of calls [first, first + count) of every (key, draw), [B, count]."""
    if len(draws) * count < FEW:
        return np.array([[uniform(*d, first + i) for i in range(count)] for d in draws])
    return _uniforms(*_columns(draws), np.arange(first, first + count, dtype=np.uint64))


def _columns(draws: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """What keys hash to, and numbers of draws, each [B, 1]."""
    hashes = [_hashed_key(key) for key, _ in draws]
    numbers = [number & _MASK for _, number in draws]
    return np.array(hashes, np.uint64)[:, None], np.array(numbers, np.uint64)[:, None]


# A sequence draws many times, and its key stays.
_hashed_key = lru_cache(1024)(mix)


def _uniforms(h: np.ndarray, *numbers: np.ndarray) -> np.ndarray:
    """`uniform` of (key, draw, call), whichever of them are many, given what the keys hash to."""
    for number in numbers:  # of arrays, 64 bits are kept and nothing is said
        h = h + number
        h += _STEP
        h ^= h >> _30
        h *= _FACTOR
        h ^= h >> _27
        h *= _FACTOR_2
        h ^= h >> _31
    return ((h >> _16).astype(np.float64) + 0.5) * 2.0**-48


def pick(law_BN: Tensor, u_B: Tensor) -> Tensor:
    """The outcome at quantile u of each law: the first whose cumulative probability exceeds it,
    never one of probability 0.

    A law without mass (everything forbidden, or logits that are not numbers) has no outcome: -1.
    """
    if law_BN.device.type == "cpu":
        return pick_on_host(law_BN, u_B)
    if can_fuse(law_BN):
        from forerun.probability import kernels

        return kernels.pick(law_BN, u_B)
    if law_BN.shape[-1] >= LARGE:
        return pick_by_stretches(law_BN, u_B)
    return pick_by_sums(law_BN, u_B)


def pick_by_sums(law_BN: Tensor, u_B: Tensor) -> Tensor:
    """The same as it is defined."""
    cumulative_BN = law_BN.cumsum(-1, dtype=torch.float64)
    total_B1 = cumulative_BN[:, -1:]
    outcome_B1 = torch.searchsorted(cumulative_BN, u_B.unsqueeze(-1) * total_B1, right=True)
    return torch.where(total_B1 > 0, outcome_B1, -1).squeeze(-1)


def pick_on_host(law_BN: Tensor, u_B: Tensor) -> Tensor:
    """The same, with less around the sums."""
    cumulative_BN = law_BN.cumsum(-1, dtype=torch.float64).numpy()
    found = [_at_quantile(*one) for one in zip(cumulative_BN, u_B.tolist())]
    return torch.tensor(found, dtype=torch.long)


def _at_quantile(cumulative_N: np.ndarray, u: float) -> int:
    total = cumulative_N[-1]
    return int(cumulative_N.searchsorted(u * total, side="right")) if total > 0 else -1


def pick_by_stretches(law_BN: Tensor, u_B: Tensor) -> Tensor:
    """The same over a large vocabulary, for devices that do many things at once: adding up is what
    takes time, so stretches of outcomes are added up side by side, and the quantile is looked for
    among them first and then in the one where it lies."""
    stretch = _stretch(law_BN.shape[-1])
    left_over = -law_BN.shape[-1] % stretch
    law_BCN = (F.pad(law_BN, (0, left_over)) if left_over else law_BN).unflatten(-1, (-1, stretch))
    sum_BC = law_BCN.sum(-1, dtype=torch.float64)
    cumulative_BC = sum_BC.cumsum(-1)
    total_B1 = cumulative_BC[:, -1:]
    level_B1 = u_B.unsqueeze(-1) * total_B1
    at_B1 = torch.searchsorted(cumulative_BC, level_B1, right=True).clamp_(
        max=cumulative_BC.shape[1] - 1
    )
    own_BN = (
        law_BCN.gather(1, at_B1.unsqueeze(-1).expand(-1, -1, stretch))
        .squeeze(1)
        .cumsum(-1, dtype=torch.float64)
    )
    level_B1 = level_B1 - (cumulative_BC - sum_BC).gather(1, at_B1)
    # Two ways of adding up may differ by a rounding: what is looked for must lie between the first
    # possible outcome and the last.
    below_end_B1 = torch.nextafter(own_BN[:, -1:], torch.zeros_like(total_B1))
    outcome_B1 = torch.searchsorted(
        own_BN, torch.minimum(level_B1.clamp_(min=0), below_end_B1), right=True
    )
    return torch.where(total_B1 > 0, torch.add(outcome_B1, at_B1, alpha=stretch), -1).squeeze(-1)


@lru_cache
def _stretch(outcomes: int) -> int:
    """How long stretches should be: near the root, and a divisor if there is one."""
    root = math.isqrt(outcomes)
    return min(
        (n for n in range(root // 4, 4 * root) if outcomes % n == 0),
        key=lambda n: abs(n - root),
        default=root,
    )


def uniforms_ahead(draws: Sequence[tuple[int, int]], count: int) -> np.ndarray:
    """The first number of each draw and of those that follow it, [B, count]: what plain decoding,
    which draws once per token, will use for the next tokens."""
    if len(draws) * count < FEW:
        return np.array([[uniform(key, n + i, 0) for i in range(count)] for key, n in draws])
    hashes_B1, numbers_B1 = _columns(draws)
    ahead_BK = numbers_B1 + np.arange(count, dtype=np.uint64)
    return _uniforms(hashes_B1, ahead_BK, np.zeros(1, np.uint64))


class Noise:
    """The `sample` argument of the rules in production: one uniform per sequence and call, from
    each sequence's own key."""

    def __init__(self, draws: Sequence[tuple[int, int]]):
        self.draws = draws  # (key, number of the draw) of each sequence in the batch
        self.calls = 0

    def __call__(self, law_BN: Tensor) -> Tensor:
        return self.many(law_BN[:, None])[:, 0]

    def many(self, law_BKN: Tensor) -> Tensor:
        """K draws of each sequence at once: what K calls one after the other would give."""
        size, count, _ = law_BKN.shape
        u_BK = to_device(uniforms(self.draws, self.calls, count), torch.float64, law_BKN.device)
        self.calls += count
        return pick(law_BKN.flatten(0, 1), u_BK.flatten()).view(size, count)

    def ahead(self, x_BK: Tensor, law_BLN: Tensor) -> Tensor:
        size, count, _ = law_BLN.shape
        u_BL = uniforms_ahead(self.draws, count)
        if law_BLN.device.type != "cpu":
            u_N = to_device(u_BL, torch.float64, law_BLN.device).flatten()
            return pick(law_BLN.flatten(0, 1), u_N).view(size, count)
        sequences = zip(x_BK.tolist(), law_BLN, u_BL.tolist())
        return torch.tensor([_picked_ahead(*one) for one in sequences], dtype=torch.long)


def _picked_ahead(x: Sequence[int], law_LN: Tensor, u: Sequence[float]) -> list[int]:
    """One sequence's draws from its laws. Nobody looks behind the first that differs."""
    drawn = [-1] * len(u)
    for i in range(len(u)):
        cumulative_N = law_LN[i].cumsum(-1, dtype=torch.float64).numpy()
        drawn[i] = _at_quantile(cumulative_N, u[i])
        if i < len(x) and drawn[i] != x[i]:
            break
    return drawn


class FixedNoise:
    """The `sample` of a program: uniform numbers in fixed memory, one column per call, and one per
    draw from this one on."""

    def __init__(self, u_BC: Tensor, ahead_BL: Tensor | None = None):
        self._u_BC = u_BC
        self._ahead_BL = ahead_BL
        self.calls = 0
        self.looks_ahead = 0  # draws that it was asked for at once

    def __call__(self, law_BN: Tensor) -> Tensor:
        return self.many(law_BN[:, None])[:, 0]

    def many(self, law_BKN: Tensor) -> Tensor:
        size, count, _ = law_BKN.shape
        u_BK = self._u_BC[:, self.calls : self.calls + count]
        self.calls += count
        if u_BK.shape[1] < count:
            raise NotAble("a rule draws more often than its laws have rows.")
        return pick(law_BKN.flatten(0, 1), u_BK.flatten()).view(size, count)

    def ahead(self, x_BK: Tensor, law_BLN: Tensor) -> Tensor:
        size, count, _ = law_BLN.shape
        if self._ahead_BL is None or self._ahead_BL.shape[1] < count:
            raise NotAble("a rule draws further ahead than its laws have rows.")
        self.looks_ahead = max(self.looks_ahead, count)
        u_BL = self._ahead_BL[:, :count]
        return pick(law_BLN.flatten(0, 1), u_BL.flatten()).view(size, count)
