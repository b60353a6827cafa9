"""Acceptance rules that do not keep the target's law, on purpose. Methods that use one are `approximate` and say why.

B sequences, K drafted tokens, L = K + 1 rows of a verdict, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from forerun.accept import Sample, ratios, settle


@cache
def tolerant(epsilon: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """Rejection that adds epsilon to every acceptance ratio (Guo & Ermon, appendix F.5). One rule per epsilon, so that
    sequences with the same tolerance share a batch."""

    def rule(x_BK: Tensor, q_BKV: Tensor, p_BLV: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
        accept_BK = torch.where(x_BK >= 0, (ratios(x_BK, q_BKV, p_BLV) + epsilon).clamp(max=1), 0)
        return settle(accept_BK, x_BK, q_BKV, p_BLV, sample)

    return rule


@cache
def tempered_ratio(power: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """Rejection with every acceptance ratio raised to a power (Han et al., 2026, A.8): below 1 it forgives, above 1 it doubts."""

    def rule(x_BK: Tensor, q_BKV: Tensor, p_BLV: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
        return settle((ratios(x_BK, q_BKV, p_BLV) ** power).clamp(max=1), x_BK, q_BKV, p_BLV, sample)

    return rule
