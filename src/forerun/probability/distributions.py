"""Probability arithmetic: pure functions of tensors, and the only place where laws are subtracted
or multiplied.

B sequences, K drafted tokens, V vocabulary. A *law* is a vector of probabilities that sums to one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def point_mass(x_N: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The law that is certain of x, over `size` outcomes; all zeros where x is negative (nothing
    there)."""
    law_NV = torch.zeros(*x_N.shape, size, dtype=dtype, device=x_N.device)
    return law_NV.scatter_(-1, x_N.clamp(min=0).unsqueeze(-1), (x_N >= 0).to(dtype).unsqueeze(-1))


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """(p - q)+ normalised: what is left of p once q has had its say. Falls back to p where they
    agree."""
    left_BV = (p_BV - q_BV).clamp_(min=0)
    total_B1 = left_BV.sum(-1, keepdim=True)
    return torch.where(total_B1 > 0, left_BV / total_B1, p_BV)


def tempered(law_NV: Tensor, temperature: float) -> Tensor:
    """A law at another temperature, relative to its own. A point mass stays what it is."""
    if temperature == 1:
        return law_NV
    law_NV = (law_NV / law_NV.amax(-1, keepdim=True)) ** (1 / temperature)
    return law_NV / law_NV.sum(-1, keepdim=True)


def prefix_lengths(accept_BK: Tensor) -> Tensor:
    """The law of how many leading tokens are accepted, 0 to K, when token i is accepted with
    probability accept[i]."""
    ones_B1 = accept_BK.new_ones(accept_BK.shape[0], 1)
    reached_BK1 = torch.cat([ones_B1, accept_BK.cumprod(-1)], -1)
    stopped_BK1 = torch.cat([1 - accept_BK, ones_B1], -1)
    return reached_BK1 * stopped_BK1


def path_products(step_BN: Tensor, parent_BN: Tensor) -> Tensor:
    """For every node of a tree the product of the steps that lead to it: [B, N + 1], node 0 being
    the root, where it is 1."""
    product_BL = torch.cat([step_BN.new_ones(len(step_BN), 1), step_BN], 1)
    up_BL = torch.cat([parent_BN.new_zeros(len(parent_BN), 1), parent_BN], 1)
    # each time twice as far up, until all have met the root
    for _ in range(max(step_BN.shape[1], 1).bit_length()):
        product_BL = product_BL * product_BL.gather(1, up_BL)
        up_BL = up_BL.gather(1, up_BL)
    return product_BL


def total_variation(p: dict, q: dict) -> float:
    """Half the L1 distance between two laws given as {outcome: probability}."""
    return sum(abs(p.get(x, 0.0) - q.get(x, 0.0)) for x in p.keys() | q.keys()) / 2
