"""Matrix products: ours for a few rows, where it is faster, and the library's for the rest.

T rows, K inputs, N outputs.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.backbones.kernels.elementwise import RMSNorm, norm, swiglu
from forerun.backbones.kernels.launch import launch_options, power_of_two, wait_for_last


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, bias, out, rows, N, K,
    BIASED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """A few rows times a matrix [N, K] (GATED: [2N, K]). One program reads each part of the
    matrix, once. TRANSPOSED puts the matrix on the side of which matrix units take more at a
    time."""
    wait_for_last(LAUNCH)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BK)
    row_inside = (m < rows)[:, None]
    total = tl.zeros([BN, ROWS] if TRANSPOSED else [ROWS, BN], tl.float32)
    total_up = tl.zeros([BN, ROWS] if TRANSPOSED else [ROWS, BN], tl.float32)
    output_inside = (n < N)[:, None]
    for at in range(0, K, BK):
        left = at + k < K
        piece = tl.load(x + m[:, None] * K + at + k[None, :], row_inside & left[None, :], 0)
        matrix = tl.load(
            weight + n[:, None].to(tl.int64) * K + at + k[None, :], output_inside & left[None, :], 0
        )
        total = _add_product(total, piece, matrix, TRANSPOSED)
        if GATED:
            matrix = tl.load(
                weight + (n + N)[:, None].to(tl.int64) * K + at + k[None, :],
                output_inside & left[None, :],
                0,
            )
            total_up = _add_product(total_up, piece, matrix, TRANSPOSED)
    if TRANSPOSED:
        total = tl.trans(total)
        total_up = tl.trans(total_up)
    if BIASED:
        total += tl.load(bias + n, n < N, 0).to(tl.float32)[None, :]
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    place = out + m[:, None] * N + n[None, :]
    kept = row_inside & (n < N)[None, :]
    if ADDED:
        total += tl.load(place, kept, 0).to(tl.float32)
    tl.store(place, total, kept)


@triton.jit
def _add_product(total, piece, matrix, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        total = tl.dot(matrix, tl.trans(piece), total, input_precision="ieee")
    else:
        total = tl.dot(piece, tl.trans(matrix), total, input_precision="ieee")
    return total


@dataclass(frozen=True)
class ProductTiling:
    """How `_few_rows` goes over a matrix: the block that it takes at a time, and how many blocks
    it loads ahead."""

    outputs: int
    inputs: int
    stages: int
    transposed: bool


# Products that we do faster than the library on an H200, by their kind and up to how many rows
# (`bench/gpu_kernels.py --tune`).
FEW_ROW_TILINGS = {
    "gated": {
        16: ProductTiling(32, 128, 4, False),
        32: ProductTiling(64, 64, 3, True),
        64: ProductTiling(64, 64, 3, False),
    },
    "square": {16: ProductTiling(64, 256, 4, True)},
    "wide": {16: ProductTiling(64, 128, 4, True)},
}
WIDE = 65536  # outputs


def few_row_tiling(
    rows: int, outputs: int, inputs: int, gated: bool, added: bool
) -> ProductTiling | None:
    """How to do a product ourselves; None where the library is faster."""
    tilings = FEW_ROW_TILINGS.get(_product_kind(outputs, inputs, gated, added), {})
    return next((tiling for most, tiling in tilings.items() if rows <= most), None)


def _product_kind(outputs: int, inputs: int, gated: bool, added: bool) -> str:
    """The key of `FEW_ROW_TILINGS`, if the product has one."""
    if gated:
        return "gated"
    if outputs > WIDE:
        return "wide"
    if added and inputs <= 2 * outputs:
        return "square"
    return "other"


def product(
    x_TK: Tensor,
    weight_KN: Tensor,
    bias_N: Tensor | None = None,
    *,
    normed: RMSNorm | None = None,
    gated: bool = False,
    onto: Tensor | None = None,
) -> Tensor:
    """norm(x) @ weight + bias. `gated` makes a SwiGLU of an output that is [gate, up]. The result
    is added to `onto`, in place, if that is given."""
    if normed is not None:
        x_TK = norm(x_TK, *normed)
    inputs, outputs = weight_KN.shape
    tiling = few_row_tiling(len(x_TK), outputs, inputs, gated, onto is not None)
    half = x_TK.dtype in (torch.bfloat16, torch.float16)
    by_rows = weight_KN.stride(0) == 1
    gated_with_bias = gated and bias_N is not None
    if tiling is not None and half and by_rows and not gated_with_bias:
        return few_row_product(x_TK, weight_KN.t(), tiling, bias_N, gated=gated, onto=onto)
    if onto is not None:
        onto = onto.addmm_(x_TK, weight_KN)
        return onto if bias_N is None else onto.add_(bias_N)
    out = x_TK @ weight_KN if bias_N is None else torch.addmm(bias_N, x_TK, weight_KN)
    return swiglu(out) if gated else out


def few_row_product(
    x_TK: Tensor,
    weight_NK: Tensor,
    tiling: ProductTiling,
    bias_N: Tensor | None = None,
    *,
    gated: bool = False,
    onto: Tensor | None = None,
) -> Tensor:
    """A product of few rows in one launch, with the matrix as [N, K]."""
    rows, inputs = x_TK.shape
    outputs = len(weight_NK) // 2 if gated else len(weight_NK)
    out = x_TK.new_empty(rows, outputs) if onto is None else onto
    _few_rows[(triton.cdiv(outputs, tiling.outputs),)](
        x_TK,
        weight_NK,
        x_TK if bias_N is None else bias_N,
        out,
        rows,
        outputs,
        inputs,
        BIASED=bias_N is not None,
        GATED=gated,
        ADDED=onto is not None,
        TRANSPOSED=tiling.transposed,
        ROWS=max(16, power_of_two(rows)),
        BN=tiling.outputs,
        BK=tiling.inputs,
        num_warps=4,
        num_stages=tiling.stages,
        **launch_options(out, rows),
    )
    return out
