"""Queries, keys and values of some rows: norm, product, rotation, and keys and values into their
slots; in one launch where rows are few, with the bits of one after the other.

T rows, H heads, G key heads, D head size, E hidden size, N = (H + 2G) D outputs.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.backbones.kernels.elementwise import RMSNorm, Rotary, rotate_and_keep
from forerun.backbones.kernels.launch import launch_options, wait_for_last
from forerun.backbones.kernels.matmul import (
    FUSED_ROWS,
    ProductTiling,
    by_kernel,
    multiply,
    operands,
    packed_tiling,
    parts_of,
    prefetch,
    product,
    tiling_for,
)
from forerun.backbones.kernels.packed import PackedMatrix
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions", "slots"])
def _projection(
    x, norm, weight, scales, bias, cos, sin, positions, slots, queries, keys, values,
    rows, K, share, eps, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    LAUNCH: tl.constexpr,
):  # fmt: skip
    """A rotation takes numbers in pairs, half a head apart; so a program makes both of each."""
    N: tl.constexpr = (H + 2 * G) * D
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    pair = tl.program_id(1) * BN + tl.arange(0, BN)
    head = pair // (D // 2)
    d = pair % (D // 2)
    low_n = head * D + d
    high_n = low_n + D // 2
    prefetch(weight, low_n, 0, N, K, BITS, LAUNCH)
    prefetch(weight, high_n, 0, N, K, BITS, LAUNCH)
    wait_for_last(LAUNCH)
    low, high = multiply(
        x, norm, weight, scales, m, low_n, high_n, rows, N, K, 0, K, share, eps,
        BITS, GROUP, True, True, TRANSPOSED, BM, BN, BK,
    )  # fmt: skip
    if BIASED:
        low += tl.load(bias + low_n, low_n < N, 0).to(tl.float32)[None, :]
        high += tl.load(bias + high_n, high_n < N, 0).to(tl.float32)[None, :]
    # rounded as a product of its own would be
    low = low.to(queries.dtype.element_ty).to(tl.float32)
    high = high.to(queries.dtype.element_ty).to(tl.float32)
    inside = (m < rows)[:, None] & (low_n < N)[None, :]
    at = tl.load(positions + m, m < rows, 0)[:, None] * D + d[None, :]
    cos_low = tl.load(cos + at, inside, 0).to(tl.float32)
    sin_low = tl.load(sin + at, inside, 0).to(tl.float32)
    cos_high = tl.load(cos + at + D // 2, inside, 0).to(tl.float32)
    sin_high = tl.load(sin + at + D // 2, inside, 0).to(tl.float32)
    rotated = (head < H + G)[None, :]
    new_low = tl.where(rotated, tl.math.fma(low, cos_low, high * sin_low), low)
    new_high = tl.where(rotated, tl.math.fma(high, cos_high, low * sin_high), high)
    slot = (tl.load(slots + m, m < rows, 0) * G * D)[:, None]
    is_query = inside & (head < H)[None, :]
    is_key = inside & ((head >= H) & (head < H + G))[None, :]
    is_value = inside & (head >= H + G)[None, :]
    query_at = queries + m[:, None].to(tl.int64) * H * D + low_n[None, :]
    key_at = keys + slot + (low_n - H * D)[None, :]
    value_at = values + slot + (low_n - (H + G) * D)[None, :]
    tl.store(query_at, new_low, is_query)
    tl.store(query_at + D // 2, new_high, is_query)
    tl.store(key_at, new_low, is_key)
    tl.store(key_at + D // 2, new_high, is_key)
    tl.store(value_at, new_low, is_value)
    tl.store(value_at + D // 2, new_high, is_value)


def project(
    layer: int,
    x_TE: Tensor,
    matrix: tuple[Tensor | PackedMatrix, Tensor | None],
    normed: RMSNorm,
    rotary: Rotary,
    batch: Batch,
    slots: Slots,
    *,
    fixed: bool = False,
) -> Tensor:
    """Queries [T, H, D], normed and rotated, by a matrix [E, N] and its bias; keys and values are
    written to their slots."""
    weight_EN, bias_N = matrix
    outputs = weight_EN.shape[1]
    if (
        len(x_TE) <= FUSED_ROWS
        and rotary.q_norm_D is None
        and by_kernel(x_TE, weight_EN, "plain", fixed)
        and parts_of(outputs, x_TE.shape[1], False)[0] == 1
    ):
        return fused_projection(layer, x_TE, matrix, normed, rotary, batch, slots)
    qkv_TN = product(x_TE, weight_EN, bias_N, normed=normed, fixed=fixed)
    return rotate_and_keep(layer, qkv_TN, rotary, batch, slots)


def fused_projection(
    layer: int,
    x_TE: Tensor,
    matrix: tuple[Tensor | PackedMatrix, Tensor | None],
    normed: RMSNorm,
    rotary: Rotary,
    batch: Batch,
    slots: Slots,
    tiling: ProductTiling | None = None,
) -> Tensor:
    weight_EN, bias_N = matrix
    keys, values = slots.flat(layer)
    _, groups, dim = keys.shape
    rows, inputs = x_TE.shape
    outputs = weight_EN.shape[1]
    heads = outputs // dim - 2 * groups
    packed = isinstance(weight_EN, PackedMatrix)
    weight_NE = weight_EN if isinstance(weight_EN, PackedMatrix) else weight_EN.t().contiguous()
    if tiling is None:
        tiling = (packed_tiling if packed else tiling_for)("paired", rows, x_TE.dtype)
    operand, packing = operands(weight_NE)
    q_THD = x_TE.new_empty(rows, heads, dim)
    grid = (triton.cdiv(rows, tiling.rows), triton.cdiv(outputs // 2, tiling.outputs))
    _projection[grid](
        x_TE,
        normed.weight_E,
        *operand,
        x_TE if bias_N is None else bias_N,
        rotary.cos_CD,
        rotary.sin_CD,
        batch.positions_T,
        batch.slots_T,
        q_THD,
        keys,
        values,
        rows,
        inputs,
        1 / inputs,
        normed.eps,
        H=heads,
        G=groups,
        D=dim,
        **packing,
        BIASED=bias_N is not None,
        TRANSPOSED=tiling.transposed,
        BM=tiling.rows,
        BN=tiling.outputs,
        BK=tiling.inputs,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(q_THD, rows),
    )
    return q_THD
