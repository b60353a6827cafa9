"""Acceptance rules that keep the target's law: pure functions of laws and of a `sample` argument.

B sequences, K drafted tokens, L = K + 1 rows of a verdict, V vocabulary. `sample(law_BN) -> outcome_B` draws with each sequence's
noise in production and enumerates every outcome under certification: what is certified is what runs. Rules run batch-first on
the device; a draft shorter than K is padded with token -1.

Glossary: *accepted*, a drafted token that the target keeps; *resampled*, the token drawn in place of the first rejected one;
*bonus*, the token drawn after a draft that was accepted whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forerun.laws import point_mass, prefix_lengths, residual

Sample = Callable[[Tensor], Tensor]


def draw(p_BV: Tensor, sample: Sample) -> tuple[Tensor]:
    """One token from each law."""
    return (sample(p_BV),)


def each(where_BK: Tensor, p_BKV: Tensor, sample: Sample) -> tuple[Tensor, ...]:
    """One token from each of K laws, drawn on its own: a parallel draft. `where` marks padding with -1."""
    return tuple(torch.where(where_BK[:, i] >= 0, sample(p_BKV[:, i]), 0) for i in range(p_BKV.shape[1]))


def rejection(x_BK: Tensor, q_BKV: Tensor | None, p_BLV: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """How many drafted tokens x ~ q are kept, and the token after them, so that the text has p's law (Leviathan et al., 2023).

    q = None is a point mass on x. Temperature 0 needs no other rule: there p and q are point masses and this is greedy matching.
    """
    if q_BKV is None:
        q_BKV = point_mass(x_BK, p_BLV.shape[-1], p_BLV.dtype)
    return settle(ratios(x_BK, q_BKV, p_BLV).clamp(max=1), q_BKV, p_BLV, sample)


def ratios(x_BK: Tensor, q_BKV: Tensor, p_BLV: Tensor) -> Tensor:
    """p(x) / q(x) of every drafted token; 0 where there is none."""
    index_BK1 = x_BK.clamp(min=0).unsqueeze(-1)
    p_BK = p_BLV[:, : x_BK.shape[1]].gather(-1, index_BK1).squeeze(-1)
    q_BK = q_BKV.gather(-1, index_BK1).squeeze(-1)
    return torch.where((x_BK >= 0) & (q_BK > 0), p_BK / q_BK, 0)


def settle(accept_BK: Tensor, q_BKV: Tensor, p_BLV: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """How many tokens are kept when token i is accepted with probability accept[i], and the token after them."""
    n_B = sample(prefix_lengths(accept_BK))
    # Past the draft q is zero, so the bonus token is the residual of p against nothing.
    q_BLV = torch.cat([q_BKV, torch.zeros_like(p_BLV[:, :1])], 1)
    row_B = torch.arange(len(n_B), device=n_B.device)
    return n_B, sample(residual(p_BLV[row_B, n_B], q_BLV[row_B, n_B]))
