"""Norms, gates and rotations, one launch each.

T rows, H heads, G key heads, D head size, E hidden size, I inner size, C context.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.backbones.kernels.launch import launch_options, power_of_two, wait_for_last
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch


class RMSNorm(NamedTuple):
    """A norm by the root of the mean square: its weight and what keeps it from dividing by zero."""

    weight_E: Tensor
    eps: float


@dataclass(frozen=True)
class Rotary:
    """Rotations of queries and keys by position, and the norms before them, where there are any."""

    cos_CD: Tensor
    sin_CD: Tensor  # its first half negated
    eps: float
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None


class Given(NamedTuple):
    """Rows that are not normed but given, where a token is no less than `first`."""

    rows_TE: Tensor
    tokens_T: Tensor
    first: int


@triton.jit
def _norm(
    x, weight, out, given, tokens, size, eps, first,
    GIVEN: tl.constexpr, SIZE: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """out = x / rms(x) * weight, one row per program."""
    wait_for_last(LAUNCH)
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, SIZE)
    inside = at < size
    numbers = tl.load(x + row + at, inside, 0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / size + eps)
    normed = numbers * scale * tl.load(weight + at, inside, 0).to(tl.float32)
    if GIVEN:
        is_given = tl.load(tokens + tl.program_id(0)) >= first
        own = tl.load(given + row + at, inside & is_given, 0).to(tl.float32)
        normed = tl.where(is_given, own, normed)
    tl.store(out + row + at, normed, inside)


def norm(x_TE: Tensor, weight_E: Tensor, eps: float, given: Given | None = None) -> Tensor:
    """x / rms(x) * weight, but for rows that are given."""
    out_TE = torch.empty_like(x_TE)
    size = x_TE.shape[-1]
    rows = x_TE.numel() // size
    _norm[(rows,)](
        x_TE,
        weight_E,
        out_TE,
        out_TE if given is None else given.rows_TE,
        out_TE if given is None else given.tokens_T,
        size,
        eps,
        0 if given is None else given.first,
        GIVEN=given is not None,
        SIZE=power_of_two(size),
        num_warps=8 if size > 1024 else 4,
        **launch_options(x_TE, rows),
    )
    return out_TE


@triton.jit
def _swiglu(gate_up, out, size, BLOCK: tl.constexpr, LAUNCH: tl.constexpr):
    wait_for_last(LAUNCH)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, inside, 0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, inside, 0).to(tl.float32)
    tl.store(out + row * size + at, gate * tl.sigmoid(gate) * up, inside)


def swiglu(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) * up of [gate, up]."""
    rows, both = gate_up_T2I.shape
    out_TI = gate_up_T2I.new_empty(rows, both // 2)
    _swiglu[(rows, triton.cdiv(both // 2, 1024))](
        gate_up_T2I, out_TI, both // 2, BLOCK=1024, **launch_options(out_TI, rows)
    )
    return out_TI


@triton.jit
def _add_parts(
    parts, bias, out, size, width, PARTS: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
    BLOCK: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    wait_for_last(LAUNCH)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts + at, inside, 0)
    for i in tl.static_range(1, PARTS):
        total += tl.load(parts + i * size + at, inside, 0)
    if BIASED:
        total += tl.load(bias + at % width, inside, 0).to(tl.float32)
    if ADDED:
        total += tl.load(out + at, inside, 0).to(tl.float32)
    tl.store(out + at, total, inside)


def add_parts(parts_PTN: Tensor, bias_N: Tensor | None, out_TN: Tensor, added: bool) -> Tensor:
    """The sum of some parts in their order, a bias, and (`added`) what is there already; written to
    `out`."""
    size = out_TN.numel()
    _add_parts[(triton.cdiv(size, 1024),)](
        parts_PTN,
        out_TN if bias_N is None else bias_N,
        out_TN,
        size,
        out_TN.shape[1],
        PARTS=len(parts_PTN),
        BIASED=bias_N is not None,
        ADDED=added,
        BLOCK=1024,
        **launch_options(out_TN, len(out_TN)),
    )
    return out_TN


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rotate(
    qkv, q_norm, k_norm, cos, sin, positions, slots, queries, keys, values, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr, DIM: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys; write keys and values to their slots."""
    wait_for_last(LAUNCH)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)[:, None]
    d = tl.arange(0, DIM)[None, :]
    inside = (head < H + 2 * G) & (d < D)
    place = qkv + row * (H + 2 * G) * D + head * D
    x = tl.load(place + d, inside, 0).to(tl.float32)
    across = (d + D // 2) % D  # the other number of its pair
    partner = tl.load(place + across, inside, 0).to(tl.float32)
    rotated = head < H + G
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        for_q = tl.load(q_norm + d, d < D, 0).to(tl.float32)
        for_k = tl.load(k_norm + d, d < D, 0).to(tl.float32)
        q_partner = tl.load(q_norm + across, d < D, 0).to(tl.float32)
        k_partner = tl.load(k_norm + across, d < D, 0).to(tl.float32)
        x = tl.where(rotated, x * scale * tl.where(head < H, for_q, for_k), x)
        partner = partner * scale * tl.where(head < H, q_partner, k_partner)
    position = tl.load(positions + row)
    c = tl.load(cos + position * D + d, d < D, 0).to(tl.float32)
    s = tl.load(sin + position * D + d, d < D, 0).to(tl.float32)
    out = tl.where(rotated, x * c + partner * s, x)
    slot = tl.load(slots + row) * G * D
    tl.store(queries + (row * H + head) * D + d, out, inside & (head < H))
    tl.store(keys + slot + (head - H) * D + d, out, inside & (head >= H) & rotated)
    tl.store(values + slot + (head - H - G) * D + d, out, inside & (head >= H + G))


def rotate_and_keep(
    layer: int, qkv_TN: Tensor, rotary: Rotary, batch: Batch, slots: Slots
) -> Tensor:
    """Norm (where there is a norm) and rotate queries and keys; write keys and values to their
    slots. The queries come back, [T, H, D]."""
    keys, values = slots.flat(layer)
    _, groups, dim = keys.shape
    rows = len(qkv_TN)
    heads = qkv_TN.shape[1] // dim - 2 * groups
    normed = rotary.q_norm_D is not None and rotary.k_norm_D is not None
    q_THD = qkv_TN.new_empty(rows, heads, dim)
    at_once = 4
    _rotate[(rows, triton.cdiv(heads + 2 * groups, at_once))](
        qkv_TN,
        rotary.q_norm_D if normed else rotary.cos_CD,
        rotary.k_norm_D if normed else rotary.cos_CD,
        rotary.cos_CD,
        rotary.sin_CD,
        batch.positions_T,
        batch.slots_T,
        q_THD,
        keys,
        values,
        rotary.eps,
        H=heads,
        G=groups,
        D=dim,
        NORMED=normed,
        HEADS_AT_ONCE=at_once,
        DIM=power_of_two(dim),
        **launch_options(q_THD, rows),
    )
    return q_THD
