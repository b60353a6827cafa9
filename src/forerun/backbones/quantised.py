"""Matrices that a checkpoint has quantised already: what its files say of them, as numbers.

O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.backbones.products import GROUP, Codes, Int4Product, Product, keeps_bits


@dataclass(frozen=True)
class Quantised:
    """A matrix [O, I]: (code - zero) times scale. Codes are whole numbers of 4 or 8 bits, or 8-bit
    floats."""

    bits: str  # int4 | int8 | fp8
    codes_OI: Tensor  # int8, or float8_e4m3fn
    scales_OG: Tensor
    zeros_OG: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes_OI.shape

    @property
    def group(self) -> int:
        return self.codes_OI.shape[1] // self.scales_OG.shape[1]

    def widened(self) -> Tensor:
        """In float32."""
        groups = (self.scales_OG.shape[1], self.group)
        codes_OGI = self.codes_OI.float().unflatten(1, groups)
        if self.zeros_OG is not None:
            codes_OGI = codes_OGI - self.zeros_OG.float()[..., None]
        return (codes_OGI * self.scales_OG.float()[..., None]).flatten(1)

    def in_groups(self, size: int) -> tuple[Codes, Tensor | None]:
        """Codes in smaller groups, and the offset of each, if it has zeros."""
        repeats = self.group // size
        scales_OG = self.scales_OG.float().repeat_interleave(repeats, 1)
        offsets_OG = None
        if self.zeros_OG is not None:
            offsets_OG = -self.zeros_OG.float().repeat_interleave(repeats, 1) * scales_OG
        return Codes(self.codes_OI, scales_OG), offsets_OG

    def by_outputs(self, change: Callable[[Tensor], Tensor]) -> Quantised:
        """With other outputs, or another order of them."""
        zeros = None if self.zeros_OG is None else change(self.zeros_OG)
        return Quantised(self.bits, change(self.codes_OI), change(self.scales_OG), zeros)


class QuantisedLinear(nn.Module):
    """Stands where a network has a linear layer, until a backbone takes its matrix over."""

    bias: Tensor | None

    def __init__(self, matrix: Quantised, bias: Tensor | None):
        super().__init__()
        self.matrix = matrix
        self.bias = bias

    @property
    def weight(self) -> Quantised:
        return self.matrix

    def forward(self, x: Tensor) -> Tensor:
        """For networks that are run as they are."""
        return F.linear(x, self.matrix.widened().to(x.dtype), self.bias)


def joined_codes(weights: Sequence[object]) -> Quantised | None:
    """Several matrices as one, where all are quantised alike."""
    parts = [weight for weight in weights if isinstance(weight, Quantised)]
    alike = {(part.bits, part.group, part.zeros_OG is None) for part in parts}
    if len(parts) < len(weights) or len(alike) > 1:
        return None
    zeros = [part.zeros_OG for part in parts if part.zeros_OG is not None]
    return Quantised(
        parts[0].bits,
        torch.cat([part.codes_OI for part in parts]),
        torch.cat([part.scales_OG for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def int4_product(matrix: Quantised, bias: Tensor | None) -> Product | None:
    """The product of a 4-bit matrix on a CPU, with the codes that it has; nothing where its groups
    do not fit, or where it does not run."""
    if matrix.bits != "int4" or matrix.group % GROUP:
        return None
    codes, offsets_OG = matrix.in_groups(GROUP)
    try:
        product = Int4Product.of_codes(codes, offsets_OG, bias)
        return product if keeps_bits(product, matrix.codes_OI.shape[1]) else None
    except Exception:  # an operation that this torch does not have here
        return None
