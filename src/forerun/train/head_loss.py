"""Cross-entropy through a frozen head, without keeping logits: the gradient is made in the same
pass, a part of the rows at a time.

N rows, E hidden size, R rank of the Markov correction, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

ROWS = 8192  # at a time


def head_loss(
    x_NE: Tensor,
    head_EV: Tensor,
    labels_N: Tensor,
    weights_N: Tensor,
    markov: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The weighted sum of -log p(label). `markov` is (rows of rank R [N, R], matrix [V, R])."""
    before_NR, matrix_VR = markov or (None, None)
    return _HeadLoss.apply(x_NE, head_EV, labels_N, weights_N, before_NR, matrix_VR)


def gradient(logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
    """-log p(label) of every row, and the gradient of the weighted sum by the logits."""
    logits = logits_NV.float()
    normed = logits - logits.logsumexp(-1, keepdim=True)
    loss_N = -normed.gather(1, labels_N[:, None])[:, 0]
    tokens_V = torch.arange(logits.shape[1], device=logits.device)
    hit = tokens_V == labels_N[:, None]
    by_logits = (normed.exp() - hit.float()) * weights_N[:, None]
    return loss_N, by_logits.to(logits_NV.dtype)


@cache
def _fused(on_gpu: bool) -> Any:
    """The same in few passes over the logits, where it can be compiled."""
    if not on_gpu:
        return gradient
    compiled = torch.compile(gradient)
    try:
        zero = torch.zeros(2, device="cuda")
        compiled(torch.zeros(2, 8, device="cuda"), zero.long(), zero)
    except Exception:  # whatever stands in the way, the plain code can do it
        return gradient
    return compiled


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - what autograd passes
        ctx: Any,
        x_NE: Tensor,
        head_EV: Tensor,
        labels_N: Tensor,
        weights_N: Tensor,
        before_NR: Tensor | None,
        matrix_VR: Tensor | None,
    ) -> Tensor:
        total = weights_N.new_zeros(())
        by_x = torch.empty_like(x_NE)
        by_before = None if before_NR is None else torch.empty_like(before_NR)
        by_matrix = None if matrix_VR is None else torch.zeros_like(matrix_VR, dtype=torch.float32)
        for first in range(0, len(x_NE), ROWS):
            part = slice(first, first + ROWS)
            logits = x_NE[part] @ head_EV
            if before_NR is not None and matrix_VR is not None:
                logits = torch.addmm(logits, before_NR[part], matrix_VR.t())
            loss_N, by_logits = _fused(x_NE.is_cuda)(logits, labels_N[part], weights_N[part])
            total += (loss_N * weights_N[part]).sum()
            torch.mm(by_logits, head_EV.t(), out=by_x[part])
            if by_before is not None and before_NR is not None and matrix_VR is not None:
                torch.mm(by_logits, matrix_VR, out=by_before[part])
                by_matrix += by_logits.t() @ before_NR[part]
        ctx.save_for_backward(by_x, by_before, by_matrix)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        by_x, by_before, by_matrix = ctx.saved_tensors
        scaled = [
            None if x is None else x * scale.to(x.dtype) for x in (by_x, by_before, by_matrix)
        ]
        return scaled[0], None, None, None, scaled[1], scaled[2]
