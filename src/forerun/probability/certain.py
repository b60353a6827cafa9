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
    jacobi_step,
    keep_foreseen,
    matching,
    rejection,
    sample_each,
    sample_token,
    step_on,
)
from forerun.probability.logits import likeliest
from forerun.probability.outcomes import JacobiStep, Outcome, Token, Tokens, Verdict

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


CERTAIN: dict[Callable[..., Outcome], Callable[..., Outcome | None]] = {
    sample_token: certain_token,
    matching: certain_matching,
    rejection: certain_rejection,
    jacobi_step: certain_jacobi_step,
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


CERTAIN_TOGETHER: dict[Callable[..., Outcome], Callable[..., Outcome]] = {
    sample_token: certain_tokens,
    sample_each: certain_of_each,
    matching: keep_foreseen,
    rejection: certain_rejections,
    jacobi_step: certain_jacobi_steps,
}
