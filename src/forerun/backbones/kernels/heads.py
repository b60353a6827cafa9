"""Queries, keys and values of few rows in one launch: product, rotation, and each to its place.

The arithmetic is that of `matmul` and `elementwise`, in the same order: a row has the same bits
here and there.

T rows, H heads, G key heads, D head size, E hidden size.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.backbones.kernels.elementwise import RMSNorm, Rotary, norm
from forerun.backbones.kernels.launch import FEW_ROWS, launch_options, wait_for_last
from forerun.backbones.kernels.matmul import ProductTiling, parts_of
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch

# Up to so many outputs. A program takes at most a head's.
TILINGS = {
    1024: ProductTiling(16, 32, 256, 4, transposed=True),
    1 << 30: ProductTiling(16, 64, 256, 4, transposed=True),
}


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions", "slots"])
def _heads(
    x, weight, bias, cos, sin, positions, slots, slot_stride,
    q, keys, values, rows,
    E: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    LAUNCH: tl.constexpr,
):  # fmt: skip
    """BN outputs of one head, for all rows."""
    wait_for_last(LAUNCH)
    head = tl.program_id(0) // (D // BN)
    part = tl.program_id(0) % (D // BN)
    n = _head_outputs(head, part, D, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    row_at = x + m[:, None] * E
    output_at = weight + n[:, None].to(tl.int64) * E
    total = tl.zeros([BN, BM], tl.float32)
    for at in range(0, E, BK):
        left = at + k < E
        piece = tl.load(row_at + at + k[None, :], (m < rows)[:, None] & left[None, :], 0)
        matrix = tl.load(output_at + at + k[None, :], left[None, :], 0)
        total = tl.dot(matrix, tl.trans(piece), total, input_precision="ieee")
    total = tl.trans(total)
    if BIASED:
        total += tl.load(bias + n).to(tl.float32)[None, :]
    _store_heads(
        total, head, part, q, keys, values, cos, sin, positions, slots, slot_stride, rows,
        H, G, D, BM, BN,
    )  # fmt: skip


@triton.jit
def _head_outputs(head, part, D: tl.constexpr, BN: tl.constexpr):
    """Outputs of one head: some of its first half, and those of the second half that turn with
    them."""
    j = tl.arange(0, BN)
    return head * D + j // (BN // 2) * (D // 2) + part * (BN // 2) + j % (BN // 2)


@triton.jit
def _store_heads(
    total, head, part, q, keys, values, cos, sin, positions, slots, slot_stride, rows,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rotate part of a head, whose pairs are both here, and write it to where it belongs."""
    HALF: tl.constexpr = BN // 2
    m = tl.arange(0, BM)
    inside = (m < rows)[:, None]
    d = (part * HALF + tl.arange(0, HALF))[None, :]
    pairs = tl.permute(tl.reshape(total, [BM, 2, HALF]), [0, 2, 1])
    low, high = tl.split(pairs.to(q.dtype.element_ty).to(tl.float32))
    if head < H + G:
        position = tl.load(positions + m, m < rows, 0)[:, None]
        at = position * D + d
        cos_low = tl.load(cos + at, inside, 0).to(tl.float32)
        sin_low = tl.load(sin + at, inside, 0).to(tl.float32)
        cos_high = tl.load(cos + at + D // 2, inside, 0).to(tl.float32)
        sin_high = tl.load(sin + at + D // 2, inside, 0).to(tl.float32)
        turned = tl.math.fma(low, cos_low, high * sin_low)
        high = tl.math.fma(high, cos_high, low * sin_high)
        low = turned
    slot = tl.load(slots + m, m < rows, 0)[:, None] * slot_stride
    if head < H:
        place = q + (m[:, None] * H + head) * D + d
        tl.store(place, low, inside)
        tl.store(place + D // 2, high, inside)
    elif head < H + G:
        place = keys + slot + (head - H) * D + d
        tl.store(place, low, inside)
        tl.store(place + D // 2, high, inside)
    else:
        place = values + slot + (head - H - G) * D + d
        tl.store(place, low, inside)
        tl.store(place + D // 2, high, inside)


def fits(heads: int, key_heads: int, dim: int, hidden: int) -> bool:
    """Can the heads of a model be tiled?"""
    parts, _ = parts_of((heads + 2 * key_heads) * dim, hidden, gated=False)
    return dim in (32, 64, 128) and parts == 1


def heads_product(
    layer: int,
    x_TE: Tensor,
    weight_EN: Tensor,
    bias_N: Tensor | None,
    normed: RMSNorm,
    rotary: Rotary,
    batch: Batch,
    slots: Slots,
) -> Tensor:
    """Norm rows, multiply, rotate; write keys and values to their slots. The queries come back,
    [T, H, D]."""
    keys, values = slots.flat(layer)
    _, groups, dim = keys.shape
    rows, hidden = x_TE.shape
    assert rows <= FEW_ROWS
    x_TE = norm(x_TE, *normed)
    outputs = weight_EN.shape[1]
    heads = outputs // dim - 2 * groups
    q_THD = x_TE.new_empty(rows, heads, dim)
    tiling = next(tiling for most, tiling in TILINGS.items() if outputs <= most)
    width = min(tiling.outputs, dim)
    _heads[(outputs // width,)](
        x_TE,
        weight_EN.t(),
        x_TE if bias_N is None else bias_N,
        rotary.cos_CD,
        rotary.sin_CD,
        batch.positions_T,
        batch.slots_T,
        keys.stride(0),
        q_THD,
        keys,
        values,
        rows,
        E=hidden,
        H=heads,
        G=groups,
        D=dim,
        BIASED=bias_N is not None,
        BM=tiling.rows,
        BN=width,
        BK=tiling.inputs,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(x_TE, rows),
    )
    return q_THD
