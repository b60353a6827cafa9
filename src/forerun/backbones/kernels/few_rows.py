"""Products of up to 16 rows with a packed matrix.

With so few rows a product is a read of its matrix, and what it does per weight must be less than
what a load takes. So nothing passes through shared memory and no warp waits for another: a warp
loads its weights in the order in which its matrix unit takes them (see `packed.py`), widens them in
their registers, and multiplies. Loads of the next inputs are under way meanwhile; those of the
first begin before the last kernel has finished, because a matrix hangs on no kernel.

Written in Gluon, which is Triton with layouts that one chooses oneself. Sums are added up in the
order of `matmul.py`, so bits are the same.

N outputs, K inputs; a program takes TILES tiles of 16 outputs, BK inputs at a time and BM rows.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from forerun.backbones.kernels.launch import launch_options
from forerun.backbones.kernels.packed import (
    INTERPRETED,
    TILE,
    PackedMatrix,
    numbers_assembly,
)

MOST_ROWS = 16
TURN = 256  # inputs of a turn of the loop
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@dataclass(frozen=True)
class FewRowsTiling:
    """Rows of a program, tiles of 16 outputs of a warp, inputs at a time, warps, and how many
    registers a thread may use (0: as many as it likes). None of it changes a bit."""

    rows: int
    tiles: int
    inputs: int
    warps: int
    registers: int = 0

    @property
    def outputs(self) -> int:
        return TILE * self.tiles * self.warps


def serves(x_TK: Tensor, matrix: PackedMatrix, gated: bool) -> bool:
    """Can such a product be made here?"""
    return (
        len(x_TK) <= MOST_ROWS
        and x_TK.is_cuda
        and torch.version.cuda is not None
        and not INTERPRETED
        and x_TK.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(x_TK.device) >= (8, 0)
        and (not gated or matrix.outputs % (2 * TILE) == 0)
    )


def launch(
    grid: tuple[int, ...],
    x_TK: Tensor,
    matrix: PackedMatrix,
    tiling: FewRowsTiling,
    bias_N: Tensor | None,
    out: Tensor,
    sums: Tensor,
    arrivals: Tensor,
    part: int,
    *,
    gated: bool,
    added: bool,
) -> None:
    rows, outputs = out.shape
    tiles = -(-outputs // TILE)
    whole = tiles % (tiling.tiles * tiling.warps) == 0
    options: dict[str, Any] = dict(maxnreg=tiling.registers) if tiling.registers else {}
    _few_rows[grid](
        x_TK.view(torch.int32),
        matrix.codes,
        matrix.scales,
        x_TK if bias_N is None else bias_N,
        out,
        sums,
        arrivals,
        rows,
        outputs,
        matrix.inputs,
        part,
        KIND=matrix.kind,
        GROUP=matrix.group,
        BIASED=bias_N is not None,
        GATED=gated,
        ADDED=added,
        PARTS=grid[2],
        BM=tiling.rows,
        TILES=tiling.tiles * tiling.warps,
        BK=tiling.inputs,
        WARPS=tiling.warps,
        EVEN=whole and matrix.inputs % TURN == 0 and part % TURN == 0,
        num_warps=tiling.warps,
        **launch_options(out, rows),
        **options,
    )


@gluon.constexpr_function
def _along(layout, dim):
    """The layout of one of four dimensions."""
    for other in (3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def _by_thread(middle, last, warps):
    """Tiles by warp, several in the middle, 32 threads, and so many words of a thread."""
    return gl.BlockedLayout([1, middle, 1, last], [1, 1, 32, 1], [warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def _tiles(first, gates, TILES: gl.constexpr, GATED: gl.constexpr, L: gl.constexpr):
    """Which tiles of the matrix a program takes: of gates, and as many of up, which lie behind all
    gates. And which of them there are."""
    i = gl.arange(0, TILES * (2 if GATED else 1), _along(L, 0))
    gate = first + i % TILES
    tile = (gate + i // TILES * gates)[:, None, None, None]
    return tile.to(gl.int64), (gate < gates)[:, None, None, None]


@gluon.jit
def _load_words(
    codes, first_tile, gates, at, end, K,
    KIND: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr, BK: gl.constexpr,
    WARPS: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """[tiles, units, 32, 4]."""
    UNIT: gl.constexpr = 64 if KIND <= 5 else 32
    L: gl.constexpr = _by_thread(BK // UNIT, 4, WARPS)
    tile, exists = _tiles(first_tile, gates, TILES, GATED, L)
    unit = gl.arange(0, BK // UNIT, _along(L, 1))[None, :, None, None]
    thread = gl.arange(0, 32, _along(L, 2))[None, None, :, None]
    word = gl.arange(0, 4, _along(L, 3))[None, None, None, :]
    place = tile * (K // UNIT * 128) + (unit * 128 + thread * 4 + word)
    codes += at // UNIT * 128
    if EVEN:
        words = gl.load(codes + place)
    else:
        words = gl.load(codes + place, exists & (at + unit * UNIT < end), 0)
    return words


@gluon.jit
def _load_scales(
    scales, first_tile, gates, at, end, K,
    GROUP: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr, BK: gl.constexpr,
    WARPS: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """[tiles, chunks, 32, 2 times groups]: the four threads of an output load the same."""
    PER_CHUNK: gl.constexpr = 1 if GROUP == 0 else 128 // GROUP
    CHUNKS: gl.constexpr = 1 if GROUP == 0 else BK // 128
    L: gl.constexpr = _by_thread(CHUNKS, 2 * PER_CHUNK, WARPS)
    tile, exists = _tiles(first_tile, gates, TILES, GATED, L)
    chunk = gl.arange(0, CHUNKS, _along(L, 1))[None, :, None, None]
    thread = gl.arange(0, 32, _along(L, 2))[None, None, :, None]
    word = gl.arange(0, 2 * PER_CHUNK, _along(L, 3))[None, None, None, :]
    chunks = 1 if GROUP == 0 else (K + 127) // 128
    place = chunk * (16 * PER_CHUNK) + thread // 4 * (2 * PER_CHUNK) + word
    place = tile * (chunks * (16 * PER_CHUNK)) + place
    scales += at // 128 * (16 * PER_CHUNK)
    if EVEN:
        scale = gl.load(scales + place)
    else:
        scale = gl.load(scales + place, exists & (at + chunk * 128 < end), 0)
    return scale


@gluon.jit
def _load_rows(
    x, first, rows, at, end, K,
    BM: gl.constexpr, BK: gl.constexpr, WARPS: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Pairs of inputs: octet of inputs, pair, octet of rows, row."""
    L: gl.constexpr = gl.BlockedLayout(
        [BK // 8, 1, BM // 8, 1], [1, 4, 1, 8], [1, 1, 1, WARPS], [1, 3, 2, 0]
    )
    octet = gl.arange(0, BK // 8, _along(L, 0))[:, None, None, None]
    pair = gl.arange(0, 4, _along(L, 1))[None, :, None, None]
    rows_octet = gl.arange(0, BM // 8, _along(L, 2))[None, None, :, None]
    row = gl.arange(0, 8, _along(L, 3))[None, None, None, :]
    m = first + rows_octet * 8 + row
    place = m.to(gl.int64) * (K // 2) + (octet * 4 + pair)
    x += at // 2
    if EVEN:  # what the other rows hold is not stored
        piece = gl.load(x + place, m < rows)
    else:
        piece = gl.load(x + place, (m < rows) & (at + octet * 8 < end), 0)
    return piece


@gluon.jit
def _halves(piece, BM: gl.constexpr, BK: gl.constexpr, DTYPE: gl.constexpr, B: gl.constexpr):
    """Pairs of inputs as a matrix unit takes them: [BK, BM]."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [piece], (DTYPE.value, DTYPE.value), True, 1
    )
    piece = gl.join(even, odd).permute([0, 1, 4, 2, 3]).reshape([BK, BM])
    return gl.convert_layout(piece, B, assert_trivial=True)


@gluon.jit
def _for_words(
    scale, like, KIND: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr, BK: gl.constexpr
):
    """A scale for every word: tile, unit, g, t, output g or g + 8, half of the unit."""
    UNITS: gl.constexpr = BK // (64 if KIND <= 5 else 32)
    if GROUP == 0:
        scale = scale.reshape([TILES, 1, 8, 4, 2, 1])
    else:
        PER_CHUNK: gl.constexpr = 128 // GROUP
        CHUNKS: gl.constexpr = BK // 128
        scale = scale.reshape([TILES, CHUNKS, 8, 4, 2, PER_CHUNK, 1])
        scale = _broadcast(scale, [TILES, CHUNKS, 8, 4, 2, PER_CHUNK, 4 // PER_CHUNK])
        if KIND <= 5:
            scale = scale.reshape([TILES, CHUNKS, 8, 4, 2, 2, 2]).permute([0, 1, 5, 2, 3, 4, 6])
            scale = scale.reshape([TILES, UNITS, 8, 4, 2, 2])
        else:
            scale = scale.reshape([TILES, CHUNKS, 8, 4, 2, 4]).permute([0, 1, 5, 2, 3, 4])
            scale = scale.reshape([TILES, UNITS, 8, 4, 2, 1])
    scale = _broadcast(scale, [TILES, UNITS, 8, 4, 2, 2])
    L: gl.constexpr = like.type.layout
    return gl.convert_layout(scale, L, assert_trivial=True)


@gluon.jit
def _broadcast(values, SHAPE: gl.constexpr):
    L: gl.constexpr = values.type.layout
    values, _ = gl.broadcast(values, gl.zeros(SHAPE, values.dtype, layout=L))
    return values


@gluon.jit
def _numbers(words, scale, zero, PLACE: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr):
    NARROW: gl.constexpr = scale.dtype == DTYPE
    even, odd = gl.inline_asm_elementwise(
        numbers_assembly(KIND, PLACE, DTYPE, NARROW),
        "=h,=h,r,h,h" if NARROW else "=h,=h,r,f,f",
        [words, scale, zero], (DTYPE.value, DTYPE.value), True, 1,
    )  # fmt: skip
    return gl.join(even, odd)


@gluon.jit
def _widened(
    words, scale, zero,
    KIND: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr, BK: gl.constexpr,
    DTYPE: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """[16 TILES, BK], in the registers in which words are."""
    words = words.reshape([TILES, BK // (64 if KIND <= 5 else 32), 8, 4, 2, 2])
    scale = _for_words(scale, words, KIND, GROUP, TILES, BK)
    if KIND == 5:
        zero = _for_words(zero, words, KIND, GROUP, TILES, BK)
    else:
        zero = scale
    first = _numbers(words, scale, zero, 0, KIND, DTYPE)
    second = _numbers(words, scale, zero, 1, KIND, DTYPE)
    if KIND <= 5:
        third = _numbers(words, scale, zero, 2, KIND, DTYPE)
        fourth = _numbers(words, scale, zero, 3, KIND, DTYPE)
        # then odd, which octet, and which 16 of the half
        numbers = gl.join(gl.join(first, second), gl.join(third, fourth))
        numbers = numbers.permute([0, 4, 2, 1, 5, 8, 7, 3, 6])
    else:
        numbers = gl.join(first, second).permute([0, 4, 2, 1, 5, 7, 3, 6])
    return gl.convert_layout(numbers.reshape([TILES * 16, BK]), A, assert_trivial=True)


@gluon.jit
def _load(
    codes, scales, scale, first_tile, gates, at, end, K,
    KIND: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr,
    BK: gl.constexpr, WARPS: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Codes, scales and zeros of BK inputs. A scale that serves all inputs is loaded already."""
    words = _load_words(codes, first_tile, gates, at, end, K, KIND, TILES, GATED, BK, WARPS, EVEN)
    if GROUP > 0:
        scale = _load_scales(
            scales, first_tile, gates, at, end, K, GROUP, TILES, GATED, BK, WARPS, EVEN
        )
    zero = scale
    if KIND == 5:
        tiles = gates.to(gl.int64) * (2 if GATED else 1)
        behind = scales + tiles * ((K + 127) // 128 * (16 * (128 // GROUP)))
        zero = _load_scales(
            behind, first_tile, gates, at, end, K, GROUP, TILES, GATED, BK, WARPS, EVEN
        )
    return words, scale, zero


@gluon.jit
def _turn(
    total, words, scale, zero, piece, x, codes, scales, first, rows, tile, gates, begin, end, K,
    KIND: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr,
    BM: gl.constexpr, BK: gl.constexpr, WARPS: gl.constexpr, EVEN: gl.constexpr,
    DTYPE: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """The products of a turn of inputs, of which the first are loaded; load the first of the next,
    unless this is the LAST. Several steps are written out: with one to a turn, all that was loaded
    would have to be moved to where the next turn looks for it."""
    MMA: gl.constexpr = total.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COUNT: gl.constexpr = TILES * (2 if GATED else 1)
    STEPS: gl.constexpr = 256 // BK
    LOADS: gl.constexpr = STEPS - 1 if LAST else STEPS
    for i in gl.static_range(STEPS):
        at = begin + (i + 1) * BK
        if i < LOADS:
            next_words, next_scale, next_zero = _load(
                codes, scales, scale, tile, gates, at, end, K,
                KIND, GROUP, TILES, GATED, BK, WARPS, EVEN,
            )  # fmt: skip
            next_piece = _load_rows(x, first, rows, at, end, K, BM, BK, WARPS, EVEN)
        matrix = _widened(words, scale, zero, KIND, GROUP, COUNT, BK, DTYPE, A)
        total = mma_v2(matrix, _halves(piece, BM, BK, DTYPE, B), total)
        if i < LOADS:
            words, scale, zero, piece = next_words, next_scale, next_zero, next_piece
    return total, words, scale, zero, piece


@gluon.jit(do_not_specialize=["rows"])
def _few_rows(
    x, codes, scales, bias, out, partial_sums, arrivals, rows, N, K, part,
    KIND: gl.constexpr, GROUP: gl.constexpr, BIASED: gl.constexpr, GATED: gl.constexpr,
    ADDED: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, TILES: gl.constexpr,
    BK: gl.constexpr, WARPS: gl.constexpr, EVEN: gl.constexpr, LAUNCH: gl.constexpr,
):  # fmt: skip
    """As `matmul._product`, TRANSPOSED. EVEN: every program has whole tiles and turns."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    COUNT: gl.constexpr = TILES * (2 if GATED else 1)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    TURN: gl.constexpr = 256
    if LAUNCH == 2:
        gdc_launch_dependents()
    first = gl.program_id(0) * BM
    tile = gl.program_id(1) * TILES
    gates = (N + 15) // 16
    begin = gl.program_id(2) * part
    end = gl.minimum(begin + part, K)
    total = gl.zeros([16 * COUNT, BM], gl.float32, layout=MMA)
    scale = total
    if GROUP == 0:
        scale = _load_scales(scales, tile, gates, 0, end, K, 0, TILES, GATED, BK, WARPS, False)
    words, scale, zero = _load(
        codes, scales, scale, tile, gates, begin, end, K,
        KIND, GROUP, TILES, GATED, BK, WARPS, EVEN,
    )  # fmt: skip
    if LAUNCH > 0:
        gdc_wait()
    piece = _load_rows(x, first, rows, begin, end, K, BM, BK, WARPS, EVEN)
    turns_end = begin + (end - begin - 1) // TURN * TURN
    for at in range(begin, turns_end, TURN):
        total, words, scale, zero, piece = _turn(
            total, words, scale, zero, piece, x, codes, scales, first, rows, tile, gates, at, end,
            K, KIND, GROUP, TILES, GATED, BM, BK, WARPS, EVEN, DTYPE, False,
        )  # fmt: skip
    total, words, scale, zero, piece = _turn(
        total, words, scale, zero, piece, x, codes, scales, first, rows, tile, gates, turns_end,
        end, K, KIND, GROUP, TILES, GATED, BM, BK, WARPS, EVEN, DTYPE, True,
    )  # fmt: skip
    is_last = True
    if PARTS > 1:
        own_tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        sums = partial_sums + own_tile.to(gl.int64) * (PARTS * BM * 16 * COUNT)
        _keep(sums, gl.program_id(2), total, rows - first)
        _barrier()  # all of this program's sums, before it says that it has arrived
        is_last = gl.atomic_add(arrivals + own_tile, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            gl.store(arrivals + own_tile, 0)  # for the next product
            total = _sum(sums, total, PARTS, rows - first)
    if is_last:
        _finish(total, bias, out, first, tile * 16, rows, N, BIASED, GATED, ADDED)


@gluon.jit
def _entries(total, rows):
    """Where a program's sums lie among those of its part, and which of them are wanted."""
    L: gl.constexpr = total.type.layout
    n = gl.arange(0, total.shape[0], gl.SliceLayout(1, L))[:, None]
    m = gl.arange(0, total.shape[1], gl.SliceLayout(0, L))[None, :]
    return m * total.shape[0] + n, (m < rows) & (n >= 0)


@gluon.jit
def _keep(sums, i, total, rows):
    entry, kept = _entries(total, rows)
    gl.store(sums + i * (total.shape[0] * total.shape[1]) + entry, total, kept)


@gluon.jit
def _sum(sums, total, PARTS: gl.constexpr, rows):
    """Of all parts, in their order; past the nearest cache, which does not know what other programs
    wrote."""
    entry, kept = _entries(total, rows)
    SIZE: gl.constexpr = total.shape[0] * total.shape[1]
    total = gl.load(sums + entry, kept, 0, cache_modifier=".cg")
    for i in gl.static_range(1, PARTS):
        total += gl.load(sums + i * SIZE + entry, kept, 0, cache_modifier=".cg")
    return total


@gluon.jit
def _finish(
    total, bias, out, first, first_output, rows, N,
    BIASED: gl.constexpr, GATED: gl.constexpr, ADDED: gl.constexpr,
):  # fmt: skip
    """As `matmul._finish`, of sums that are transposed."""
    OUTPUTS: gl.constexpr = total.shape[0] // (2 if GATED else 1)
    BM: gl.constexpr = total.shape[1]
    total_up = total
    if GATED:
        total, total_up = total.reshape([2, OUTPUTS, BM]).permute([1, 2, 0]).split()
    L: gl.constexpr = total.type.layout
    n = first_output + gl.arange(0, OUTPUTS, gl.SliceLayout(1, L))
    m = first + gl.arange(0, BM, gl.SliceLayout(0, L))
    if BIASED:
        total += gl.load(bias + n, n < N, 0).to(gl.float32)[:, None]
    if GATED:
        if BIASED:
            total_up += gl.load(bias + N + n, n < N, 0).to(gl.float32)[:, None]
        total = total.to(out.dtype.element_ty).to(gl.float32)
        total_up = total_up.to(out.dtype.element_ty).to(gl.float32)
        total = total * (1 / (1 + gl.exp(-total))) * total_up
    place = out + m[None, :].to(gl.int64) * N + n[:, None]
    kept = (m < rows)[None, :] & (n < N)[:, None]
    if ADDED:
        total += gl.load(place, kept, 0).to(gl.float32)
    gl.store(place, total.to(out.dtype.element_ty), kept)
