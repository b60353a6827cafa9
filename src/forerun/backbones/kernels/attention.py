"""Attention over slots in tiles, straight from the five integers of a row.

A tile is up to `height` neighbouring rows of one sequence, with all query heads of one key head
folded in, so keys are read once per tile and never copied. A tile looks at slots [0, near) and
[lo, far); nothing else is loaded, and no mask is ever stored. What a tile looks at is cut into
`splits` shares that run side by side, so that one row over a long text fills the device too.

T rows, H heads, G key heads (H/G query heads each), D head size, N tiles.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.backbones.kernels.launch import launch_options, power_of_two, wait_for_last
from forerun.engine.cache import Slots
from forerun.engine.pack import Tiles

SLOTS = 64  # slots that attention takes at a time
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["rows", "count"], do_not_specialize_on_alignment=["spans", "tiles"])
def _attention(
    q, keys, values, lane_stride, slot_stride, spans, rows, tiles, count,
    out, shares, weights, scale,
    G: tl.constexpr, FOLD: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    HEIGHT: tl.constexpr, SLOTS: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """One tile of rows, the heads of one key head, one share of the slots that the tile sees."""
    wait_for_last(LAUNCH)
    tile = tl.program_id(0)
    group = tl.program_id(1)
    split = tl.program_id(2)
    first, size, lane, near, lo, far = _load_bounds(tiles, count, tile)
    if size > 0:  # else the tile is padding
        begin, end = _share(near + far - lo, split, SPLITS, SLOTS)
        m = tl.arange(0, HEIGHT)
        row = first + m // FOLD
        head = group * FOLD + m % FOLD
        row_inside = m < size * FOLD
        d = tl.arange(0, DIM)
        query_at = q + (row[:, None] * G * FOLD + head[:, None]) * D + d[None, :]
        query = tl.load(query_at, row_inside[:, None] & (d[None, :] < D), 0)
        horizon, row_lo, row_hi = _load_spans(spans, rows, row, row_inside)
        top = tl.full([HEIGHT], float("-inf"), tl.float32)
        mass = tl.zeros([HEIGHT], tl.float32)
        seen = tl.zeros([HEIGHT, DIM], tl.float32)
        for at in range(begin, end, SLOTS):
            index = at + tl.arange(0, SLOTS)
            slot = tl.where(index < near, index, index - near + lo)
            at_slot = lane * lane_stride + slot * slot_stride + group * D
            key_at = keys + at_slot[None, :] + d[:, None]
            held = index < end
            key = tl.load(key_at, held[None, :] & (d[:, None] < D), 0)
            scores = tl.dot(query, key, input_precision="ieee") * scale
            visible = _sees(slot[None, :], horizon, row_lo, row_hi) & held[None, :]
            scores = tl.where(visible, scores, float("-inf"))
            highest, law, shrink = _softmax_step(scores, top)
            value_at = values + at_slot[:, None] + d[None, :]
            value = tl.load(value_at, held[:, None] & (d[None, :] < D), 0)
            mass = mass * shrink + tl.sum(law, 1)
            kept = seen * shrink[:, None]
            seen = kept + tl.dot(law.to(value.dtype), value, input_precision="ieee")
            top = highest
        seen = seen / tl.where(mass == 0, 1.0, mass)[:, None]
        inside = row_inside[:, None] & (d[None, :] < D)
        if SPLITS == 1:
            tl.store(out + (row[:, None] * G * FOLD + head[:, None]) * D + d[None, :], seen, inside)
        else:
            entry = (row * G * FOLD + head) * SPLITS + split
            tl.store(shares + entry[:, None] * D + d[None, :], seen, inside)
            tl.store(weights + entry, top + tl.log2(mass), row_inside)


@triton.jit
def _load_bounds(tiles, count, tile):
    """First row, rows, lane, near, lo and far of a tile."""
    first = tl.load(tiles + tile)
    size = tl.load(tiles + count + tile)
    lane = tl.load(tiles + 2 * count + tile)
    near = tl.load(tiles + 3 * count + tile)
    lo = tl.load(tiles + 4 * count + tile)
    far = tl.load(tiles + 5 * count + tile)
    return first, size, lane, near, lo, far


@triton.jit
def _load_spans(spans, rows, row, inside):
    """Horizon, lo and hi of each row, [rows, 1]."""
    horizon = tl.load(spans + row, inside, 0)[:, None]
    lo = tl.load(spans + rows + row, inside, 0)[:, None]
    hi = tl.load(spans + 2 * rows + row, inside, 0)[:, None]
    return horizon, lo, hi


@triton.jit
def _share(looked_at, split, SPLITS: tl.constexpr, SLOTS: tl.constexpr):
    """Where the share of one split begins and ends, among the slots that a tile looks at."""
    share = tl.cdiv(tl.cdiv(looked_at, SLOTS), SPLITS) * SLOTS
    begin = split * share
    return begin, tl.minimum(begin + share, looked_at)


@triton.jit
def _sees(slot, horizon, lo, hi):
    return (slot < horizon) | ((slot >= lo) & (slot < hi))


@triton.jit
def _softmax_step(scores, top):
    """The highest score so far, the weights by it, and what earlier weights are multiplied by."""
    highest = tl.maximum(top, tl.max(scores, 1))
    # a row that has seen nothing yet
    base = tl.where(highest == float("-inf"), 0.0, highest)
    law = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    return highest, law, shrink


@triton.jit
def _join(
    shares, weights, out,
    D: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Put the shares of one row's head together."""
    wait_for_last(LAUNCH)
    entry = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM)
    weight = tl.load(weights + entry * SPLITS + split)
    weight = tl.exp2(weight - tl.max(weight, 0))
    share = tl.load(shares + (entry * SPLITS + split[:, None]) * D + d[None, :], d[None, :] < D, 0)
    tl.store(out + entry * D + d, tl.sum(share * (weight / tl.sum(weight, 0))[:, None], 0), d < D)


def attention(
    layer: int, q_THD: Tensor, tiles: Tiles[Tensor], slots: Slots, scale: float
) -> Tensor:
    """What rows see in their slots, [T, H * D]."""
    keys = slots.keys[layer]
    values = slots.values[layer]
    groups, dim = keys.shape[2:]
    rows, heads, _ = q_THD.shape
    splits = tiles.splits
    out_TE = q_THD.new_empty(rows, heads * dim)
    shares = out_TE
    weights = out_TE
    if splits > 1:
        shares = q_THD.new_empty(rows, heads, splits, dim, dtype=torch.float32)
        weights = q_THD.new_empty(rows, heads, splits, dtype=torch.float32)
    height = max(16, power_of_two(tiles.height * heads // groups))
    launch = launch_options(out_TE, rows)
    _attention[(tiles.count, groups, splits)](
        q_THD,
        keys,
        values,
        keys.stride(0),
        keys.stride(1),
        tiles.spans_3T,
        rows,
        tiles.bounds_6N,
        tiles.count,
        out_TE,
        shares,
        weights,
        scale * LOG2_E,
        G=groups,
        FOLD=heads // groups,
        D=dim,
        DIM=max(16, power_of_two(dim)),
        SPLITS=splits,
        HEIGHT=height,
        SLOTS=SLOTS,
        num_warps=4 if height <= 64 else 8,
        num_stages=3 if height <= 64 else 2,
        **launch,
    )
    if splits > 1:
        _join[(rows * heads,)](
            shares, weights, out_TE,
            D=dim, DIM=power_of_two(dim), SPLITS=splits, num_warps=2, **launch,
        )  # fmt: skip
    return out_TE
