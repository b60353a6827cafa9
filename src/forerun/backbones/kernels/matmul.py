"""Matrix products.

`fixed_product` adds up every output in one order, along k in steps of the matrix unit, whatever
the number of rows and however they are tiled: a row's output has the same bits in any company.
Where that is wanted, `product` uses it for few rows. For many rows the library's products are
faster, and most of them add up in the very same order: `library_keeps_bits` tries that out for
every size. Where any bits will do, `product` takes whichever is faster.

T rows, K inputs, N outputs.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.backbones.kernels import few_rows
from forerun.backbones.kernels.elementwise import RMSNorm, add_parts, norm, swiglu
from forerun.backbones.kernels.few_rows import FewRowsTiling
from forerun.backbones.kernels.launch import NARROW, launch_options, wait_for_last
from forerun.backbones.kernels.packed import BLOCK, CHUNK, INT8, PLAIN, PackedMatrix, load_matrix


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, scales, bias, out, partial_sums, arrivals, rows, N, K, part,
    BITS: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr,
    ADDED: tl.constexpr, TRANSPOSED: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Rows times a matrix [N, K] (GATED: [2N, K]), packed in BITS or plain. Programs of the
    same outputs run side by side; each adds up `part` inputs, and the last one to arrive adds up
    all PARTS, in their order. TRANSPOSED puts the matrix on the side of which matrix units take
    more at a time."""
    wait_for_last(LAUNCH)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row_inside = (m < rows)[:, None]
    row_at = x + m[:, None].to(tl.int64) * K
    total = tl.zeros([BN, BM] if TRANSPOSED else [BM, BN], tl.float32)
    total_up = tl.zeros([BN, BM] if TRANSPOSED else [BM, BN], tl.float32)
    output_inside = (n < N)[:, None]
    begin = tl.program_id(2) * part
    end = tl.minimum(begin + part, K)
    for at in range(begin, end, BK):
        left = at + k < end
        piece = tl.load(row_at + at + k[None, :], row_inside & left[None, :], 0)
        if BITS == 16:
            matrix = tl.load(
                weight + n[:, None].to(tl.int64) * K + at + k[None, :],
                output_inside & left[None, :],
                0,
            )
        else:
            # past its end a block of gates meets the first of up: what it gives is not stored
            matrix = load_matrix(
                weight, scales, n, N + N * GATED, at, end, K, BITS, GROUP, BN, BK,
                x.dtype.element_ty,
            )  # fmt: skip
        total = _add_product(total, piece, matrix, TRANSPOSED)
        if GATED:
            if BITS == 16:
                matrix = tl.load(
                    weight + (n + N)[:, None].to(tl.int64) * K + at + k[None, :],
                    output_inside & left[None, :],
                    0,
                )
            else:
                matrix = load_matrix(
                    weight, scales, n + N, 2 * N, at, end, K, BITS, GROUP, BN, BK,
                    x.dtype.element_ty,
                )  # fmt: skip
            total_up = _add_product(total_up, piece, matrix, TRANSPOSED)
    if TRANSPOSED:
        total = tl.trans(total)
        total_up = tl.trans(total_up)
    is_last = True
    if PARTS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        entry = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        SIZE: tl.constexpr = BM * BN * (2 if GATED else 1)
        own = partial_sums + tile.to(tl.int64) * PARTS * SIZE + entry
        _keep(own + tl.program_id(2) * SIZE, total, total_up, BM * BN, GATED)
        tl.debug_barrier()  # all of this program's sums, before it says that it has arrived
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            tl.store(arrivals + tile, 0)  # for the next product
            total = _sum(own, SIZE, PARTS)
            total_up = _sum(own + SIZE - BM * BN, SIZE, PARTS)  # without gates, the same
    if is_last:
        _finish(total, total_up, bias, out, m, n, rows, N, BIASED, GATED, ADDED)


@triton.jit
def _keep(own, total, total_up, SIZE: tl.constexpr, GATED: tl.constexpr):
    tl.store(own, total)
    if GATED:
        tl.store(own + SIZE, total_up)


@triton.jit
def _sum(sums, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """Of all parts, in their order; past the nearest cache, which does not know what other programs
    wrote."""
    total = tl.load(sums, cache_modifier=".cg")
    for i in tl.static_range(1, PARTS):
        total += tl.load(sums + i * SIZE, cache_modifier=".cg")
    return total


@triton.jit
def _finish(
    total, total_up, bias, out, m, n, rows, N,
    BIASED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Bias, gate and what the product is added to; then store it."""
    row_inside = (m < rows)[:, None]
    if BIASED:
        total += tl.load(bias + n, n < N, 0).to(tl.float32)[None, :]
    if GATED:
        if BIASED:
            total_up += tl.load(bias + N + n, n < N, 0).to(tl.float32)[None, :]
        # Rounded as the library's products are, so that either may be used.
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total_up = total_up.to(out.dtype.element_ty).to(tl.float32)
        total = total * tl.sigmoid(total) * total_up
    place = out + m[:, None].to(tl.int64) * N + n[None, :]
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
    """How `_product` goes over a matrix: rows, outputs and inputs that a program takes at a time,
    how many blocks of inputs it loads ahead, and its warps. None of it changes a bit."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    transposed: bool = False
    warps: int = 4


# By kind of product and up to how many rows, as measured on an H200 (`bench/gpu_kernels.py
# --tune`). The last one serves any number of rows.
TILINGS = {
    "gated": {
        16: ProductTiling(16, 32, 128, 4),
        32: ProductTiling(32, 64, 64, 3, transposed=True),
        64: ProductTiling(64, 64, 64, 3),
        128: ProductTiling(128, 64, 64, 5, warps=8),
        512: ProductTiling(128, 128, 64, 4, warps=8),
    },
    "wide": {
        16: ProductTiling(16, 64, 128, 4, transposed=True),
        32: ProductTiling(32, 128, 128, 4, transposed=True),
        64: ProductTiling(64, 128, 128, 4, warps=8),
        128: ProductTiling(128, 256, 64, 4, transposed=True, warps=8),
    },
    "plain": {
        16: ProductTiling(16, 64, 256, 4, transposed=True),
        32: ProductTiling(32, 64, 256, 4, transposed=True),
        64: ProductTiling(64, 64, 128, 5, warps=8),
        128: ProductTiling(128, 64, 128, 4, transposed=True, warps=8),
        512: ProductTiling(128, 128, 64, 3, warps=8),
    },
}
# Above `SMALL_FROM` rows and up to so many, of a matrix of so many numbers at most: a small one
# keeps the device busy only in small pieces.
SMALL_FROM = 32
SMALL_TILINGS = {
    64: {
        "gated": {32 << 20: ProductTiling(64, 32, 64, 4)},
        "plain": {8 << 20: ProductTiling(16, 64, 256, 4, transposed=True)},
    },
    128: {
        "gated": {
            10 << 20: ProductTiling(64, 32, 64, 4),
            32 << 20: ProductTiling(64, 64, 64, 3),
        },
        "plain": {
            2 << 20: ProductTiling(16, 64, 256, 4, transposed=True),
            8 << 20: ProductTiling(64, 32, 128, 4),
            16 << 20: ProductTiling(64, 64, 128, 5, warps=8),
        },
    },
}
# Of packed matrices and up to 16 rows, by bits of a code. (`bench/quantised.py --tune`.)
FEW_ROWS_TILINGS = {
    4: {
        "gated": {8: FewRowsTiling(8, 1, 128, 4), 16: FewRowsTiling(16, 1, 128, 4)},
        "wide": {8: FewRowsTiling(8, 2, 128, 2), 16: FewRowsTiling(16, 2, 128, 4)},
        "plain": {8: FewRowsTiling(8, 1, 256, 4), 16: FewRowsTiling(16, 1, 256, 4)},
    },
    8: {
        "gated": {8: FewRowsTiling(8, 1, 128, 4), 16: FewRowsTiling(16, 1, 128, 4)},
        "wide": {8: FewRowsTiling(8, 2, 128, 2), 16: FewRowsTiling(16, 2, 128, 4)},
        "plain": {8: FewRowsTiling(8, 1, 256, 4), 16: FewRowsTiling(16, 1, 256, 4)},
    },
}
# Of packed matrices and more rows. They are widened in the registers of matrix units: those take
# the matrix from registers on one side only, so all are transposed.
PACKED_TILINGS = {
    "gated": {
        32: ProductTiling(32, 64, 128, 4, transposed=True),
        64: ProductTiling(64, 64, 128, 3, transposed=True),
    },
    "wide": {
        32: ProductTiling(32, 64, 128, 4, transposed=True),
        64: ProductTiling(64, 64, 128, 4, transposed=True),
        128: ProductTiling(128, 128, 64, 3, transposed=True, warps=8),
    },
    "plain": {
        32: ProductTiling(32, 64, 128, 4, transposed=True),
        64: ProductTiling(64, 64, 128, 4, transposed=True),
        128: ProductTiling(128, 128, 64, 3, transposed=True, warps=8),
    },
}
WIDE = 65536  # outputs
BUSY_OUTPUTS = 8192  # of which a device has enough to do, without cutting inputs into parts
LEAST_PART = 2048  # inputs
# The same for packed matrices, of which a program has less to load.
PACKED_BUSY_OUTPUTS = 32768
PACKED_LEAST_PART = 512
PACKED_GATED_PARTS = 2
MOST_PARTS = 8
MOST_TILES = 1 << 17  # of one product with several parts
# In float32 there is no matrix unit of such precision: blocks must fit into registers.
FLOAT32_TILING = ProductTiling(16, 32, 32, 2)
PACKED_ROWS = 64  # up to which a packed matrix is widened inside of the product, if any bits do
FASTER_UP_TO = 64  # rows, where ours is faster than the library
FASTER_WITHOUT_PARTS = {"gated": 64, "wide": 64, "plain": 32}  # the same, where bits do not count


def tiling_for(kind: str, rows: int, dtype: torch.dtype, numbers: int) -> ProductTiling:
    """For a matrix of so many numbers."""
    if dtype == torch.float32:
        return FLOAT32_TILING
    if rows > SMALL_FROM:
        small = next((own for most, own in SMALL_TILINGS.items() if rows <= most), {})
        for most, tiling in small.get(kind, {}).items():
            if numbers <= most:
                return tiling
    *few, (_, any_rows) = TILINGS[kind].items()
    return next((tiling for most, tiling in few if rows <= most), any_rows)


def ours_is_faster_up_to(kind: str, weight_KN: Tensor) -> int:
    """Rows up to which our product of a matrix is faster than the library's, if sums must keep our
    order: of a small model's layers the library's launches take longer than their work."""
    is_narrow = kind != "wide" and min(weight_KN.shape) <= NARROW
    return max(SMALL_TILINGS) if is_narrow else FASTER_UP_TO


def packed_tiling(kind: str, rows: int, dtype: torch.dtype) -> ProductTiling:
    if dtype == torch.float32:
        return replace(FLOAT32_TILING, inputs=BLOCK)
    *few, (_, any_rows) = PACKED_TILINGS[kind].items()
    return next((tiling for most, tiling in few if rows <= most), any_rows)


def few_rows_tiling(kind: str, rows: int, matrix: PackedMatrix) -> FewRowsTiling:
    tilings = FEW_ROWS_TILINGS[4 if matrix.kind < INT8 else 8][kind]
    return next(tiling for most, tiling in tilings.items() if rows <= most)


def parts_of(outputs: int, inputs: int, gated: bool, packed: bool = False) -> tuple[int, int]:
    """Into how many parts the inputs of a matrix are cut, and how long each is: so many that even
    a few rows keep the device busy. It hangs on the matrix alone, or bits would differ."""
    busy = PACKED_BUSY_OUTPUTS if packed else BUSY_OUTPUTS
    least = PACKED_LEAST_PART if packed else LEAST_PART
    wanted = min(MOST_PARTS, busy // outputs, inputs // least)
    if gated:
        wanted = PACKED_GATED_PARTS if packed else 1
    if wanted <= 1:
        return 1, inputs
    # in whole steps of products, if possible; of packed matrices, in whole chunks of scales
    step = 64 if not packed else 256 if inputs % 256 == 0 else CHUNK
    part = -(-inputs // (wanted * step)) * step
    return -(-inputs // part), part


def product_kind(outputs: int, gated: bool) -> str:
    """The key of `TILINGS`."""
    if gated:
        return "gated"
    return "wide" if outputs > WIDE else "plain"


def product(
    x_TK: Tensor,
    weight_KN: Tensor | PackedMatrix,
    bias_N: Tensor | None = None,
    *,
    normed: RMSNorm | None = None,
    gated: bool = False,
    onto: Tensor | None = None,
    fixed: bool = False,
) -> Tensor:
    """norm(x) @ weight + bias. `gated` makes a SwiGLU of an output that is [gate, up]. The result
    is added to `onto`, in place, if that is given. `fixed`: in the same bits whatever the number
    of rows."""
    if normed is not None:
        x_TK = norm(x_TK, *normed)
    rows = len(x_TK)
    kind = product_kind(weight_KN.shape[1], gated)
    if isinstance(weight_KN, PackedMatrix):
        if fixed or rows <= PACKED_ROWS:
            tiling: ProductTiling | FewRowsTiling = packed_tiling(kind, rows, x_TK.dtype)
            if few_rows.serves(x_TK, weight_KN, gated):
                tiling = few_rows_tiling(kind, rows, weight_KN)
            return fixed_product(x_TK, weight_KN, tiling, bias_N, gated=gated, onto=onto)
        weight_KN = weight_KN.widened().t()
    half = x_TK.dtype in (torch.bfloat16, torch.float16)
    by_rows = weight_KN.stride(0) == 1
    by_library = partial(library_product, gated=gated, onto=onto)
    if not fixed and not (half and by_rows and rows <= FASTER_WITHOUT_PARTS[kind]):
        return by_library(x_TK, weight_KN, bias_N)
    if (
        fixed
        and rows > ours_is_faster_up_to(kind, weight_KN)
        and library_keeps_bits(x_TK, weight_KN, bias_N, gated, onto is not None)
    ):
        return by_library(x_TK, weight_KN, bias_N, parts=True)
    weight_NK = weight_KN.t().contiguous()  # as it lies, on a GPU
    tiling = tiling_for(kind, rows, x_TK.dtype, weight_KN.numel())
    return fixed_product(x_TK, weight_NK, tiling, bias_N, gated=gated, onto=onto)


def library_product(
    x_TK: Tensor,
    weight_KN: Tensor,
    bias_N: Tensor | None = None,
    *,
    gated: bool = False,
    onto: Tensor | None = None,
    parts: bool = False,
) -> Tensor:
    """A product by the library. `parts`: cut and added to `onto` as ours are."""
    count, part = parts_of(weight_KN.shape[1], len(weight_KN), gated)
    if parts and (count > 1 or onto is not None):
        sums_PTN = x_TK.new_empty(count, len(x_TK), weight_KN.shape[1], dtype=torch.float32)
        for i, sum_TN in enumerate(sums_PTN):
            cut = slice(i * part, (i + 1) * part)
            torch.mm(x_TK[:, cut], weight_KN[cut], out_dtype=torch.float32, out=sum_TN)
        out = x_TK.new_empty(sums_PTN.shape[1:]) if onto is None else onto
        return add_parts(sums_PTN, bias_N, out, added=onto is not None)
    if onto is not None:
        onto = onto.addmm_(x_TK, weight_KN)
        return onto if bias_N is None else onto.add_(bias_N)
    out = x_TK @ weight_KN if bias_N is None else torch.addmm(bias_N, x_TK, weight_KN)
    return swiglu(out) if gated else out


_keeps_bits: dict[tuple[object, ...], bool] = {}


def library_keeps_bits(
    x_TK: Tensor, weight_KN: Tensor, bias_N: Tensor | None, gated: bool, added: bool
) -> bool:
    """Does the library's product of this size give the bits that ours gives? It is tried out once,
    on random rows; the library's choice of a program hangs on the size alone."""
    if x_TK.device.type != "cuda":
        return False
    library = torch.backends.cuda.preferred_blas_library()
    sizes = (*x_TK.shape, weight_KN.shape[1], gated, added, bias_N is None)
    key = (x_TK.device, x_TK.dtype, library, *sizes)
    if key not in _keeps_bits:
        if torch.cuda.is_current_stream_capturing():
            return False
        x_TK = torch.randn_like(x_TK)
        onto = x_TK.new_empty(len(x_TK), weight_KN.shape[1]).normal_() if added else None
        _keeps_bits[key] = _same_bits(x_TK, weight_KN, bias_N, gated, onto)
    return _keeps_bits[key]


def _same_bits(
    x_TK: Tensor, weight_KN: Tensor, bias_N: Tensor | None, gated: bool, onto: Tensor | None
) -> bool:
    kind = product_kind(weight_KN.shape[1], gated)
    tiling = tiling_for(kind, len(x_TK), x_TK.dtype, weight_KN.numel())
    copy = None if onto is None else onto.clone()
    weight_NK = weight_KN.t().contiguous()
    ours = fixed_product(x_TK, weight_NK, tiling, bias_N, gated=gated, onto=copy)
    theirs = library_product(x_TK, weight_KN, bias_N, gated=gated, onto=onto, parts=True)
    return torch.equal(ours, theirs)


def fixed_product(
    x_TK: Tensor,
    weight_NK: Tensor | PackedMatrix,
    tiling: ProductTiling | FewRowsTiling,
    bias_N: Tensor | None = None,
    *,
    gated: bool = False,
    onto: Tensor | None = None,
) -> Tensor:
    """A product in one launch, with the matrix as [N, K]."""
    rows, inputs = x_TK.shape
    packed = weight_NK if isinstance(weight_NK, PackedMatrix) else None
    matrix = weight_NK.codes if isinstance(weight_NK, PackedMatrix) else weight_NK
    outputs = (len(matrix) if packed is None else packed.outputs) // (2 if gated else 1)
    out = x_TK.new_empty(rows, outputs) if onto is None else onto
    parts, part = parts_of(outputs, inputs, gated, packed is not None)
    grid = (triton.cdiv(rows, tiling.rows), triton.cdiv(outputs, tiling.outputs), parts)
    sums = arrivals = out
    if parts > 1:
        each = tiling.rows * tiling.outputs * (2 if gated else 1)
        sums = x_TK.new_empty(grid[0] * grid[1] * parts * each, dtype=torch.float32)
        arrivals = arrival_counts(x_TK.device)
        assert grid[0] * grid[1] <= MOST_TILES
    if isinstance(tiling, FewRowsTiling):
        assert packed is not None
        few_rows.launch(
            grid, x_TK, packed, tiling, bias_N, out, sums, arrivals, part,
            gated=gated, added=onto is not None,
        )  # fmt: skip
        return out
    _product[grid](
        x_TK,
        matrix,
        matrix if packed is None else packed.scales,
        x_TK if bias_N is None else bias_N,
        out,
        sums,
        arrivals,
        rows,
        outputs,
        inputs,
        part,
        BITS=PLAIN if packed is None else packed.kind,
        GROUP=1 if packed is None else packed.group,
        BIASED=bias_N is not None,
        GATED=gated,
        ADDED=onto is not None,
        TRANSPOSED=tiling.transposed,
        PARTS=parts,
        BM=tiling.rows,
        BN=tiling.outputs,
        BK=tiling.inputs,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(out, rows, min(inputs, outputs)),
    )
    return out


@lru_cache
def arrival_counts(device: torch.device) -> Tensor:
    """Zeros in which the programs of a product count each other. Each product leaves zeros behind,
    so all products of a device share them: they run one after the other."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
