"""Acceptance rules that keep the target's law: pure functions of laws and of a `sample` argument.

B sequences, K drafted tokens, L = K + 1 rows of a verdict, V vocabulary. `sample(law_BN)` draws one
outcome per sequence: with each sequence's noise in production, every outcome in turn under
certification. What is certified is what runs. Rules run batch-first on the device; a draft shorter
than K is padded with token -1.

*Accepted*: a drafted token that the target keeps. *Resampled*: the token drawn in place of the
first rejected one. *Bonus*: the token drawn after a draft that was accepted whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.probability.distributions import path_products, point_mass, prefix_lengths, residual
from forerun.probability.outcomes import Descent, JacobiStep, Outcome, Token, Tokens, Verdict

Rule = Callable[..., Outcome]
VerdictRule = Callable[..., Verdict]

# For functions that make a rule from options: the same options give the same rule, so that
# sequences which ask for it share a batch. Only the latest rules are kept.
rule_factory = lru_cache(maxsize=64)


class Sampler(Protocol):
    """Where randomness comes from."""

    def __call__(self, law_BN: Tensor) -> Tensor:
        """One outcome of each law, [B]; -1 of a law without mass."""
        ...

    def many(self, law_BKN: Tensor) -> Tensor:
        """K outcomes of each sequence, [B, K]: what K calls one after the other give."""
        ...

    def ahead(self, x_BK: Tensor, law_BLN: Tensor) -> Tensor:
        """What plain decoding would draw from L laws, one draw each from this one on, [B, L]. What
        stands behind the first outcome that x does not have is nobody's business."""
        ...


def sample_token(p_BV: Tensor, sample: Sampler) -> Token:
    """One token from each law."""
    return Token.of_batch(token=sample(p_BV))


def sample_each(where_BK: Tensor, p_BKV: Tensor, sample: Sampler) -> Tokens:
    """One token from each of K laws, drawn on its own: a parallel draft. In `where`, -1 pads."""
    return Tokens.of_batch(tokens=torch.where(where_BK >= 0, sample.many(p_BKV), 0))


def rejection(x_BK: Tensor, q_BKV: Tensor | None, p_BLV: Tensor, sample: Sampler) -> Verdict:
    """Keep drafted tokens x ~ q so that the text has p's law (Leviathan et al., 2023).

    q = None is a point mass on x. Temperature 0 needs no other rule: there p and q are point masses
    and this is greedy matching.
    """
    accept_BK = acceptance_ratios(x_BK, q_BKV, p_BLV).clamp(max=1)
    return keep_prefix(accept_BK, x_BK, q_BKV, p_BLV, sample)


def matching(x_BK: Tensor, p_BLV: Tensor, sample: Sampler) -> Verdict:
    """Draw the next tokens as plain decoding would, and keep those that were foreseen.

    For drafts that are certain of themselves: a token is kept as often as by rejection, and the
    text is the one that plain decoding draws with the same noise. So it is the same text whatever
    is drafted, and however much of it.
    """
    return keep_foreseen(x_BK, sample.ahead(x_BK, p_BLV))


def keep_foreseen(x_BK: Tensor, drawn_BL: Tensor) -> Verdict:
    """A verdict on drafted tokens, given those that are drawn."""
    foreseen_BK = (x_BK >= 0) & (drawn_BL[:, : x_BK.shape[1]] == x_BK)
    n_B = foreseen_BK.cumprod(1).sum(1)
    return Verdict.of_batch(accepted=n_B, token=drawn_BL.gather(1, n_B[:, None]).squeeze(1))


def jacobi_step(x_BK: Tensor, p_BLV: Tensor, sample: Sampler) -> JacobiStep:
    """A verdict on a guess, and the likeliest token at every place: the next guess."""
    return step_on(x_BK, matching(x_BK, p_BLV, sample), p_BLV.argmax(-1))


def step_on(x_BK: Tensor, verdict: Verdict, likeliest_BL: Tensor) -> JacobiStep:
    """From a guess and the verdict on it to the next guess."""
    columns = verdict.columns()
    repeated_BK = shifted_guess(x_BK, columns["accepted"], columns["token"], likeliest_BL)
    return JacobiStep.of_batch(**columns, likeliest=likeliest_BL, repeated=repeated_BK)


def shifted_guess(x_BK: Tensor, n_B: Tensor, token_B: Tensor, likeliest_BL: Tensor) -> Tensor:
    """The guess after one of which n tokens were accepted: what is likeliest behind the token that
    follows them, and the last token of all for places that nothing is known about."""
    if not x_BK.shape[1]:
        return x_BK
    length_B1 = (x_BK >= 0).sum(1, keepdim=True)
    behind_B1 = n_B[:, None] + 1
    place_BK = behind_B1 + torch.arange(x_BK.shape[1], device=x_BK.device)
    end_B1 = (length_B1 - 1).clamp(min=0)
    last_B1 = torch.where(behind_B1 < length_B1, likeliest_BL.gather(1, end_B1), token_B[:, None])
    known_BK = likeliest_BL.gather(1, torch.minimum(place_BK.clamp(min=0), end_B1))
    # A law without mass shows in the token.
    return torch.where(place_BK < length_B1, known_BK, last_B1).clamp(min=0)


def descend_tree(x_BN: Tensor, parent_BN: Tensor, p_BLV: Tensor, sample: Sampler) -> Descent:
    """How far a tree of guessed tokens is right, and the token after that, so that the text has p's
    law.

    Node 0 is the text as it is. Node i is the tree's token i - 1 after its parent, whose number is
    smaller. p holds the law of what follows each of the L = N + 1 nodes. Drawing token after token
    from p, one leaves the tree somewhere. The law of where has a closed form, so one draw finds the
    node and another the token there. Siblings must differ. `likeliest` also covers any further rows
    of p.
    """
    present_BN = x_BN >= 0
    up_BN = parent_BN.clamp(min=0)
    row_B = torch.arange(len(x_BN), device=x_BN.device)
    step_BN = torch.where(present_BN, p_BLV[row_B[:, None], up_BN, x_BN.clamp(min=0)], 0)
    reached_BL = path_products(step_BN, up_BN)
    into_BL = torch.zeros_like(reached_BL).scatter_add_(1, up_BN, step_BN)
    node_B = sample(reached_BL * (1 - into_BL).clamp(min=0))
    law_BV = p_BLV[row_B, node_B]
    taken_BN = present_BN & (up_BN == node_B[:, None])
    taken_BV = torch.zeros_like(law_BV).scatter_reduce_(
        1, x_BN.clamp(min=0), taken_BN.to(law_BV.dtype), "amax"
    )
    token_B = sample(residual(law_BV, taken_BV))
    return Descent.of_batch(node=node_B, token=token_B, likeliest=p_BLV.argmax(-1))


def acceptance_ratios(x_BK: Tensor, q_BKV: Tensor | None, p_BLV: Tensor) -> Tensor:
    """p(x) / q(x) of every drafted token; 0 where there is none."""
    index_BK1 = x_BK.clamp(min=0).unsqueeze(-1)
    p_BK = p_BLV[:, : x_BK.shape[1]].gather(-1, index_BK1).squeeze(-1)
    q_BK = torch.ones_like(p_BK)
    if q_BKV is not None:
        q_BK = q_BKV.gather(-1, index_BK1).squeeze(-1)
    return torch.where((x_BK >= 0) & (q_BK > 0), p_BK / q_BK, 0)


def keep_prefix(
    accept_BK: Tensor, x_BK: Tensor, q_BKV: Tensor | None, p_BLV: Tensor, sample: Sampler
) -> Verdict:
    """Keep leading tokens, token i with probability accept[i], and draw the token after them."""
    n_B = sample(prefix_lengths(accept_BK))
    row_B = torch.arange(len(n_B), device=n_B.device)
    # Past the draft q is zero, so the bonus token is the residual of p against nothing.
    if q_BKV is None or not x_BK.shape[1]:
        drafted_B = F.pad(x_BK, (0, 1), value=-1)[row_B, n_B]
        q_BV = point_mass(drafted_B, p_BLV.shape[-1], p_BLV.dtype)
    else:
        last = x_BK.shape[1] - 1
        q_BV = torch.where((n_B <= last)[:, None], q_BKV[row_B, n_B.clamp(max=last)], 0)
    token_B = sample(residual(p_BLV[row_B, n_B], q_BV))
    return Verdict.of_batch(accepted=n_B, token=token_B)
