"""How the end of a prompt is chosen: the law of its covers, and a draw from it.

N spellings of a beginning of what is left of the prompt, V tokens that may follow each of them,
B sequences.

A cover is a spelling and the token that ends it. Its weight is the probability, under the model's
own law, that the model writes all its tokens. Its last token, where it goes beyond the prompt, is
the first that is generated: bias and penalties change its logit as any other's, and tokens that may
not be generated have no weight. Temperature, top-k, top-p and min-p turn the law of all covers into
the one that is drawn from, as they do with a token's: a cover is one decision. So without any
parameters it has the model's law given the prompt's bytes, and at temperature 0 it is the
likeliest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.constraints.healing import Healing
from forerun.probability.acceptance import Sampler
from forerun.probability.logits import ChainRows, TokenHistory, row_laws
from forerun.probability.outcomes import Outcome
from forerun.probability.transfer import to_device


@dataclass(frozen=True)
class Cover(Outcome):
    """Which spelling, and the token after it."""

    spelling: int
    token: int


def cover_law(
    logits_NV: Tensor,
    healing: Healing,
    history: TokenHistory,
    usable: Sequence[np.ndarray] | None = None,
) -> Tensor:
    """The law [N, V] of covers under a request's parameters, from the logits after every spelling.
    `usable` are, for each spelling, the tokens beyond the prompt that a constraint allows."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    path_N1, whole_N1 = _path_logprobs(logits_NV, healing)
    offset_N1 = path_N1 - whole_N1
    edited_NV = logits_NV
    if history.adds_to_logits:
        edited_NV = ChainRows(history, (), [0] * len(logits_NV)).edit(logits_NV)
    weight_NV = torch.full_like(logits_NV, -math.inf)
    for row, left in enumerate(healing.left):
        beyond = healing.index.beyond(left) if usable is None else usable[row]
        for tokens, source_NV in (
            (beyond, edited_NV),
            (healing.index.writing(left), logits_NV),
        ):
            known = to_device(tokens[tokens < logits_NV.shape[1]], torch.long, logits_NV.device)
            weight_NV[row, known] = source_NV[row, known] + offset_N1[row]
    flat_1 = weight_NV.reshape(1, -1)
    return row_laws(flat_1, [history.sampling]).view_as(weight_NV)


def _path_logprobs(logits_NV: Tensor, healing: Healing) -> tuple[Tensor, Tensor]:
    """The log-probability of writing each spelling, and the mass of the logits after it."""
    whole_N1 = logits_NV.logsumexp(-1, keepdim=True)
    path_N1 = torch.zeros_like(whole_N1)
    for row, (spelling, parent) in enumerate(zip(healing.spellings, healing.parents)):
        if spelling:
            step = logits_NV[parent, spelling[-1]] - whole_N1[parent, 0]
            path_N1[row] = path_N1[parent] + step
    return path_N1, whole_N1


def draw_cover(p_BNV: Tensor, sample: Sampler) -> Cover:
    """One cover from the law of each sequence."""
    mass_BN = p_BNV.sum(-1)
    spelling_B = sample(mass_BN)
    row_B = torch.arange(len(p_BNV), device=p_BNV.device)
    law_BV = p_BNV[row_B, spelling_B] / mass_BN[row_B, spelling_B, None]
    return Cover.of_batch(spelling=spelling_B, token=sample(law_BV))
