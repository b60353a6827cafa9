"""Matrices of 4 or 8 bits per weight, widened inside of a product.

What a packed matrix stands for is a plain one: (code - zero) times scale, computed in float32 and
rounded to the numbers of the rows that it meets. So a product with it has the bits of a product
with that plain matrix, and where many rows make it worth while, the plain matrix is made and the
usual products take over.

Codes lie in the order in which matrix units want their operands: of every 16 inputs a thread holds
{2t, 2t + 1, 2t + 8, 2t + 9}, for t = 0 to 3, and in memory the codes of one t lie side by side, for
64 inputs. So a code is widened by the thread that multiplies it, in pairs: four instructions for
two 4-bit codes, which is less than it takes to load them.

N outputs, K inputs, G groups of inputs that share a scale.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.backbones.products import BYTE, GROUP, NIBBLE, Packed, quantised
from forerun.backbones.quantised import Quantised

BLOCK = 64  # inputs come in such blocks
# How a matrix is packed. Kernels compare with these numbers, which Triton does not look up.
INT4 = 4
INT4_ZEROS = 5  # with a zero per group, behind the scales
INT8 = 8
FLOAT8 = 9  # e4m3
PLAIN = 16  # not packed
FP8 = torch.float8_e4m3fn
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class PackedMatrix(Packed):
    """A matrix [N, K] in few bits. Made by `packed_4`, `packed_8` and `packed_fp8`."""

    codes: Tensor  # [N, K / 4] or [N, K / 2]: words of four or two codes
    scales_GN: Tensor  # [2 G, N] with zeros behind scales
    kind: int
    dtype: torch.dtype  # of the matrix that it stands for

    @property
    def shape(self) -> tuple[int, int]:
        """[in, out], as plain matrices are given to a product."""
        per_word = 2 if self.kind in (INT8, FLOAT8) else 4
        return self.codes.shape[1] * per_word, len(self.codes)

    @property
    def group(self) -> int:
        """How many inputs share a scale; 0 where all do."""
        groups = len(self.scales_GN) // (2 if self.kind == INT4_ZEROS else 1)
        return self.shape[0] // groups if groups > 1 or self.kind < INT8 else 0

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales_GN.nbytes

    def widened(self) -> Tensor:
        """The plain matrix, [N, K]."""
        inputs, outputs = self.shape
        out_NK = torch.empty(outputs, inputs, dtype=self.dtype, device=self.codes.device)
        grid = (triton.cdiv(outputs, 32), triton.cdiv(inputs, 128))
        _widen[grid](
            self.codes, self.scales_GN, out_NK, outputs, inputs,
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
    # a group holds whole parts of a block: 32 inputs with 4 bits, 16 with 8
    if inputs % BLOCK or matrix.group % 32:
        return None
    if matrix.bits == "int4":
        return packed_4(matrix.codes_OI, matrix.scales_OG, dtype, matrix.zeros_OG)
    return packed_8(matrix.codes_OI, matrix.scales_OG, dtype)


def _narrowed(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the type of the rows, if that changes none: then a product in that type is enough
    to apply them."""
    narrow = scales.to(dtype)
    return narrow if torch.equal(narrow.float(), scales.float()) else scales.float()


def packed_4(
    codes_NK: Tensor, scales_NG: Tensor, dtype: torch.dtype, zeros_NG: Tensor | None = None
) -> PackedMatrix:
    """From whole numbers in [-8, 7]; with zeros, which are such numbers too, from those less their
    group's zero."""
    outputs, inputs = codes_NK.shape
    # outputs, block, half of it, k16, octet, thread, odd: two bits for k16 and octet in a word
    above = (codes_NK.to(torch.int16) + 8).view(outputs, inputs // BLOCK, 2, 2, 2, 4, 2)
    shifts = torch.tensor([[0, 4], [8, 12]], device=codes_NK.device)[:, :, None, None]
    words = (above.int() << shifts).sum((3, 4))  # outputs, block, half, thread, odd
    words = words.transpose(2, 3).reshape(outputs, inputs // 4)
    words = torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)
    scales_GN = _narrowed(scales_NG, dtype).t()
    if zeros_NG is None:
        return PackedMatrix(words.contiguous(), scales_GN.contiguous(), INT4, dtype)
    both = torch.cat([scales_GN, zeros_NG.t().to(scales_GN.dtype)])
    return PackedMatrix(words.contiguous(), both.contiguous(), INT4_ZEROS, dtype)


def packed_8(codes_NK: Tensor, scales_NG: Tensor, dtype: torch.dtype) -> PackedMatrix:
    """From whole numbers in [-127, 127], or 8-bit floats, with a scale per output or per group of
    inputs."""
    kind = FLOAT8 if codes_NK.dtype == FP8 else INT8
    outputs, inputs = codes_NK.shape
    # outputs, block, k16, octet, thread, odd: an octet's are the low or high bytes of words
    by_input = codes_NK.view(torch.int8).view(outputs, inputs // BLOCK, 4, 2, 4, 2)
    by_thread = by_input.permute(0, 1, 4, 2, 5, 3).reshape(outputs, inputs).contiguous()
    words = by_thread.view(torch.int16)
    scales_GN = _narrowed(scales_NG, dtype).t().contiguous()
    return PackedMatrix(words, scales_GN, kind, dtype)


def packed_fp8(weight_NK: Tensor) -> PackedMatrix:
    """8-bit floats with a scale per output. Scales are powers of two: they cost no precision."""
    largest = weight_NK.float().abs().amax(1, keepdim=True).clamp_min(1e-30)
    scales = torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(FP8).max)))
    codes = (weight_NK.float() / scales).to(FP8)
    return packed_8(codes, scales, weight_NK.dtype)


@dataclass(frozen=True)
class _Half:
    """Constants of a half precision for pairs of numbers: what fma does not change, what makes a
    whole number of the lowest bits, and the place of an 8-bit float's exponent."""

    suffix: str
    one: int
    minus_zero: int
    whole: int  # of which the lowest bit counts ones
    less: int  # -whole - 8
    shift: int
    fraction: int  # mask of exponent and fraction
    bias: int  # 2 to the difference of biases


BFLOAT16 = _Half(
    "bf16x2", 0x3F803F80, 0x80008000, 0x43004300, 0xC308C308, 4, 0x07F007F0, 0x7B807B80
)
FLOAT16 = _Half("f16x2", 0x3C003C00, 0x80008000, 0x64006400, 0xE408E408, 1, 0x3F803F80, 0x5C005C00)
AND_OR = 0xEA  # of lop3: a & b | c


@triton.constexpr_function
def _assembly(kind, place, dtype):
    """Two words to the pair of numbers at one place in them, exactly."""
    half = BFLOAT16 if dtype == tl.bfloat16 else FLOAT16
    fma = f"fma.rn.{half.suffix} $0"
    constants = (
        f".reg .b32 p, a, c, one, minus, less, zero, bias; mov.b32 one, {half.one}; "
        f"mov.b32 minus, {half.one | half.minus_zero}; mov.b32 less, {half.less}; "
        f"mov.b32 zero, {half.minus_zero}; mov.b32 bias, {half.bias}; "
    )
    if kind <= INT4_ZEROS:
        # 0x4300 is 128 (0x6400 is 1,024), and its lowest bits count ones; that and 8 is taken away
        steps = (
            f"shr.u32 p, $1, {4 * place}; lop3.b32 a, p, 0x000F000F, {half.whole}, {AND_OR}; "
            f"{fma}, a, one, less;"
        )
    elif kind == INT8:
        # that and the seven low bits, less that or that and 128, by the highest bit
        steps = (
            f"prmt.b32 p, $1, 0, {0x4240 + 0x101 * place}; "
            f"lop3.b32 a, p, 0x007F007F, {half.whole}, {AND_OR}; "
            f"lop3.b32 c, p, 0x00800080, {half.whole}, {AND_OR}; {fma}, c, minus, a;"
        )
    else:
        # sign, exponent and fraction to their places, then the other bias
        steps = (
            f"prmt.b32 p, $1, 0, {0x2404 + 0x1010 * place}; shr.u32 a, p, {half.shift}; "
            f"and.b32 a, a, {half.fraction}; "
            f"lop3.b32 a, p, {half.minus_zero}, a, {AND_OR}; {fma}, a, bias, zero;"
        )
    return "{ " + constants + steps + " }"


@triton.constexpr_function
def _times(dtype):
    half = BFLOAT16 if dtype == tl.bfloat16 else FLOAT16
    return (
        f"{{ .reg .b32 zero; mov.b32 zero, {half.minus_zero}; "
        f"fma.rn.{half.suffix} $0, $1, $2, zero; }}"
    )


@triton.constexpr_function
def _by_assembly(dtype):
    return not INTERPRETED and dtype in (tl.bfloat16, tl.float16)


@triton.jit
def load_matrix(
    codes, scales, n, N, at, end, K,
    KIND: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Outputs `n` of N and inputs [at, at + BK) of a packed matrix, as plain numbers."""
    PER_WORD: tl.constexpr = 4 if KIND <= 5 else 2
    word = tl.arange(0, BK // PER_WORD)
    inside = at + word // (64 // PER_WORD) * 64 < end
    stride = tl.multiple_of(K // PER_WORD, 16)
    first = tl.multiple_of(at // PER_WORD, 16)
    words = tl.load(
        codes + n[:, None].to(tl.int64) * stride + (first + word)[None, :],
        (n < N)[:, None] & inside[None, :],
        0,
    )
    # outputs, block, thread, part of the block (32 or 16 inputs), odd
    PARTS: tl.constexpr = 8 // PER_WORD
    words = tl.reshape(words, [BN, BK // 64, 4, PARTS, 2])
    if GROUP == 0:
        scale = tl.reshape(tl.load(scales + n, n < N, 0), [BN, 1, 1, 1, 1])
        scale = tl.broadcast_to(scale, words.shape)
        zero = scale
    else:
        k = at + 64 // PARTS * tl.arange(0, BK // 64 * PARTS)
        kept = (k < end)[:, None] & (n < N)[None, :]
        scale_at = scales + (k // GROUP)[:, None].to(tl.int64) * N + n[None, :]
        scale = _for_words(tl.load(scale_at, kept, 0), BN, BK, PARTS)
        zero = scale
        if KIND == 5:
            behind = (K // GROUP).to(tl.int64) * N
            zero = _for_words(tl.load(scale_at + behind, kept, 0), BN, BK, PARTS)
    first = _numbers(words, scale, zero, 0, KIND, DTYPE)
    second = _numbers(words, scale, zero, 1, KIND, DTYPE)
    if KIND <= 5:
        third = _numbers(words, scale, zero, 2, KIND, DTYPE)
        fourth = _numbers(words, scale, zero, 3, KIND, DTYPE)
        # then which octet, and which 16 of the part
        numbers = tl.join(tl.join(first, second), tl.join(third, fourth))
        numbers = tl.permute(numbers, [0, 1, 3, 6, 5, 2, 4])
    else:
        numbers = tl.permute(tl.join(first, second), [0, 1, 3, 5, 2, 4])
    return tl.reshape(numbers, [BN, BK])


@triton.jit
def _for_words(values, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr):
    """Values by part of a block and output, for every word."""
    values = tl.reshape(tl.trans(values), [BN, BK // 64, 1, PARTS, 1])
    return tl.broadcast_to(values, [BN, BK // 64, 4, PARTS, 2])


@triton.jit
def _numbers(words, scale, zero, PLACE: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """What the codes at one place of all words stand for."""
    if _by_assembly(DTYPE):
        codes = tl.inline_asm_elementwise(
            _assembly(KIND, PLACE, DTYPE), "=r,r", [words], DTYPE.value, True, 2
        )
    elif KIND <= 5:
        codes = ((words >> 4 * PLACE) & 15).to(tl.float32) - 8
    elif KIND == 8:
        codes = (words >> 8 * PLACE).to(tl.int8).to(tl.float32)
    else:
        # a 16-bit float has a bias that is 8 more, and more bits of fraction
        byte = words >> 8 * PLACE
        bits = ((byte & 128) << 8) | ((byte & 127) << 7)
        codes = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
    if KIND == 5:
        codes = codes - zero.to(codes.dtype)  # whole numbers: exact
    return _scaled(codes, scale, DTYPE)


@triton.jit
def _scaled(codes, scale, DTYPE: tl.constexpr):
    """Codes times scale, rounded once: where both are of the type that is wanted, a product in that
    type is the same."""
    if _by_assembly(DTYPE) and scale.dtype == DTYPE:
        numbers = tl.inline_asm_elementwise(
            _times(DTYPE), "=r,r,r", [codes, scale], DTYPE.value, True, 2
        )
    else:
        numbers = (codes.to(tl.float32) * scale.to(tl.float32)).to(DTYPE)
    return numbers


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
