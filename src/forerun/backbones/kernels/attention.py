"""Attention over slots in tiles, straight from the five integers of a row.

A tile is up to `height` neighbouring rows of one sequence, with all query heads of one key head
folded in, so keys are read once per tile and never copied. A tile looks at slots [0, near) and
[lo, far); nothing else is loaded, and no mask is ever stored.

What a row sees comes out in the same bits whatever runs beside it. The slots that a tile looks at
are numbered, and all its rows have the same numbers for what they see (`pack.make_tiles`). They
are cut into shares of SLOTS slots, at the same numbers for everybody. The shares of a section are
folded together one after the other, then the sections. Whether one program goes through all of
them, or each section or each share has a program of its own, the arithmetic is the same. What a
row does not see adds nothing, exactly.

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
from forerun.engine.pack import AT_ONCE, SECTION, SLOTS, Tiles

PROGRAMS = 264  # twice the processors of a large GPU
LOG2_E = 1.4426950408889634


@triton.jit(
    do_not_specialize=["rows", "count", "splits"],
    do_not_specialize_on_alignment=["spans", "tiles"],
)
def _attention(
    q, keys, values, table, per_lane, slot_stride, spans, rows, tiles, count, splits,
    out, shares, tops, masses, scale,
    G: tl.constexpr, FOLD: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr,
    HEIGHT: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr, AT_ONCE: tl.constexpr,
    SECTION: tl.constexpr, BY_SECTION: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """One tile of rows, the heads of one key head; SPLIT: some shares of the slots that it sees;
    BY_SECTION: one section of them."""
    wait_for_last(LAUNCH)
    tile = tl.program_id(0)
    group = tl.program_id(1)
    first, size, lane, near, lo, far = _load_bounds(tiles, count, tile)
    if size > 0:  # else the tile is padding
        end = near + far - lo
        m = tl.arange(0, HEIGHT)
        row = first + m // FOLD
        head = group * FOLD + m % FOLD
        row_inside = m < size * FOLD
        d = tl.arange(0, DIM)
        query_at = q + (row[:, None] * G * FOLD + head[:, None]) * D + d[None, :]
        query = tl.load(query_at, row_inside[:, None] & (d[None, :] < D), 0)
        horizon, row_lo, row_hi = _load_spans(spans, rows, row, row_inside)
        pages = table + lane * per_lane
        inside = row_inside[:, None] & (d[None, :] < D)
        if SPLIT:
            begin = tl.program_id(2) * SPLIT * SLOTS
            near_pages = _near_pages(pages, begin, near, PAGE)
            far_pages = _far_pages(pages, begin, end, near, lo, PAGE)
            for i in range(SPLIT):  # those past the end are empty
                top, mass, seen = _see_share(
                    query, keys + group * D, values + group * D, near_pages, far_pages,
                    slot_stride, horizon, row_lo, row_hi, near, lo, begin, begin + i * SLOTS, end,
                    scale, D, DIM, SLOTS, PAGE,
                )  # fmt: skip
                entry = (row * G * FOLD + head) * splits + tl.program_id(2) * SPLIT + i
                tl.store(shares + entry[:, None] * D + d[None, :], seen, inside)
                tl.store(tops + entry, top, row_inside)
                tl.store(masses + entry, mass, row_inside)
        elif BY_SECTION:
            piece = tl.program_id(2)
            start = piece * SECTION * SLOTS
            entry = (row * G * FOLD + head) * splits + piece
            if start < end:
                best, total, folded = _see_section(
                    query, keys + group * D, values + group * D, pages, slot_stride,
                    horizon, row_lo, row_hi, near, lo, start, end, scale,
                    D, DIM, HEIGHT, SLOTS, PAGE, AT_ONCE, SECTION,
                )  # fmt: skip
                tl.store(shares + entry[:, None] * D + d[None, :], folded, inside)
                tl.store(tops + entry, best, row_inside)
                tl.store(masses + entry, total, row_inside)
            else:  # nothing to see, and nothing is read but this
                tl.store(tops + entry, tl.full([HEIGHT], float("-inf"), tl.float32), row_inside)
                tl.store(masses + entry, tl.zeros([HEIGHT], tl.float32), row_inside)
        else:
            highest = tl.full([HEIGHT], float("-inf"), tl.float32)
            whole = tl.zeros([HEIGHT], tl.float32)
            joined = tl.zeros([HEIGHT, DIM], tl.float32)
            for start in range(0, end, SECTION * SLOTS):
                best, total, folded = _see_section(
                    query, keys + group * D, values + group * D, pages, slot_stride,
                    horizon, row_lo, row_hi, near, lo, start, end, scale,
                    D, DIM, HEIGHT, SLOTS, PAGE, AT_ONCE, SECTION,
                )  # fmt: skip
                highest, whole, joined = _fold(highest, whole, joined, best, total, folded)
            place = out + (row[:, None] * G * FOLD + head[:, None]) * D + d[None, :]
            tl.store(place, joined / tl.where(whole == 0, 1.0, whole)[:, None], inside)


@triton.jit
def _see_section(
    query, keys, values, pages, slot_stride, horizon, row_lo, row_hi, near, lo, start, end, scale,
    D: tl.constexpr, DIM: tl.constexpr, HEIGHT: tl.constexpr, SLOTS: tl.constexpr,
    PAGE: tl.constexpr, AT_ONCE: tl.constexpr, SECTION: tl.constexpr,
):  # fmt: skip
    """The shares of one section, folded together."""
    best = tl.full([HEIGHT], float("-inf"), tl.float32)
    total = tl.zeros([HEIGHT], tl.float32)
    folded = tl.zeros([HEIGHT, DIM], tl.float32)
    stop = tl.minimum(start + SECTION * SLOTS, end)
    for begin in range(start, stop, AT_ONCE * SLOTS):
        near_pages = _near_pages(pages, begin, near, PAGE)
        far_pages = _far_pages(pages, begin, end, near, lo, PAGE)
        for at in range(begin, tl.minimum(begin + AT_ONCE * SLOTS, stop), SLOTS):
            top, mass, seen = _see_share(
                query, keys, values, near_pages, far_pages,
                slot_stride, horizon, row_lo, row_hi, near, lo, begin, at, end,
                scale, D, DIM, SLOTS, PAGE,
            )  # fmt: skip
            best, total, folded = _fold(best, total, folded, top, mass, seen)
    return best, total, folded


@triton.jit
def _see_share(
    query, keys, values, near_pages, far_pages, slot_stride, horizon, row_lo, row_hi, near, lo,
    begin, at, end, scale,
    D: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One share: the highest score, the mass of the weights by it, and the values so weighted.
    `begin` is where the first page lies that was looked up."""
    d = tl.arange(0, DIM)
    near_0, near_1, near_2, near_3 = near_pages
    far, far_0, far_1, far_2, far_3, far_4 = far_pages
    index = at + tl.arange(0, SLOTS)
    slot = tl.where(index < near, index, index - near + lo)
    nth = at // PAGE - begin // PAGE
    near_page = tl.where(nth < 2, tl.where(nth == 0, near_0, near_1), near_2)
    near_page = tl.where(nth == 3, near_3, near_page)
    nth_far = slot // PAGE - far
    far_page = tl.where(nth_far < 2, tl.where(nth_far == 0, far_0, far_1), far_2)
    far_page = tl.where(nth_far < 3, far_page, tl.where(nth_far == 3, far_3, far_4))
    at_slot = (tl.where(index < near, near_page, far_page) + slot % PAGE) * slot_stride
    held = index < end
    key = tl.load(keys + at_slot[None, :] + d[:, None], held[None, :] & (d[:, None] < D), 0)
    value = tl.load(values + at_slot[:, None] + d[None, :], held[:, None] & (d[None, :] < D), 0)
    scores = tl.dot(query, key, input_precision="ieee") * scale
    visible = _sees(slot[None, :], horizon, row_lo, row_hi) & held[None, :]
    scores = tl.where(visible, scores, float("-inf"))
    top = tl.max(scores, 1)
    base = tl.where(top == float("-inf"), 0.0, top)  # a row that sees nothing of the share
    law = tl.exp2(scores - base[:, None]).to(value.dtype)
    # Added up by the matrix unit too: another sum would go by how a tile is laid out.
    ones = tl.full([SLOTS, 16], 1.0, value.dtype)
    mass = tl.max(tl.dot(law, ones, input_precision="ieee"), 1)
    seen = tl.dot(law, value, input_precision="ieee")
    return top, mass, seen


@triton.jit
def _near_pages(pages, begin, near, PAGE: tl.constexpr):
    """Where the pages of four shares begin, as far as they lie before `near`. All look-ups come
    before a loop over shares: one inside would cost a stage of the loads that run ahead."""
    at = pages + begin // PAGE
    first = tl.load(at, begin < near, 0)
    second = tl.load(at + 1, begin + PAGE < near, 0)
    third = tl.load(at + 2, begin + 2 * PAGE < near, 0)
    fourth = tl.load(at + 3, begin + 3 * PAGE < near, 0)
    return first, second, third, fourth


@triton.jit
def _far_pages(pages, begin, end, near, lo, PAGE: tl.constexpr):
    """The number of the first page of four shares from `lo` on, and where it and the next ones
    begin."""
    end = tl.minimum(end, begin + 4 * PAGE)
    number = (tl.maximum(begin, near) - near + lo) // PAGE
    last = (end - 1 - near + lo) // PAGE
    last = tl.where(end > near, last, -1)
    at = pages + number
    first = tl.load(at, number <= last, 0)
    second = tl.load(at + 1, number + 1 <= last, 0)
    third = tl.load(at + 2, number + 2 <= last, 0)
    fourth = tl.load(at + 3, number + 3 <= last, 0)
    fifth = tl.load(at + 4, number + 4 <= last, 0)
    return number, first, second, third, fourth, fifth


@triton.jit
def _fold(best, total, folded, top, mass, seen):
    """Add one share to those before it. The products are added in one way only, whatever the
    compiler makes of the code around."""
    highest = tl.maximum(best, top)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing is seen so far
    before = tl.exp2(best - base)
    now = tl.exp2(top - base)
    total = tl.math.fma(total, before, mass * now)
    wide = seen * tl.broadcast_to(now[:, None], seen.shape)
    folded = tl.math.fma(folded, tl.broadcast_to(before[:, None], seen.shape), wide)
    return highest, total, folded


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
def _sees(slot, horizon, lo, hi):
    return (slot < horizon) | ((slot >= lo) & (slot < hi))


@triton.jit
def _join(
    shares, tops, masses, out,
    D: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, SECTION: tl.constexpr,
    RAGGED: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Fold the pieces of one row's head together, as one program would have: SECTION of them at a
    time. RAGGED: values of those without mass were not stored."""
    wait_for_last(LAUNCH)
    entry = tl.program_id(0).to(tl.int64)[None] * SPLITS
    d = tl.arange(0, DIM)[None, :]
    highest = tl.full([1], float("-inf"), tl.float32)
    whole = tl.zeros([1], tl.float32)
    joined = tl.zeros([1, DIM], tl.float32)
    for start in tl.static_range(0, SPLITS, SECTION):
        best = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        folded = tl.zeros([1, DIM], tl.float32)
        for split in tl.range(start, min(start + SECTION, SPLITS), loop_unroll_factor=4):
            top = tl.load(tops + entry + split)
            mass = tl.load(masses + entry + split)
            stored = d < D
            if RAGGED:
                stored = stored & (top > float("-inf"))[:, None]
            seen = tl.load(shares + (entry + split)[:, None] * D + d, stored, 0)
            best, total, folded = _fold(best, total, folded, top, mass, seen)
        highest, whole, joined = _fold(highest, whole, joined, best, total, folded)
    place = out + tl.program_id(0).to(tl.int64) * D + d
    tl.store(place, joined / tl.where(whole == 0, 1.0, whole)[:, None], d < D)


def attention(
    layer: int, q_THD: Tensor, tiles: Tiles[Tensor], slots: Slots, scale: float
) -> Tensor:
    """What rows see in their slots, [T, H * D]."""
    keys, values = slots.flat(layer)
    table = slots.table
    assert table.size % SLOTS == 0, "a share has one page"
    groups, dim = keys.shape[1:]
    rows, heads, _ = q_THD.shape
    splits = tiles.splits
    out_TE = q_THD.new_empty(rows, heads * dim)
    shares = tops = masses = out_TE
    if splits > 1:
        shares = q_THD.new_empty(rows, heads, splits, dim, dtype=torch.float32)
        tops, masses = q_THD.new_empty(2, rows, heads, splits, dtype=torch.float32)
    height = max(16, power_of_two(tiles.height * heads // groups))
    launch = launch_options(out_TE, rows)
    # One share per program, as long as the device runs all of them at a time.
    few = tiles.by_section or tiles.count * groups * splits <= PROGRAMS
    each = 1 if few else AT_ONCE
    _attention[(tiles.count, groups, splits // each if splits > 1 else 1)](
        q_THD,
        keys,
        values,
        table.on_device,
        table.per_lane,
        keys.stride(0),
        tiles.spans_3T,
        rows,
        tiles.bounds_6N,
        tiles.count,
        splits,
        out_TE,
        shares,
        tops,
        masses,
        scale * LOG2_E,
        G=groups,
        FOLD=heads // groups,
        D=dim,
        DIM=max(16, power_of_two(dim)),
        SPLIT=each if splits > 1 and not tiles.by_section else 0,
        HEIGHT=height,
        SLOTS=SLOTS,
        PAGE=table.size,
        AT_ONCE=AT_ONCE,
        SECTION=SECTION,
        BY_SECTION=tiles.by_section,
        num_warps=4 if (height <= 64 and splits > 1) or height <= 32 else 8,
        num_stages=3 if height <= 64 else 2,
        **launch,
    )
    if splits > 1:
        _join[(rows * heads,)](
            shares, tops, masses, out_TE,
            D=dim, DIM=power_of_two(dim), SPLITS=splits, RAGGED=tiles.by_section,
            SECTION=1 if tiles.by_section else SECTION, num_warps=1, **launch,
        )  # fmt: skip
    return out_TE
