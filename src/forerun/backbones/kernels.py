"""What stands between the matrix products of a decoder, in Triton: one launch per step, and attention straight from the five
integers.

Attention reads rows as tiles: up to `height` neighbouring rows of one sequence, with all query heads of one key head folded in, so
keys are read once per tile and never copied. A tile looks at slots [0, near) and [lo, far); nothing else is loaded, and no mask is
ever stored. What a tile looks at is cut into `splits` shares that run side by side, so that one row over a long text fills the
device too.

Up to FEW rows the time of a kernel is mostly its beginning and its end. There every kernel lets the next one begin at once (on GPUs
that can), which then waits for it before it reads anything: programmatic dependent launch.

T rows, H heads, G key heads (H/G query heads each), D head size, E hidden size, I inner size, N tiles. All kernels run under
Triton's interpreter on a CPU as well, which is how the tests check them where there is no GPU.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from forerun.engine.cache import Slots
from forerun.engine.pack import Tiles

SLOTS = 64  # slots that attention takes at a time
LOG2_E = 1.4426950408889634
FEW = 16  # rows

NOT_EARLY, EARLY, AND_THE_NEXT = 0, 1, 2  # how a kernel is launched: after the last one, beside it, and so that the next one is too


def early(x: Tensor, rows: int) -> dict[str, Any]:
    """How to launch a kernel for so many rows. With many, those that wait would only be in the way of those that work."""
    if not x.is_cuda or torch.version.cuda is None or torch.cuda.get_device_capability(x.device) < (9, 0):
        return dict(WHEN=NOT_EARLY)
    return dict(WHEN=AND_THE_NEXT if rows <= FEW else EARLY, launch_pdl=True)


@triton.jit
def _wait(WHEN: tl.constexpr):
    """Let the next kernel begin, if that is wished; go on when the last one has finished."""
    if WHEN == 2:
        gdc_launch_dependents()
    if WHEN > 0:
        gdc_wait()


@triton.jit
def _norm(x, weight, out, size, eps, SIZE: tl.constexpr, WHEN: tl.constexpr):
    """out = x / rms(x) * weight, one row per program."""
    _wait(WHEN)
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, SIZE)
    there = at < size
    numbers = tl.load(x + row + at, there, 0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / size + eps)
    tl.store(out + row + at, numbers * scale * tl.load(weight + at, there, 0).to(tl.float32), there)


def norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    out_TE = torch.empty_like(x_TE)
    size = x_TE.shape[-1]
    rows, warps = x_TE.numel() // size, 8 if size > 1024 else 4
    _norm[(rows,)](x_TE, weight_E, out_TE, size, eps, SIZE=_power(size), num_warps=warps, **early(x_TE, rows))
    return out_TE


@triton.jit
def _swiglu(gate_up, out, size, BLOCK: tl.constexpr, WHEN: tl.constexpr):
    _wait(WHEN)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    gate = tl.load(gate_up + row * 2 * size + at, there, 0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, there, 0).to(tl.float32)
    tl.store(out + row * size + at, gate * tl.sigmoid(gate) * up, there)


def swiglu(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) * up of [gate, up]."""
    rows, both = gate_up_T2I.shape
    out_TI = gate_up_T2I.new_empty(rows, both // 2)
    _swiglu[(rows, triton.cdiv(both // 2, 1024))](gate_up_T2I, out_TI, both // 2, BLOCK=1024, **early(out_TI, rows))
    return out_TI


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rotate(
    qkv, q_norm, k_norm, cos, sin, positions, slots, queries, keys, values, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr, AT_ONCE: tl.constexpr, DIM: tl.constexpr,
    WHEN: tl.constexpr,
):  # fmt: skip
    """Queries are turned; keys, turned too, and values go to their slots."""
    _wait(WHEN)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    d = tl.arange(0, DIM)[None, :]
    there = (head < H + 2 * G) & (d < D)
    place = qkv + row * (H + 2 * G) * D + head * D
    own = tl.load(place + d, there, 0).to(tl.float32)
    across = (d + D // 2) % D  # the other number of its pair
    other = tl.load(place + across, there, 0).to(tl.float32)
    turned = head < H + G
    if NORMED:
        scale = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
        for_q = tl.load(q_norm + d, d < D, 0).to(tl.float32)
        for_k = tl.load(k_norm + d, d < D, 0).to(tl.float32)
        q_other = tl.load(q_norm + across, d < D, 0).to(tl.float32)
        k_other = tl.load(k_norm + across, d < D, 0).to(tl.float32)
        own = tl.where(turned, own * scale * tl.where(head < H, for_q, for_k), own)
        other = other * scale * tl.where(head < H, q_other, k_other)
    position = tl.load(positions + row)
    c = tl.load(cos + position * D + d, d < D, 0).to(tl.float32)
    s = tl.load(sin + position * D + d, d < D, 0).to(tl.float32)
    out = tl.where(turned, own * c + other * s, own)
    slot = tl.load(slots + row) * G * D
    tl.store(queries + (row * H + head) * D + d, out, there & (head < H))
    tl.store(keys + slot + (head - H) * D + d, out, there & (head >= H) & turned)
    tl.store(values + slot + (head - H - G) * D + d, out, there & (head >= H + G))


def rotate_and_keep(
    layer: int,
    qkv_TN: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    cos_CD: Tensor,
    sin_CD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    slots: Slots,
    eps: float,
) -> Tensor:
    """Norm (where there is one) and turn queries and keys, keep keys and values in their slots: the queries, [T, H, D]."""
    keys, values = slots.flat(layer)
    _, groups, dim = keys.shape
    heads = qkv_TN.shape[1] // dim - 2 * groups
    q_norm, k_norm = norms or (cos_CD, cos_CD)
    q_THD = qkv_TN.new_empty(len(qkv_TN), heads, dim)
    at_once = 4
    _rotate[(len(qkv_TN), triton.cdiv(heads + 2 * groups, at_once))](
        qkv_TN, q_norm, k_norm, cos_CD, sin_CD, positions_T, slots_T, q_THD, keys, values, eps,
        H=heads, G=groups, D=dim, NORMED=norms is not None, AT_ONCE=at_once, DIM=_power(dim), **early(q_THD, len(qkv_TN)),
    )  # fmt: skip
    return q_THD


@triton.jit(do_not_specialize=["rows", "count"], do_not_specialize_on_alignment=["spans", "tiles"])
def _attention(
    q, keys, values, lane_stride, slot_stride, spans, rows, tiles, count, out, shares, weights, scale,
    G: tl.constexpr, FOLD: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    HEIGHT: tl.constexpr, SLOTS: tl.constexpr, WHEN: tl.constexpr,
):  # fmt: skip
    """One tile of rows, the heads of one key head, one share of the slots that the tile looks at."""
    _wait(WHEN)
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, size = tl.load(tiles + tile), tl.load(tiles + count + tile)
    lane, near = tl.load(tiles + 2 * count + tile), tl.load(tiles + 3 * count + tile)
    lo, far = tl.load(tiles + 4 * count + tile), tl.load(tiles + 5 * count + tile)
    if size > 0:  # else the tile is padding
        looked_at = near + far - lo
        share = tl.cdiv(tl.cdiv(looked_at, SLOTS), SPLITS) * SLOTS
        begin = split * share
        end = tl.minimum(begin + share, looked_at)
        m = tl.arange(0, HEIGHT)
        row, head, there = first + m // FOLD, group * FOLD + m % FOLD, m < size * FOLD
        d = tl.arange(0, DIM)
        query = tl.load(q + (row[:, None] * G * FOLD + head[:, None]) * D + d[None, :], there[:, None] & (d[None, :] < D), 0)
        horizon = tl.load(spans + row, there, 0)[:, None]
        own_lo = tl.load(spans + rows + row, there, 0)[:, None]
        own_hi = tl.load(spans + 2 * rows + row, there, 0)[:, None]
        top = tl.full([HEIGHT], float("-inf"), tl.float32)
        mass = tl.zeros([HEIGHT], tl.float32)
        seen = tl.zeros([HEIGHT, DIM], tl.float32)
        for at in range(begin, end, SLOTS):
            index = at + tl.arange(0, SLOTS)
            slot = tl.where(index < near, index, index - near + lo)
            place = lane * lane_stride + slot * slot_stride + group * D
            key = tl.load(keys + place[None, :] + d[:, None], (index < end)[None, :] & (d[:, None] < D), 0)
            scores = tl.dot(query, key, input_precision="ieee") * scale
            visible = (slot[None, :] < horizon) | ((slot[None, :] >= own_lo) & (slot[None, :] < own_hi))
            scores = tl.where(visible & (index < end)[None, :], scores, float("-inf"))
            highest = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen nothing yet
            law = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
            value = tl.load(values + place[:, None] + d[None, :], (index < end)[:, None] & (d[None, :] < D), 0)
            mass = mass * shrink + tl.sum(law, 1)
            seen = seen * shrink[:, None] + tl.dot(law.to(value.dtype), value, input_precision="ieee")
            top = highest
        seen = seen / tl.where(mass == 0, 1.0, mass)[:, None]
        inside = there[:, None] & (d[None, :] < D)
        if SPLITS == 1:
            tl.store(out + (row[:, None] * G * FOLD + head[:, None]) * D + d[None, :], seen, inside)
        else:
            entry = (row * G * FOLD + head) * SPLITS + split
            tl.store(shares + entry[:, None] * D + d[None, :], seen, inside)
            tl.store(weights + entry, top + tl.log2(mass), there)


@triton.jit
def _join(shares, weights, out, D: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, WHEN: tl.constexpr):
    """Put the shares of one row's head together."""
    _wait(WHEN)
    entry = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, SPLITS), tl.arange(0, DIM)
    weight = tl.load(weights + entry * SPLITS + split)
    weight = tl.exp2(weight - tl.max(weight, 0))
    share = tl.load(shares + (entry * SPLITS + split[:, None]) * D + d[None, :], d[None, :] < D, 0)
    tl.store(out + entry * D + d, tl.sum(share * (weight / tl.sum(weight, 0))[:, None], 0), d < D)


def attention(layer: int, q_THD: Tensor, tiles: Tiles, slots: Slots, scale: float) -> Tensor:
    """What rows see in their slots, [T, H * D]."""
    keys, values = slots.keys[layer], slots.values[layer]
    groups, dim = keys.shape[2:]
    rows, heads, _ = q_THD.shape
    out_TE = q_THD.new_empty(rows, heads * dim)
    shares = weights = out_TE
    if tiles.splits > 1:
        shares = torch.empty(rows, heads, tiles.splits, dim, dtype=torch.float32, device=q_THD.device)
        weights = torch.empty(rows, heads, tiles.splits, dtype=torch.float32, device=q_THD.device)
    height = max(16, _power(tiles.height * heads // groups))
    count = tiles.numbers.shape[1]
    _attention[(count, groups, tiles.splits)](
        q_THD, keys, values, keys.stride(0), keys.stride(1), tiles.spans, rows, tiles.numbers, count,
        out_TE, shares, weights, scale * LOG2_E,
        G=groups, FOLD=heads // groups, D=dim, DIM=max(16, _power(dim)), SPLITS=tiles.splits, HEIGHT=height, SLOTS=SLOTS,
        num_warps=4 if height <= 64 else 8, num_stages=3 if height <= 64 else 2, **early(out_TE, rows),
    )  # fmt: skip
    if tiles.splits > 1:
        _join[(rows * heads,)](
            shares, weights, out_TE, D=dim, DIM=_power(dim), SPLITS=tiles.splits, num_warps=2, **early(out_TE, rows)
        )
    return out_TE


@triton.jit(do_not_specialize=["rows"])
def _thin(
    x, weight, bias, out, rows, N, K,
    BIASED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, TURNED: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHEN: tl.constexpr,
):  # fmt: skip
    """A few rows times a matrix [N, K] (GATED: [2N, K]), every part of which is read by one program, once. TURNED computes the
    product the other way round, with the matrix on the side of which matrix units take more at a time."""
    _wait(WHEN)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m, k = tl.arange(0, ROWS), tl.arange(0, BK)
    there = (m < rows)[:, None]
    total = tl.zeros([BN, ROWS] if TURNED else [ROWS, BN], tl.float32)
    total_up = tl.zeros([BN, ROWS] if TURNED else [ROWS, BN], tl.float32)
    inside = (n < N)[:, None]
    for at in range(0, K, BK):
        left = at + k < K
        piece = tl.load(x + m[:, None] * K + at + k[None, :], there & left[None, :], 0)
        matrix = tl.load(weight + n[:, None].to(tl.int64) * K + at + k[None, :], inside & left[None, :], 0)
        total = _plus_product(total, piece, matrix, TURNED)
        if GATED:
            matrix = tl.load(weight + (n + N)[:, None].to(tl.int64) * K + at + k[None, :], inside & left[None, :], 0)
            total_up = _plus_product(total_up, piece, matrix, TURNED)
    if TURNED:
        total, total_up = tl.trans(total), tl.trans(total_up)
    if BIASED:
        total += tl.load(bias + n, n < N, 0).to(tl.float32)[None, :]
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    place, kept = out + m[:, None] * N + n[None, :], there & (n < N)[None, :]
    if ADDED:
        total += tl.load(place, kept, 0).to(tl.float32)
    tl.store(place, total, kept)


@triton.jit
def _plus_product(total, piece, matrix, TURNED: tl.constexpr):
    if TURNED:
        total = tl.dot(matrix, tl.trans(piece), total, input_precision="ieee")
    else:
        total = tl.dot(piece, tl.trans(matrix), total, input_precision="ieee")
    return total


@dataclass(frozen=True)
class Blocks:
    """How `_thin` goes over a matrix."""

    outputs: int
    inputs: int
    stages: int
    turned: bool


# Products that we do faster than the library on an H200, and for up to how many rows (`bench/gpu_kernels.py --tune`).
THIN = {
    "gated": {16: Blocks(32, 128, 4, False), 32: Blocks(64, 64, 3, True), 64: Blocks(64, 64, 3, False)},
    "square": {16: Blocks(64, 256, 4, True)},
    "wide": {16: Blocks(64, 128, 4, True)},
}
WIDE = 65536  # outputs


def blocks_for(rows: int, outputs: int, inputs: int, gated: bool, onto: bool) -> Blocks | None:
    """How to do a product ourselves; None where the library is faster."""
    square = onto and inputs <= 2 * outputs
    kind = "gated" if gated else "wide" if outputs > WIDE else "square" if square else ""
    return next((blocks for most, blocks in THIN.get(kind, {}).items() if rows <= most), None)


def product(
    x_TK: Tensor,
    weight_KN: Tensor,
    bias_N: Tensor | None = None,
    *,
    normed: tuple[Tensor, float] | None = None,
    gated: bool = False,
    onto: Tensor | None = None,
) -> Tensor:
    """norm(x) @ weight + bias. `normed` is the norm's weight and epsilon; `gated` makes a SwiGLU of an output that is [gate, up];
    `onto` is what the result is added to, in place."""
    if normed is not None:
        x_TK = norm(x_TK, *normed)
    inputs, outputs = weight_KN.shape
    blocks = blocks_for(len(x_TK), outputs, inputs, gated, onto is not None)
    half = x_TK.dtype in (torch.bfloat16, torch.float16)
    if blocks is not None and half and weight_KN.stride(0) == 1 and not (gated and bias_N is not None):
        return thin(x_TK, weight_KN.t(), blocks, bias_N, gated=gated, onto=onto)
    if onto is not None:
        onto = onto.addmm_(x_TK, weight_KN)
        return onto if bias_N is None else onto.add_(bias_N)
    out = x_TK @ weight_KN if bias_N is None else torch.addmm(bias_N, x_TK, weight_KN)
    return swiglu(out) if gated else out


def thin(
    x_TK: Tensor,
    weight_NK: Tensor,
    blocks: Blocks,
    bias_N: Tensor | None = None,
    *,
    gated: bool = False,
    onto: Tensor | None = None,
) -> Tensor:
    """A product of few rows in one launch, with the matrix as [N, K]."""
    rows, size = x_TK.shape
    outputs = len(weight_NK) // 2 if gated else len(weight_NK)
    out = x_TK.new_empty(rows, outputs) if onto is None else onto
    _thin[(triton.cdiv(outputs, blocks.outputs),)](
        x_TK, weight_NK, x_TK if bias_N is None else bias_N, out, rows, outputs, size,
        BIASED=bias_N is not None, GATED=gated, ADDED=onto is not None, TURNED=blocks.turned,
        ROWS=max(16, _power(rows)), BN=blocks.outputs, BK=blocks.inputs, num_warps=4, num_stages=blocks.stages, **early(out, rows),
    )  # fmt: skip
    return out


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
