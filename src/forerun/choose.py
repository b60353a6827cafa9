"""Which blanks of a canvas are decided now, and as what: rules for models that fill blanks in order of confidence.

B sequences, N open blanks, V vocabulary. Every blank draws a token from its `law` (under the sampling parameters); its confidence
is that token's probability under the model's `own` law, before any of them: at temperature 0 a law is certain of everything. A
rule answers, for every blank, token + 1, or 0 for "not yet". `where` marks padding with -1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from forerun.accept import Sample, many

Rule = Callable[..., tuple[Tensor, ...]]


def drawn(where_BN: Tensor, law_BNV: Tensor, own_BNV: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """A token for every blank, and how sure the model is of it."""
    token_BN = many(law_BNV, sample)
    sure_BN = own_BNV.gather(-1, token_BN.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return token_BN, sure_BN.masked_fill(where_BN < 0, -1.0)


def answer(token_BN: Tensor, take_BN: Tensor) -> tuple[Tensor, ...]:
    """A law without mass has no token, -1, which must not pass for "not yet"."""
    return torch.where(take_BN, torch.where(token_BN < 0, -1, token_BN + 1), 0).unbind(1)


@cache
def surest(count: int) -> Rule:
    """The `count` blanks with the most confident tokens; of equals the first."""

    def rule(where_BN: Tensor, law_BNV: Tensor, own_BNV: Tensor, sample: Sample) -> tuple[Tensor, ...]:
        token_BN, sure_BN = drawn(where_BN, law_BNV, own_BNV, sample)
        order_BN = sure_BN.sort(dim=1, descending=True, stable=True).indices
        rank_BN = torch.empty_like(order_BN).scatter_(
            1, order_BN, torch.arange(order_BN.shape[1], device=order_BN.device).expand_as(order_BN)
        )
        return answer(token_BN, (rank_BN < count) & (where_BN >= 0))

    return rule


@cache
def sure_enough(threshold: float) -> Rule:
    """All blanks whose token is at least this likely, and the surest one anyway."""

    def rule(where_BN: Tensor, law_BNV: Tensor, own_BNV: Tensor, sample: Sample) -> tuple[Tensor, ...]:
        token_BN, sure_BN = drawn(where_BN, law_BNV, own_BNV, sample)
        return answer(token_BN, confident(where_BN, sure_BN, threshold))

    return rule


def confident(where_BN: Tensor, sure_BN: Tensor, threshold: float) -> Tensor:
    """Blanks whose token is at least this likely, and the surest one anyway."""
    best_BN = torch.arange(sure_BN.shape[1], device=sure_BN.device) == sure_BN.argmax(1, keepdim=True)
    return (enough(sure_BN, threshold) | best_BN) & (where_BN >= 0)


def enough(sure_BN: Tensor, threshold: float) -> Tensor:
    """What is at least this likely. At 1 nothing is, whatever a float may say: a rule then does as without a threshold."""
    return sure_BN >= threshold if threshold < 1 else torch.zeros_like(sure_BN, dtype=torch.bool)


@cache
def edits(threshold: float) -> Rule:
    """Decided tokens for which the model draws another one that is at least this likely: token editing."""

    def rule(where_BN: Tensor, now_BN: Tensor, law_BNV: Tensor, own_BNV: Tensor, sample: Sample) -> tuple[Tensor, ...]:
        token_BN, sure_BN = drawn(where_BN, law_BNV, own_BNV, sample)
        return answer(token_BN, enough(sure_BN, threshold) & (token_BN != now_BN) & (where_BN >= 0))

    return rule


@cache
def entropy_bounded(bound: float) -> Rule:
    """The blanks of lowest entropy, as many as keep the sum of their entropies, less the largest of them, within the bound: that
    much their joint law may differ from the product of their own."""

    def rule(where_BN: Tensor, law_BNV: Tensor, own_BNV: Tensor, sample: Sample) -> tuple[Tensor, ...]:
        token_BN, _ = drawn(where_BN, law_BNV, own_BNV, sample)
        entropy_BN = torch.special.entr(own_BNV.double()).sum(-1).masked_fill(where_BN < 0, torch.inf)
        sorted_BN, order_BN = entropy_BN.sort(dim=1, stable=True)
        within_BN = (sorted_BN.cumsum(1) - sorted_BN <= bound).cummin(1).values
        take_BN = torch.zeros_like(within_BN).scatter_(1, order_BN, within_BN)
        return answer(token_BN, take_BN & (where_BN >= 0))

    return rule


@cache
def reveal(probability: float) -> Rule:
    """Every blank on its own with this probability: a step of the reverse process."""

    def rule(where_BN: Tensor, law_BNV: Tensor, sample: Sample) -> tuple[Tensor, ...]:
        token_BN = many(law_BNV, sample)
        coin_BN2 = law_BNV.new_tensor([1 - probability, probability]).expand(*where_BN.shape, 2)
        take_BN = many(coin_BN2, sample) > 0
        return answer(token_BN, take_BN & (where_BN >= 0))

    return rule


@cache
def ranking(worth: float) -> Rule:
    """The likeliest token of every blank, then the blanks from the surest to the least sure, then how many of those are worth
    guessing: the chance that all of them are right is at least `worth`."""

    def rule(where_BN: Tensor, own_BNV: Tensor, sample: Sample) -> tuple[Tensor, ...]:
        sure_BN, token_BN = own_BNV.max(-1)
        sorted_BN, order_BN = sure_BN.masked_fill(where_BN < 0, -1.0).sort(dim=1, descending=True, stable=True)
        count_B = (sorted_BN.clamp(min=0).cumprod(1) >= worth).sum(1)
        return (*token_BN.unbind(1), *order_BN.unbind(1), count_B)

    return rule
