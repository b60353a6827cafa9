"""Matrices of 4 or 8 bits per weight, widened inside of a product.

What a packed matrix stands for is a plain one: (code - zero) times scale, computed in float32 and
rounded to the numbers of the rows that it meets. So a product with it has the bits of a product
with that plain matrix, and where many rows make it worth while, the plain matrix is made and the
usual products take over.

Codes lie in the order in which matrix units want their operands. A warp takes a tile of 16 outputs
and 16 inputs: thread 4g + t holds outputs g and g + 8, and of each the inputs {2t, 2t + 1, 2t + 8,
2t + 9}. In memory 16 bytes of one thread lie side by side: outputs g and g + 8 for 64 inputs (4
bits) or 32 inputs (8 bits), which are called a unit here. So a warp loads 512 bytes at once, and a
code is widened by the thread that multiplies it, in pairs that lie in one word.

Scales lie in that order, too: by tile, by 128 inputs, g, output g or g + 8, and group.

N outputs, K inputs, G groups of inputs that share a scale.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.backbones.products import BYTE, GROUP, NIBBLE, Packed, quantised
from forerun.backbones.quantised import Quantised

BLOCK = 64  # inputs come in such blocks
TILE = 16  # outputs
CHUNK = 128  # inputs of which scales lie together
LARGEST_GROUP = 64  # inputs; so at least two scales lie side by side, which can be loaded ahead
# How a matrix is packed. Kernels compare with these numbers, which Triton does not look up.
INT4 = 4
INT4_ZEROS = 5  # with a zero per group, behind the scales
INT8 = 8
FLOAT8 = 9  # e4m3
PLAIN = 16  # not packed
FP8 = torch.float8_e4m3fn
LARGEST_FP8_SCALE = 64  # the exponents of larger ones would not fit
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class PackedMatrix(Packed):
    """A matrix [N, K] in few bits. Made by `packed_4`, `packed_8` and `packed_fp8`."""

    codes: Tensor  # [tiles, units, 32 threads, 4 words]
    scales: Tensor  # [tiles, 8, 2] or [1 or 2 with zeros, tiles, chunks, 8, 2, groups of a chunk]
    kind: int
    outputs: int
    inputs: int
    group: int  # inputs of a scale, 32 or 64; 0 where one serves all
    dtype: torch.dtype  # of the matrix that it stands for

    @property
    def shape(self) -> tuple[int, int]:
        """[in, out], as plain matrices are given to a product."""
        return self.inputs, self.outputs

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def widened(self) -> Tensor:
        """The plain matrix, [N, K]."""
        out_NK = torch.empty(self.outputs, self.inputs, dtype=self.dtype, device=self.codes.device)
        grid = (triton.cdiv(self.outputs, 32), triton.cdiv(self.inputs, 128))
        _widen[grid](
            self.codes, self.scales, out_NK, self.outputs, self.inputs,
            KIND=self.kind, GROUP=self.group, BN=32, BK=128,
        )  # fmt: skip
        return out_NK


def packed(weight_NK: Tensor, quantize: str) -> PackedMatrix | None:
    """A matrix in 'int4', 'int8' or 'fp8'; nothing where its inputs are not in whole blocks."""
    inputs = weight_NK.shape[1]
    if inputs % BLOCK:
        return None
    if quantize == "fp8":
        return packed_fp8(weight_NK)
    if quantize == "int4":
        return packed_4(*quantised(weight_NK, NIBBLE, GROUP), weight_NK.dtype)
    return packed_8(*quantised(weight_NK, BYTE, inputs), weight_NK.dtype)


def packed_codes(matrix: Quantised, dtype: torch.dtype) -> PackedMatrix | None:
    """A matrix that is quantised already, with the codes that it has; nothing where its inputs or
    groups are not in whole blocks."""
    inputs = matrix.codes_OI.shape[1]
    if inputs % BLOCK or matrix.group % 32:  # a group holds whole units
        return None
    if matrix.bits == "int4":
        return packed_4(matrix.codes_OI, matrix.scales_OG, dtype, matrix.zeros_OG)
    if matrix.bits == "fp8" and matrix.scales_OG.max() > LARGEST_FP8_SCALE:
        return None
    return packed_8(matrix.codes_OI, matrix.scales_OG, dtype)


def packed_4(
    codes_NK: Tensor, scales_NG: Tensor, dtype: torch.dtype, zeros_NG: Tensor | None = None
) -> PackedMatrix:
    """From whole numbers in [-8, 7]; with zeros, which are such numbers too, from those less their
    group's zero."""
    outputs, inputs = codes_NK.shape
    above = _in_tiles((codes_NK + 8).to(torch.int32))
    # tile, output g or g + 8, g, unit, half of it, k16, octet, thread, odd
    above = above.view(-1, 2, 8, inputs // 64, 2, 2, 2, 4, 2)
    shifts = torch.tensor([[0, 4], [8, 12]], dtype=torch.int32, device=codes_NK.device)
    halves = (above << shifts[:, :, None, None]).sum((5, 6), dtype=torch.int32)
    group = math.gcd(inputs // scales_NG.shape[1], LARGEST_GROUP)
    scales_NG = _narrowed(scales_NG, dtype)
    parts = [_scales_in_tiles(scales_NG, inputs, group)]
    if zeros_NG is not None:
        parts.append(_scales_in_tiles(zeros_NG.to(scales_NG.dtype), inputs, group))
    kind = INT4 if zeros_NG is None else INT4_ZEROS
    words = _words(halves)
    return PackedMatrix(words, torch.stack(parts), kind, outputs, inputs, group, dtype)


def packed_8(codes_NK: Tensor, scales_NG: Tensor, dtype: torch.dtype) -> PackedMatrix:
    """From whole numbers in [-127, 127], or 8-bit floats, with a scale per output or per group of
    inputs."""
    kind = FLOAT8 if codes_NK.dtype == FP8 else INT8
    outputs, inputs = codes_NK.shape
    by_input = _in_tiles(codes_NK.view(torch.uint8)).to(torch.int32)
    # tile, output g or g + 8, g, unit, k16, octet, thread, odd
    first, second = by_input.view(-1, 2, 8, inputs // 32, 2, 2, 4, 2).unbind(5)
    halves = _float8_halves(first, second) if kind == FLOAT8 else first | second << 8
    if kind == FLOAT8:
        scales_NG = scales_NG.float() * exponent_shift(dtype)
    scales_NG = _narrowed(scales_NG, dtype)
    group = 0
    if scales_NG.shape[1] == 1:
        scales = _in_tiles(scales_NG).view(-1, 2, 8).transpose(1, 2).contiguous()
    else:
        group = math.gcd(inputs // scales_NG.shape[1], LARGEST_GROUP)
        scales = _scales_in_tiles(scales_NG, inputs, group)[None]
    return PackedMatrix(_words(halves), scales, kind, outputs, inputs, group, dtype)


def packed_fp8(weight_NK: Tensor) -> PackedMatrix:
    """8-bit floats with a scale per output. Scales are powers of two: they cost no precision."""
    largest = weight_NK.float().abs().amax(1, keepdim=True).clamp_min(1e-30)
    scales = torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(FP8).max)))
    codes = (weight_NK.float() / scales).to(FP8)
    return packed_8(codes, scales, weight_NK.dtype)


def exponent_shift(dtype: torch.dtype) -> float:
    """What an 8-bit float becomes too small by, when its bits are taken for a half's: the
    difference of biases. Its scale makes up for it."""
    return {torch.bfloat16: 2.0**120, torch.float16: 2.0**8}.get(dtype, 1.0)


def _narrowed(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the type of the rows, if that changes none: then a product in that type is enough
    to apply them."""
    narrow = scales.to(dtype)
    return narrow if torch.equal(narrow.float(), scales.float()) else scales.float()


def _in_tiles(rows: Tensor) -> Tensor:
    """With zeros below, to whole tiles of outputs."""
    missing = -len(rows) % TILE
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _words(halves: Tensor) -> Tensor:
    """Halves of words by tile, output g or g + 8, g, unit, part of it, thread and odd, to
    [tiles, units, 32, 4]."""
    even, odd = halves.permute(0, 3, 2, 5, 1, 4, 6).unbind(-1)
    words = even | odd << 16
    return words.reshape(*words.shape[:2], 32, 4).contiguous()


def _float8_halves(first: Tensor, second: Tensor) -> Tensor:
    """Two 8-bit floats in the half of a word. The first one's bits lie where a bfloat16 has its
    sign, exponent and fraction; the second one's in between: exponent above, fraction below, and
    the sign, for the sake of one shift, in the word's other half."""
    halves = (first >> 7) << 15 | (first & 127) << 4
    return halves | (second >> 3 & 15) << 11 | second & 7 | (second >> 7).flip(-1) << 3


def _scales_in_tiles(scales_NG: Tensor, inputs: int, group: int) -> Tensor:
    """[tiles, chunks, 8, 2, groups of a chunk]."""
    scales_NG = scales_NG.repeat_interleave(inputs // group // scales_NG.shape[1], 1)
    per_chunk = CHUNK // group
    missing = -scales_NG.shape[1] % per_chunk
    scales_NG = torch.nn.functional.pad(_in_tiles(scales_NG), (0, missing))
    by_tile = scales_NG.view(-1, 2, 8, scales_NG.shape[1] // per_chunk, per_chunk)
    return by_tile.permute(0, 3, 2, 1, 4).contiguous()


@dataclass(frozen=True)
class _Half:
    """Constants of a half precision for pairs of numbers: what fma does not change, and what makes
    a whole number of the lowest bits."""

    suffix: str
    one: int
    whole: int  # of which the lowest bit counts ones
    less: int  # -whole - 8


BFLOAT16 = _Half("bf16x2", 0x3F803F80, 0x43004300, 0xC308C308)
FLOAT16 = _Half("f16x2", 0x3C003C00, 0x64006400, 0xE408E408)
SIGNS = 0x80008000  # and minus zero
AND_OR = 0xEA  # of lop3: a & b | c


@triton.constexpr_function
def numbers_assembly(kind, place, dtype, narrow):
    """A word ($2), its scale ($3) and zero ($4) to the two numbers at one place in it. Scales are
    `narrow` or in float32."""
    half = BFLOAT16 if dtype == tl.bfloat16 else FLOAT16
    registers = (
        f".reg .b32 p, a, c, s, one, minus, less, zero; .reg .f32 x, y; .reg .b16 l, h; "
        f"mov.b32 one, {half.one}; "
        f"mov.b32 minus, {half.one | SIGNS}; mov.b32 less, {half.less}; mov.b32 zero, {SIGNS}; "
    )
    if kind <= INT4_ZEROS:
        steps = _int4_steps(kind, place, half, narrow)
    elif kind == INT8:
        # that and the seven low bits, less that or that and 128, by the highest bit
        steps = (
            f"prmt.b32 p, $2, 0, {0x4240 + 0x101 * place}; "
            f"lop3.b32 a, p, 0x007F007F, {half.whole}, {AND_OR}; "
            f"lop3.b32 c, p, 0x00800080, {half.whole}, {AND_OR}; "
            f"fma.rn.{half.suffix} a, c, minus, a; "
        )
    else:
        steps = _float8_steps(place, half)
    scaled = _scale_steps(half, narrow)
    return "{ " + registers + steps + scaled + "mov.b32 {$0, $1}, a; }"


@triton.constexpr_function
def _int4_steps(kind: int, place: int, half: _Half, narrow: bool) -> str:
    # 0x4300 is 128 (0x6400 is 1,024), and its lowest bits count ones; that and 8 is taken away
    steps = (
        f"shr.u32 p, $2, {4 * place}; lop3.b32 a, p, 0x000F000F, {half.whole}, {AND_OR}; "
        f"fma.rn.{half.suffix} a, a, one, less; "
    )
    if kind == INT4_ZEROS:  # whole numbers: exact
        zeros = "mov.b32 c, {$4, $4};" if narrow else f"cvt.rn.{half.suffix}.f32 c, $4, $4;"
        steps += f"{zeros} fma.rn.{half.suffix} a, c, minus, a; "
    return steps


@triton.constexpr_function
def _float8_steps(place: int, half: _Half) -> str:
    """See `_float8_halves`."""
    if place == 0:
        steps = "and.b32 a, $2, 0x87F087F0; "
    else:
        steps = (
            "shf.r.wrap.b32 p, $2, $2, 4; and.b32 p, p, 0x87808780; "
            f"shl.b32 a, $2, 4; lop3.b32 a, a, 0x00700070, p, {AND_OR}; "
        )
    if half is FLOAT16:  # its exponent lies three bits higher
        steps += f"shl.b32 p, a, 3; and.b32 p, p, 0x3F803F80; lop3.b32 a, a, {SIGNS}, p, {AND_OR}; "
    return steps


@triton.constexpr_function
def _scale_steps(half: _Half, narrow: bool) -> str:
    """Codes times scale, rounded once: where both are of the type that is wanted, a product in
    that type is the same."""
    if narrow:
        return f"mov.b32 s, {{$3, $3}}; fma.rn.{half.suffix} a, a, s, zero; "
    if half is FLOAT16:
        widened = "mov.b32 {l, h}, a; cvt.f32.f16 x, l; cvt.f32.f16 y, h; "
    else:
        widened = "shl.b32 p, a, 16; and.b32 c, a, 0xFFFF0000; mov.b32 x, p; mov.b32 y, c; "
    return f"{widened} mul.rn.f32 x, x, $3; mul.rn.f32 y, y, $3; cvt.rn.{half.suffix}.f32 a, y, x; "


@triton.constexpr_function
def _by_assembly(dtype):
    return not INTERPRETED and dtype in (tl.bfloat16, tl.float16)


@triton.constexpr_function
def _without_shift(kind, dtype):
    """What a scale is multiplied by, where the bits of an 8-bit float are not taken for others'."""
    if kind != FLOAT8:
        return 1.0
    return {tl.bfloat16: 2.0**-120, tl.float16: 2.0**-8}.get(dtype, 1.0)


@triton.jit
def load_matrix(
    codes, scales, n, N, at, end, K,
    KIND: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Outputs `n` of N and inputs [at, at + BK) of a packed matrix, as plain numbers."""
    UNIT: tl.constexpr = 64 if KIND <= 5 else 32
    # outputs, unit, thread, half of the unit
    unit = (at // UNIT + tl.arange(0, BK // UNIT))[None, :, None, None]
    thread = tl.arange(0, 4)[None, None, :, None]
    half = tl.arange(0, 2)[None, None, None, :]
    row = n[:, None, None, None]
    place = (row // 16).to(tl.int64) * (K // UNIT * 128) + unit * 128
    place += row % 8 * 16 + thread * 4 + row % 16 // 8 * 2 + half
    words = tl.load(codes + place, (row < N) & (unit * UNIT < end), 0)
    if GROUP == 0:
        scale_at = scales + row // 16 * 16 + row % 8 * 2 + row % 16 // 8
        scale = tl.load(scale_at, row < N, 0)
        zero = scale
    else:
        scale = _load_scales(scales, n, N, at, end, K, UNIT, GROUP, BN, BK)
        zero = scale
        if KIND == 5:
            behind = scales + ((N + 15) // 16).to(tl.int64) * ((K + 127) // 128 * (2048 // GROUP))
            zero = _load_scales(behind, n, N, at, end, K, UNIT, GROUP, BN, BK)
    scale = tl.broadcast_to(scale, words.shape)
    zero = tl.broadcast_to(zero, words.shape)
    first = _numbers(words, scale, zero, 0, KIND, DTYPE)
    second = _numbers(words, scale, zero, 1, KIND, DTYPE)
    if KIND <= 5:
        third = _numbers(words, scale, zero, 2, KIND, DTYPE)
        fourth = _numbers(words, scale, zero, 3, KIND, DTYPE)
        # then odd, which octet, and which 16 of the half
        numbers = tl.join(tl.join(first, second), tl.join(third, fourth))
        numbers = tl.permute(numbers, [0, 1, 3, 6, 5, 2, 4])
    else:
        numbers = tl.permute(tl.join(first, second), [0, 1, 3, 5, 2, 4])
    return tl.reshape(numbers, [BN, BK])


@triton.jit
def _load_scales(
    scales, n, N, at, end, K,
    UNIT: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Scales by output, unit, one for all threads, and half of the unit."""
    CHUNKS: tl.constexpr = (BK + 127) // 128
    GROUPS: tl.constexpr = BK // CHUNKS // GROUP  # of a chunk
    row = n[:, None, None]
    chunk = at // 128 + tl.arange(0, CHUNKS)[None, :, None]
    group = tl.arange(0, GROUPS)[None, None, :]
    if BK < 128:
        group += at % 128 // GROUP
    place = ((row // 16).to(tl.int64) * ((K + 127) // 128) + chunk) * (2048 // GROUP)
    place += (row % 8 * 2 + row % 16 // 8) * (128 // GROUP) + group
    scale = tl.load(scales + place, (row < N) & (chunk * 128 < end), 0)
    HALVES: tl.constexpr = GROUP // (UNIT // 2)
    scale = tl.reshape(scale, [BN, CHUNKS * GROUPS, 1])
    scale = tl.broadcast_to(scale, [BN, CHUNKS * GROUPS, HALVES])
    return tl.reshape(scale, [BN, BK // UNIT, 1, 2])


@triton.jit
def _numbers(words, scale, zero, PLACE: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """What the codes at one place of all words stand for, even and odd."""
    if _by_assembly(DTYPE):
        NARROW: tl.constexpr = scale.dtype == DTYPE
        even, odd = tl.inline_asm_elementwise(
            numbers_assembly(KIND, PLACE, DTYPE, NARROW),
            "=h,=h,r,h,h" if NARROW else "=h,=h,r,f,f",
            [words, scale, zero], (DTYPE.value, DTYPE.value), True, 1,
        )  # fmt: skip
    else:
        scale = scale.to(tl.float32) * _without_shift(KIND, DTYPE)
        less = zero.to(tl.float32) * (KIND == 5)
        even = ((_codes(words, PLACE, 0, KIND) - less) * scale).to(DTYPE)
        odd = ((_codes(words, PLACE, 1, KIND) - less) * scale).to(DTYPE)
    return tl.join(even, odd)


@triton.jit
def _codes(words, PLACE: tl.constexpr, ODD: tl.constexpr, KIND: tl.constexpr):
    """What `numbers_assembly` does, without a scale."""
    half = words >> 16 * ODD
    if KIND <= 5:
        codes = ((half >> 4 * PLACE) & 15).to(tl.float32) - 8
    elif KIND == 8:
        codes = (half >> 8 * PLACE).to(tl.int8).to(tl.float32)
    else:
        if PLACE == 0:
            sign = half >> 15
            low = half >> 4
        else:
            sign = words >> 16 * (1 - ODD) + 3
            low = ((half >> 11) & 15) << 3 | (half & 7)
        # a 16-bit float has a bias that is 8 more, and more bits of fraction
        bits = (sign & 1) << 15 | (low & 127) << 7
        codes = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
    return codes


@triton.jit
def _widen(
    codes, scales, out, N, K,
    KIND: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.program_id(1) * BK
    matrix = load_matrix(codes, scales, n, N, at, K, K, KIND, GROUP, BN, BK, out.dtype.element_ty)
    k = at + tl.arange(0, BK)
    place = out + n[:, None].to(tl.int64) * K + k[None, :]
    tl.store(place, matrix, (n < N)[:, None] & (k < K)[None, :])
