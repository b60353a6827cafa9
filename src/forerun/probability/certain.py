"""Rules at temperature 0, where every law is certain of one token: what their plain code decides
(`acceptance.py`), from those tokens alone.

On a CPU making laws of a whole vocabulary and drawing from them takes longer than a small model's
forward. A choice is the token that a law is certain of; -1 where it has no mass. None as an outcome
says that a law without mass was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from forerun.probability.acceptance import jacobi_step, matching, rejection, sample_token
from forerun.probability.logits import likeliest
from forerun.probability.outcomes import JacobiStep, Outcome, Token, Verdict

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
