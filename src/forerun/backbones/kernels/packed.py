"""Matrices of 4 or 8 bits per weight, widened inside of a product.

What a packed matrix stands for is a plain one: code times scale, rounded to the numbers of the rows
that it meets. So a product with it has the bits of a product with that plain matrix, and where
many rows make it worth while, the plain matrix is made and the usual products take over.

N outputs, K inputs, G groups of inputs that share a scale.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CODES_PER_WORD = 8  # 4-bit codes in an int32
PLAIN = 16  # bits of a matrix that is not packed
BLOCK = 64  # inputs must come in such blocks
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [N, K] in few bits: 8-bit numbers with a scale per output, or words of eight 4-bit
    codes, the lowest first and 8 above its value, with a scale per group of inputs."""

    codes: Tensor
    scales_NG: Tensor
    bits: int
    dtype: torch.dtype  # of the matrix that it stands for

    @property
    def shape(self) -> tuple[int, int]:
        """[in, out], as plain matrices are given to a product."""
        per_code = CODES_PER_WORD if self.bits == 4 else 1
        return self.codes.shape[1] * per_code, len(self.codes)

    @property
    def group(self) -> int:
        return self.shape[0] // self.scales_NG.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales_NG.nbytes

    def widened(self) -> Tensor:
        """The plain matrix, [N, K]."""
        inputs, outputs = self.shape
        out_NK = torch.empty(outputs, inputs, dtype=self.dtype, device=self.codes.device)
        grid = (triton.cdiv(outputs, 32), triton.cdiv(inputs, 128))
        _widen[grid](
            self.codes, self.scales_NG, out_NK, outputs, inputs,
            BITS=self.bits, GROUP=self.group, BN=32, BK=128,
        )  # fmt: skip
        return out_NK


def packed_4(codes_NK: Tensor, scales_NG: Tensor, dtype: torch.dtype) -> PackedMatrix:
    """From whole numbers in [-8, 7]."""
    above = (codes_NK.int() + 8).unflatten(1, (-1, CODES_PER_WORD))
    shifts = 4 * torch.arange(CODES_PER_WORD, device=codes_NK.device)
    words = (above.long() << shifts).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return PackedMatrix(words.contiguous(), scales_NG.contiguous(), 4, dtype)


def packed_8(codes_NK: Tensor, scales_N1: Tensor, dtype: torch.dtype) -> PackedMatrix:
    """From whole numbers in [-127, 127], or 8-bit floats."""
    return PackedMatrix(codes_NK.contiguous(), scales_N1.float().contiguous(), 8, dtype)


def packed_fp8(weight_NK: Tensor) -> PackedMatrix:
    """8-bit floats with a scale per output. Scales are powers of two: they cost no precision."""
    largest = weight_NK.float().abs().amax(1, keepdim=True).clamp_min(1e-30)
    scales = torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(FP8).max)))
    return packed_8((weight_NK.float() / scales).to(FP8), scales, weight_NK.dtype)


@triton.jit
def load_matrix(
    codes, scales, n, N, at, end, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Outputs `n` and inputs [at, at + BK) of a packed matrix, as plain numbers."""
    inside = (n < N)[:, None]
    row = n[:, None].to(tl.int64)
    if BITS == 8:
        k = at + tl.arange(0, BK)
        numbers = tl.load(codes + row * K + k[None, :], inside & (k < end)[None, :], 0.0)
        scale = tl.load(scales + n, n < N, 0)
        matrix = (numbers.to(tl.float32) * scale[:, None]).to(DTYPE)
    else:
        first = at + 8 * tl.arange(0, BK // 8)
        kept = inside & (first < end)[None, :]
        words = tl.load(codes + row * (K // 8) + first[None, :] // 8, kept, 0)
        shifts = 4 * tl.arange(0, 8)
        numbers = ((words[:, :, None] >> shifts[None, None, :]) & 15) - 8
        numbers = tl.reshape(numbers, [BN, BK // GROUP, GROUP]).to(tl.float32)
        first = at + GROUP * tl.arange(0, BK // GROUP)
        kept = inside & (first < end)[None, :]
        scale = tl.load(scales + row * (K // GROUP) + first[None, :] // GROUP, kept, 0)
        matrix = tl.reshape((numbers * scale.to(tl.float32)[:, :, None]).to(DTYPE), [BN, BK])
    return matrix


@triton.jit
def _widen(
    codes, scales, out, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.program_id(1) * BK
    matrix = load_matrix(codes, scales, n, N, at, K, K, BITS, GROUP, BN, BK, out.dtype.element_ty)
    k = at + tl.arange(0, BK)
    place = out + n[:, None].to(tl.int64) * K + k[None, :]
    tl.store(place, matrix, (n < N)[:, None] & (k < K)[None, :])
