"""`StaticBatch.move_on` as one launch: torch needs about twenty, most of a small model's round."""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.engine.pack import Moved, Placed
from forerun.engine.pages import PageTable
from forerun.sequence.rows import HI, POSITION

STRETCH = 128  # rows, or tiles, of a program
BOUNDS = 6  # integers of a tile: the last three of them are slots, which move
FIRST_MOVED = 3


@triton.jit
def _steps_of(steps, sequence, sequences, more):
    """How far rows move, by their sequence; what pads is of none, and stays."""
    moves = sequence < sequences
    return tl.where(moves, tl.load(steps + sequence, moves, 0) + more, 0)


@triton.jit
def _place(tokens, row, inside, token, behind, each, first, drafted, DRAFTED: tl.constexpr):
    """Write a token at one place of every sequence's rows, and those behind it."""
    sequence = row // each
    number = row % each - first
    tl.store(tokens + row, tl.load(token + sequence, inside, 0), inside & (number == 0))
    if DRAFTED:
        is_behind = inside & (number > 0)
        known = tl.load(behind + sequence * drafted + number - 1, is_behind, 0)
        tl.store(tokens + row, tl.maximum(known, 0), is_behind)


# One program serves all sizes, wherever their memory begins: none can be made within a capture.
@triton.jit(
    do_not_specialize=[
        *("rows", "tiles", "sequences", "more", "page", "source_page", "per_lane"),
        *("source_per_lane", "scratch", "placed", "each", "first", "drafted"),
    ],
    do_not_specialize_on_alignment=[
        *("rows_7T", "bounds", "sources", "sequence_T", "sequence_N"),
        *("steps", "table", "source_table", "token", "behind"),
    ],
)
def _move(
    rows_7T, bounds, sources, sequence_T, sequence_N, steps, table, source_table, token, behind,
    rows, tiles, sequences, more, page, source_page, per_lane, source_per_lane, scratch,
    placed, each, first, drafted,
    PLACED: tl.constexpr, DRAFTED: tl.constexpr, SOURCES: tl.constexpr,
    POSITION: tl.constexpr, HI: tl.constexpr, FIRST_MOVED: tl.constexpr, BOUNDS: tl.constexpr,
    STRETCH: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * STRETCH + tl.arange(0, STRETCH)
    inside = at < rows
    step = _steps_of(steps, tl.load(sequence_T + at, inside, sequences), sequences, more)
    if PLACED:
        _place(rows_7T, at, at < placed, token, behind, each, first, drafted, DRAFTED)
    for number in tl.static_range(POSITION, HI + 1):
        own = rows_7T + number * rows + at
        moved = tl.load(own, inside, 0) + step
        tl.store(own, moved, inside)
        if number == POSITION:
            pages = tl.load(rows_7T + 6 * rows + at, inside, 0)
            start = tl.load(table + pages + moved // page, inside, 0)
            tl.store(rows_7T + 5 * rows + at, start + moved % page, inside)
            if SOURCES:
                old = tl.load(sources + at, inside, 0)
                has_one = inside & (old != scratch)
                theirs = pages // per_lane * source_per_lane + moved // source_page
                found = tl.load(source_table + theirs, has_one, 0) + moved % source_page
                tl.store(sources + at, found, has_one)
    inside = at < tiles
    step = _steps_of(steps, tl.load(sequence_N + at, inside, sequences), sequences, more)
    for number in tl.static_range(FIRST_MOVED, BOUNDS):
        own = bounds + number * tiles + at
        tl.store(own, tl.load(own, inside, 0) + step, inside)


def move_rows(
    rows_7T: Tensor,
    bounds_6N: Tensor,
    sources_T: Tensor,
    sequences: tuple[Tensor, Tensor],  # of every row, and of every tile
    table: PageTable,
    source_table: PageTable | None,
    moved: Moved,
    placed: Placed | None,
    count: int,  # of rows that do not pad
) -> None:
    rows, tiles = rows_7T.shape[1], bounds_6N.shape[1]
    steps_B = moved.steps_B.contiguous()
    behind_BK = None if placed is None else placed.behind_BK
    other = table if source_table is None else source_table
    with torch.cuda.device_of(rows_7T):
        _move[(triton.cdiv(max(rows, tiles), STRETCH),)](
            rows_7T,
            bounds_6N,
            sources_T,
            *sequences,
            steps_B,
            table.on_device,
            other.on_device,
            steps_B if placed is None else placed.token_B.contiguous(),
            steps_B if behind_BK is None else behind_BK.contiguous(),
            rows,
            tiles,
            len(steps_B),
            moved.more,
            table.size,
            other.size,
            table.per_lane,
            other.per_lane,
            other.scratch_slot,
            placed=count,
            each=count // len(steps_B),
            first=0 if placed is None else placed.first,
            drafted=0 if behind_BK is None else behind_BK.shape[1],
            PLACED=placed is not None,
            DRAFTED=behind_BK is not None,
            SOURCES=source_table is not None,
            POSITION=POSITION,
            HI=HI,
            FIRST_MOVED=FIRST_MOVED,
            BOUNDS=BOUNDS,
            STRETCH=STRETCH,
        )
