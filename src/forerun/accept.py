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
import torch.nn.functional as F
from torch import Tensor

from forerun.laws import path_products, point_mass, prefix_lengths, residual

Sample = Callable[[Tensor], Tensor]


def draw(p_BV: Tensor, sample: Sample) -> tuple[Tensor]:
    """One token from each law."""
    return (sample(p_BV),)


def each(where_BK: Tensor, p_BKV: Tensor, sample: Sample) -> tuple[Tensor, ...]:
    """One token from each of K laws, drawn on its own: a parallel draft. `where` marks padding with -1."""
    return torch.where(where_BK >= 0, many(p_BKV, sample), 0).unbind(1)


def many(p_BKV: Tensor, sample: Sample) -> Tensor:
    """One outcome of each of K laws, [B, K]: at once where `sample` can, as noise can and an enumeration cannot."""
    at_once = getattr(sample, "many", None)
    return at_once(p_BKV) if at_once is not None else torch.stack([sample(p_BKV[:, i]) for i in range(p_BKV.shape[1])], 1)


def rejection(x_BK: Tensor, q_BKV: Tensor | None, p_BLV: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """How many drafted tokens x ~ q are kept, and the token after them, so that the text has p's law (Leviathan et al., 2023).

    q = None is a point mass on x. Temperature 0 needs no other rule: there p and q are point masses and this is greedy matching.
    """
    return settle(ratios(x_BK, q_BKV, p_BLV).clamp(max=1), x_BK, q_BKV, p_BLV, sample)


def iteration(x_BK: Tensor, p_BLV: Tensor, sample: Sample) -> tuple[Tensor, ...]:
    """Rejection of a guess, and what the model thinks likeliest at every place: the next guess."""
    return *rejection(x_BK, None, p_BLV, sample), *p_BLV.argmax(-1).unbind(1)


def descend(x_BN: Tensor, parent_BN: Tensor, p_BLV: Tensor, sample: Sample) -> tuple[Tensor, ...]:
    """How far a tree of guessed tokens is right, and the token after that, so that the text has p's law.

    Node 0 is the text as it is, and node i the tree's token i - 1 after its parent, whose number is smaller; p holds the law of
    what follows each of the L = N + 1 nodes. Drawing token after token from p, one leaves the tree somewhere: the law of where has
    a closed form, so it takes one draw, and the token there another. Brothers must differ. Then follow what the model thinks
    likeliest after every node, and in any further rows of p.
    """
    there_BN = x_BN >= 0
    up_BN = parent_BN.clamp(min=0)
    row_B = torch.arange(len(x_BN), device=x_BN.device)
    step_BN = torch.where(there_BN, p_BLV[row_B[:, None], up_BN, x_BN.clamp(min=0)], 0)
    reached_BL = path_products(step_BN, up_BN)
    into_BL = torch.zeros_like(reached_BL).scatter_add_(1, up_BN, step_BN)
    node_B = sample(reached_BL * (1 - into_BL).clamp(min=0))
    own_BV = p_BLV[row_B, node_B]
    taken_BN = there_BN & (up_BN == node_B[:, None])
    taken_BV = torch.zeros_like(own_BV).scatter_reduce_(1, x_BN.clamp(min=0), taken_BN.to(own_BV.dtype), "amax")
    return node_B, sample(residual(own_BV, taken_BV)), *p_BLV.argmax(-1).unbind(1)


def ratios(x_BK: Tensor, q_BKV: Tensor | None, p_BLV: Tensor) -> Tensor:
    """p(x) / q(x) of every drafted token; 0 where there is none."""
    index_BK1 = x_BK.clamp(min=0).unsqueeze(-1)
    p_BK = p_BLV[:, : x_BK.shape[1]].gather(-1, index_BK1).squeeze(-1)
    q_BK = torch.ones_like(p_BK) if q_BKV is None else q_BKV.gather(-1, index_BK1).squeeze(-1)
    return torch.where((x_BK >= 0) & (q_BK > 0), p_BK / q_BK, 0)


def settle(accept_BK: Tensor, x_BK: Tensor, q_BKV: Tensor | None, p_BLV: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """How many tokens are kept when token i is accepted with probability accept[i], and the token after them."""
    n_B = sample(prefix_lengths(accept_BK))
    row_B = torch.arange(len(n_B), device=n_B.device)
    # Past the draft q is zero, so the bonus token is the residual of p against nothing.
    if q_BKV is None or not x_BK.shape[1]:
        q_BV = point_mass(F.pad(x_BK, (0, 1), value=-1)[row_B, n_B], p_BLV.shape[-1], p_BLV.dtype)
    else:
        q_BV = torch.where((n_B < x_BK.shape[1])[:, None], q_BKV[row_B, n_B.clamp(max=x_BK.shape[1] - 1)], 0)
    return n_B, sample(residual(p_BLV[row_B, n_B], q_BV))
