"""Rules at temperature 0, where every law is certain of one token: what their plain code decides
(`acceptance.py`), from those tokens alone.

Making laws of a whole vocabulary and drawing from them takes longer than a small model's forward.
On a CPU rules decide sequence by sequence; in a program of a GPU (B sequences, K drafted tokens, L
laws) for all at once. A choice is the token that a law is certain of; -1 where it has no mass. None
as an outcome says that a law without mass was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.probability.acceptance import (
    descend_tree,
    jacobi_step,
    keep_foreseen,
    matching,
    rejection,
    sample_each,
    sample_token,
    step_on,
)
from forerun.probability.distributions import path_products
from forerun.probability.logits import likeliest
from forerun.probability.markov import ChainRule
from forerun.probability.outcomes import Descent, JacobiStep, Outcome, Token, Tokens, Verdict
from forerun.probability.transfer import can_fuse

Choices = Sequence[int]


def choices(logits_NV: Tensor) -> list[int]:
    """What the greedy law of each row, of the host's, is certain of."""
    if logits_NV.dtype.itemsize < 4:  # numpy does not know all of these
        return likeliest(logits_NV).tolist()
    array_NV = logits_NV.numpy()
    best_N = array_NV.argmax(-1)  # the first of equals, or what is no number
    return [
        best if array_NV[row, best] > -np.inf else -1 for row, best in enumerate(best_N.tolist())
    ]


def certain_token(p: Choices) -> Token | None:
    return Token(p[0]) if p[0] >= 0 else None


def certain_matching(x: Sequence[int], p: Choices) -> Verdict | None:
    n = 0
    while n < len(x) and x[n] == p[n]:
        n += 1
    return Verdict(n, p[n]) if p[n] >= 0 else None


def certain_rejection(x: Sequence[int], q: Choices | None, p: Choices) -> Verdict | None:
    """A token that its own law does not have is never accepted."""
    own = x if q is None else [token if token == sure else -1 for token, sure in zip(x, q)]
    n = 0
    while n < len(x) and own[n] == p[n] >= 0:
        n += 1
    return Verdict(n, p[n]) if p[n] >= 0 else None


def certain_jacobi_step(x: Sequence[int], p: Choices) -> JacobiStep | None:
    verdict = certain_matching(x, p)
    if verdict is None:
        return None
    said = [max(choice, 0) for choice in p]
    known = said[verdict.accepted + 1 : len(x)]
    last = known[-1] if known else verdict.token
    repeated = known + [last] * (len(x) - len(known))
    return JacobiStep(verdict.accepted, verdict.token, said, repeated)


def certain_descent(x: Sequence[int], parent: Sequence[int], p: Choices) -> Descent | None:
    """The way into the tree is as long as its tokens are the likeliest ones."""
    node = 0
    for child, (token, up) in enumerate(zip(x, parent), 1):
        if up == node and token == p[node]:
            node = child
    said = [max(choice, 0) for choice in p]
    return Descent(node, p[node], said) if p[node] >= 0 else None


CERTAIN: dict[Callable[..., Outcome], Callable[..., Outcome | None]] = {
    sample_token: certain_token,
    matching: certain_matching,
    rejection: certain_rejection,
    jacobi_step: certain_jacobi_step,
    descend_tree: certain_descent,
}


def certain_tokens(p_B: Tensor) -> Token:
    return Token.of_batch(token=p_B)


def certain_of_each(where_BK: Tensor, p_BK: Tensor) -> Tokens:
    return Tokens.of_batch(tokens=torch.where(where_BK >= 0, p_BK, 0))


def certain_rejections(x_BK: Tensor, q_BK: Tensor | None, p_BL: Tensor) -> Verdict:
    own_BK = x_BK
    if q_BK is not None:  # it may have rows that pad
        own_BK = torch.where(x_BK == q_BK[:, : x_BK.shape[1]], x_BK, -1)
    return keep_foreseen(own_BK, p_BL)


def certain_jacobi_steps(x_BK: Tensor, p_BL: Tensor) -> JacobiStep:
    return step_on(x_BK, keep_foreseen(x_BK, p_BL), p_BL.clamp(min=0))


def certain_descents(x_BN: Tensor, parent_BN: Tensor, p_BL: Tensor) -> Descent:
    """A node is reached if all tokens on the way are the likeliest ones. One way is left, and along
    it the numbers of nodes grow."""
    up_BN = parent_BN.clamp(min=0)
    step_BN = (x_BN >= 0) & (x_BN == p_BL.gather(1, up_BN))
    reached_BL = path_products(step_BN.to(torch.float32), up_BN)
    node_L = torch.arange(reached_BL.shape[1], device=p_BL.device)
    node_B = torch.where(reached_BL > 0, node_L, 0).amax(1)
    token_B = p_BL.gather(1, node_B[:, None]).squeeze(1)
    return Descent.of_batch(node=node_B, token=token_B, likeliest=p_BL.clamp(min=0))


CERTAIN_TOGETHER: dict[Callable[..., Outcome], Callable[..., Outcome]] = {
    sample_token: certain_tokens,
    sample_each: certain_of_each,
    matching: keep_foreseen,
    rejection: certain_rejections,
    jacobi_step: certain_jacobi_steps,
    descend_tree: certain_descents,
}


Drawn = Callable[[Tensor, Tensor], Tensor]


def likeliest_drafts(rule: Callable[..., Outcome]) -> Drawn | None:
    """What a rule draws at temperature 0 from logits [B, K, V], behind a last token each: [B, K].
    None where it is none that draws a token from each law."""
    if isinstance(rule, ChainRule):
        return rule.markov.likeliest_chain
    return likeliest_of_each if rule is sample_each else None


def likeliest_of_each(logits_BKV: Tensor, last_B: Tensor) -> Tensor:
    """Whatever stands before."""
    return likeliest(logits_BKV.flatten(0, 1)).view(logits_BKV.shape[:2])


def judge_rows(
    logits_RV: Tensor, drafted_BK: Tensor, accepted_B: Tensor, token_B: Tensor
) -> Tensor:
    """Drafts and the verdicts on them, as rows [B, K + 2], from logits of K + 1 rows each. What
    follows takes `accepted_B` and `token_B`, which get the same, but a token where there is
    none."""
    if can_fuse(logits_RV):
        from forerun.probability import kernels

        return kernels.judge_rows(logits_RV, drafted_BK, accepted_B, token_B)
    choice_BL = likeliest(logits_RV).view(len(drafted_BK), -1)
    verdict = keep_foreseen(drafted_BK, choice_BL).columns()
    accepted_B.copy_(verdict["accepted"])
    token_B.copy_(verdict["token"].clamp(min=0))
    return torch.cat([drafted_BK, verdict["accepted"][:, None], verdict["token"][:, None]], 1)
