"""Which blanks of a canvas are decided now, and as what: rules for models that fill blanks in order
of confidence.

B sequences, N open blanks, V vocabulary. Every blank draws a token from its `law`, which has the
sampling parameters in it. Its confidence is that token's probability under the `model_law`, which
has none: at temperature 0 a law is certain of everything. In `where`, -1 is padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forerun.probability.acceptance import Sampler, rule_factory
from forerun.probability.outcomes import Ranking, Selection

SelectionRule = Callable[..., Selection]


def sample_with_confidence(
    where_BN: Tensor, law_BNV: Tensor, model_law_BNV: Tensor, sample: Sampler
) -> tuple[Tensor, Tensor]:
    """A token for every blank, and how confident the model is of it."""
    token_BN = sample.many(law_BNV)
    confidence_BN = model_law_BNV.gather(-1, token_BN.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return token_BN, confidence_BN.masked_fill(where_BN < 0, -1.0)


def selected(token_BN: Tensor, chosen_BN: Tensor) -> Selection:
    """The tokens of chosen blanks. A law without mass shows only where its blank is chosen."""
    return Selection.of_batch(tokens=torch.where(chosen_BN, token_BN, 0), chosen=chosen_BN)


def certainty(by: str, model_law_BNV: Tensor) -> Tensor:
    """How certain a law is of itself, from 0 to 1: its likeliest token's probability (confidence),
    the lead of that token over the next (margin), or e to the minus entropy."""
    if by == "entropy":
        return torch.special.entr(model_law_BNV).sum(-1).neg().exp()
    if by == "margin":
        first_BN, second_BN = model_law_BNV.topk(2, -1).values.unbind(-1)
        return first_BN - second_BN
    return model_law_BNV.amax(-1)


@rule_factory
def most_confident(count: int, by: str = "confidence") -> SelectionRule:
    """The `count` blanks with the most confident tokens; of equals the first. By margin or entropy
    it is the law that counts, whatever is drawn from it (Dream's orders)."""

    def rule(
        where_BN: Tensor, law_BNV: Tensor, model_law_BNV: Tensor, sample: Sampler
    ) -> Selection:
        token_BN, confidence_BN = sample_with_confidence(where_BN, law_BNV, model_law_BNV, sample)
        if by != "confidence":
            confidence_BN = certainty(by, model_law_BNV).masked_fill(where_BN < 0, -1.0)
        order_BN = confidence_BN.sort(dim=1, descending=True, stable=True).indices
        step_N = torch.arange(order_BN.shape[1], device=order_BN.device)
        rank_BN = torch.empty_like(order_BN).scatter_(1, order_BN, step_N.expand_as(order_BN))
        return selected(token_BN, (rank_BN < count) & (where_BN >= 0))

    return rule


@rule_factory
def above_threshold(threshold: float) -> SelectionRule:
    """All blanks whose token is at least this likely, and the most confident one anyway."""

    def rule(
        where_BN: Tensor, law_BNV: Tensor, model_law_BNV: Tensor, sample: Sampler
    ) -> Selection:
        token_BN, confidence_BN = sample_with_confidence(where_BN, law_BNV, model_law_BNV, sample)
        return selected(token_BN, confident(where_BN, confidence_BN, threshold))

    return rule


def confident(where_BN: Tensor, confidence_BN: Tensor, threshold: float) -> Tensor:
    """Blanks whose token is at least this likely, and the most confident one anyway."""
    step_N = torch.arange(confidence_BN.shape[1], device=confidence_BN.device)
    best_BN = step_N == confidence_BN.argmax(1, keepdim=True)
    return (reaches(confidence_BN, threshold) | best_BN) & (where_BN >= 0)


def reaches(confidence_BN: Tensor, threshold: float) -> Tensor:
    """What is at least this likely. Nothing reaches 1, whatever a float may say: a rule then works
    as if it had no threshold."""
    if threshold < 1:
        return confidence_BN >= threshold
    return torch.zeros_like(confidence_BN, dtype=torch.bool)


@rule_factory
def edits(threshold: float) -> SelectionRule:
    """Token editing: decided tokens for which the model draws another that is at least this
    likely."""

    def rule(
        where_BN: Tensor, now_BN: Tensor, law_BNV: Tensor, model_law_BNV: Tensor, sample: Sampler
    ) -> Selection:
        token_BN, confidence_BN = sample_with_confidence(where_BN, law_BNV, model_law_BNV, sample)
        differs_BN = (token_BN != now_BN) & (where_BN >= 0)
        return selected(token_BN, reaches(confidence_BN, threshold) & differs_BN)

    return rule


@rule_factory
def entropy_bounded(bound: float) -> SelectionRule:
    """The blanks of lowest entropy, while the sum of their entropies, less the largest of them,
    stays within the bound: that much their joint law may differ from the product of their own."""

    def rule(
        where_BN: Tensor, law_BNV: Tensor, model_law_BNV: Tensor, sample: Sampler
    ) -> Selection:
        token_BN, _ = sample_with_confidence(where_BN, law_BNV, model_law_BNV, sample)
        entropy_BN = torch.special.entr(model_law_BNV.double()).sum(-1)
        entropy_BN = entropy_BN.masked_fill(where_BN < 0, torch.inf)
        sorted_BN, order_BN = entropy_BN.sort(dim=1, stable=True)
        within_BN = (sorted_BN.cumsum(1) - sorted_BN <= bound).cummin(1).values
        chosen_BN = torch.zeros_like(within_BN).scatter_(1, order_BN, within_BN)
        return selected(token_BN, chosen_BN & (where_BN >= 0))

    return rule


@rule_factory
def reveal(probability: float) -> SelectionRule:
    """Every blank on its own with this probability: a step of the reverse process.

    One draw decides whether a blank stays masked or which token it becomes, so that a sequence's
    noise does not depend on how many blanks its neighbours have.
    """

    def rule(where_BN: Tensor, law_BNV: Tensor, sample: Sampler) -> Selection:
        stays_BN1 = torch.full_like(law_BNV[..., :1], 1 - probability)
        outcome_BN = sample.many(torch.cat([probability * law_BNV, stays_BN1], -1))
        chosen_BN = (outcome_BN < law_BNV.shape[-1]) & (where_BN >= 0)
        return selected(outcome_BN, chosen_BN)

    return rule


@rule_factory
def ranking(by: str = "confidence") -> Callable[..., Ranking]:
    """The likeliest token of every blank, how confident the model is of it, and what blanks are
    decided in the order of; 0 where there is no blank."""

    def rule(where_BN: Tensor, model_law_BNV: Tensor, sample: Sampler) -> Ranking:
        confidence_BN, token_BN = model_law_BNV.max(-1)
        padding_BN = where_BN < 0
        return Ranking.of_batch(
            tokens=token_BN,
            confidence=confidence_BN.masked_fill(padding_BN, 0.0),
            score=certainty(by, model_law_BNV).masked_fill(padding_BN, 0.0),
        )

    return rule
