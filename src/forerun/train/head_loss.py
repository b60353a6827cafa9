"""Losses through a frozen head, without keeping logits: the gradient is made in the same pass, a
part of the rows at a time.

N rows, E hidden size, R rank of the Markov correction, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

LOGITS = 400_000_000  # at a time
LOGITS_ON_CPU = 1_000_000  # what is made of them stays in its caches
ROWS_ON_CPU = 128  # at least: the head is read for each part


def parts(rows: int, vocab: int, on_gpu: bool) -> Iterator[slice]:
    """The rows in parts of one size, so that what is compiled is compiled once."""
    count = -(-rows * vocab // (LOGITS if on_gpu else LOGITS_ON_CPU))
    if not on_gpu:
        count = min(count, -(-rows // ROWS_ON_CPU))
    size = -(-rows // max(1, count))
    return (slice(first, first + size) for first in range(0, rows, size or 1))


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
def _fused(plain: Callable[..., Any], on_gpu: bool) -> Callable[..., Any]:
    """The same in few passes over the logits, where it can be compiled."""
    if not on_gpu:
        return plain
    compiled = torch.compile(plain, dynamic=True)
    broken = False

    def either(*inputs: Tensor) -> Any:
        nonlocal broken
        if not broken:
            try:
                return compiled(*inputs)
            except Exception:  # whatever stands in the way, the plain code can do it
                broken = True
        return plain(*inputs)

    return either


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
        for part in parts(len(x_NE), head_EV.shape[1], x_NE.is_cuda):
            logits = x_NE[part] @ head_EV
            if before_NR is not None and matrix_VR is not None:
                logits = torch.addmm(logits, before_NR[part], matrix_VR.t())
            fused = _fused(gradient, x_NE.is_cuda)
            loss_N, by_logits = fused(logits, labels_N[part], weights_N[part])
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


def twin_loss(
    text_NE: Tensor,
    guess_NE: Tensor,
    head_EV: Tensor,
    labels_N: Tensor,
    weights: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """What follows a text and what follows a guess of it, row by row: the text's -log p(label),
    and KL from the text's law, held fixed, to the guess's. (Weighted sum of both, the guess's
    likeliest tokens); `weights` are the text's and the guess's [N] each."""
    loss, likeliest_N = _TwinLoss.apply(text_NE, guess_NE, head_EV, labels_N, *weights)
    return loss, likeliest_N


def twin_gradient(
    text_NV: Tensor, guess_NV: Tensor, labels_N: Tensor, own_N: Tensor, taught_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weighted loss of every row, its gradients by both logits, the guess's likeliest token."""
    text = text_NV.float()
    text = text - text.logsumexp(-1, keepdim=True)
    guess = guess_NV.float()
    guess = guess - guess.logsumexp(-1, keepdim=True)
    p = text.exp()
    kl_N = (p * (text - guess)).sum(-1)
    loss_N = kl_N * taught_N - text.gather(1, labels_N[:, None])[:, 0] * own_N
    hit = torch.arange(p.shape[1], device=p.device) == labels_N[:, None]
    by_text = (p - hit.float()) * own_N[:, None]
    by_guess = (guess.exp() - p) * taught_N[:, None]
    dtype = text_NV.dtype
    return loss_N, by_text.to(dtype), by_guess.to(dtype), guess_NV.argmax(-1)


class _TwinLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - what autograd passes
        ctx: Any,
        text_NE: Tensor,
        guess_NE: Tensor,
        head_EV: Tensor,
        labels_N: Tensor,
        own_N: Tensor,
        taught_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        total = own_N.new_zeros(())
        by_text = torch.empty_like(text_NE)
        by_guess = torch.empty_like(guess_NE)
        likeliest_N = torch.empty_like(labels_N)
        for part in parts(len(text_NE), head_EV.shape[1], text_NE.is_cuda):
            rows = (text_NE[part] @ head_EV, guess_NE[part] @ head_EV)
            fused = _fused(twin_gradient, text_NE.is_cuda)
            loss_N, *by_logits, likeliest_N[part] = fused(
                *rows, labels_N[part], own_N[part], taught_N[part]
            )
            total += loss_N.sum()
            torch.mm(by_logits[0], head_EV.t(), out=by_text[part])
            torch.mm(by_logits[1], head_EV.t(), out=by_guess[part])
        ctx.save_for_backward(by_text, by_guess)
        ctx.mark_non_differentiable(likeliest_N)
        return total, likeliest_N

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        by_text, by_guess = (x * scale.to(x.dtype) for x in ctx.saved_tensors)
        return by_text, by_guess, None, None, None, None
