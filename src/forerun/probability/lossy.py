"""Acceptance rules that do not keep the target's law, on purpose. Methods that use one are
`approximate` and say why.

B sequences, K drafted tokens, L = K + 1 rows of a verdict, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.probability.acceptance import (
    Sampler,
    VerdictRule,
    acceptance_ratios,
    keep_prefix,
    rule_factory,
)
from forerun.probability.outcomes import Verdict


@rule_factory
def tolerant(epsilon: float) -> VerdictRule:
    """Rejection that adds epsilon to every acceptance ratio (Guo & Ermon, appendix F.5).

    There is one rule per epsilon, so that sequences with the same tolerance share a batch.
    """

    def rule(x_BK: Tensor, q_BKV: Tensor, p_BLV: Tensor, sample: Sampler) -> Verdict:
        ratio_BK = acceptance_ratios(x_BK, q_BKV, p_BLV)
        accept_BK = torch.where(x_BK >= 0, (ratio_BK + epsilon).clamp(max=1), 0)
        return keep_prefix(accept_BK, x_BK, q_BKV, p_BLV, sample)

    return rule


@rule_factory
def tempered_ratio(power: float) -> VerdictRule:
    """Rejection with every acceptance ratio raised to a power (Han et al., 2026, A.8).

    Below 1 it accepts more, above 1 less.
    """

    def rule(x_BK: Tensor, q_BKV: Tensor, p_BLV: Tensor, sample: Sampler) -> Verdict:
        accept_BK = (acceptance_ratios(x_BK, q_BKV, p_BLV) ** power).clamp(max=1)
        return keep_prefix(accept_BK, x_BK, q_BKV, p_BLV, sample)

    return rule
