"""Matrix products on a CPU, each in the way that is fastest here.

A float matrix lies in memory by outputs or by inputs: which is faster depends on the processor. A
quantised one is 4 or 8 bits per weight, and the row that it meets becomes 8-bit numbers with one
scale of its own. So what a row gives never depends on the rows beside it, and `keeps_bits` checks
that it does not; `has_room` checks that sums do not overflow. A kind of product that fails is not
taken.

- `Int4Product`: groups of 32 weights with a scale each, by torch's dynamic 4-bit product.
- `Int8ByNibbles`: an 8-bit weight as 16 times one nibble plus another, by the same product.
- `Int8Product`: one scale per output, by oneDNN; sums of whole numbers are exact in any order.
- `WidenedProduct`: the values of a quantised matrix as floats, where nothing else runs.

T rows, I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
CHECKED_ROWS = (1, 2, 3, 8, 16, 32)
NIBBLE = (-8, 7)
TWO_NIBBLES = (-119, 119)  # what 16 * [-7, 7] + [-8, 7] reaches on both sides
BYTE = (-127, 127)
WEIGHTS_AT_ONCE = 1 << 20  # that are quantised: what is made in between is small
SUM_SCALE = 0.125  # so that the sum of a group is about as large as its largest input
ROUNDED = 1e-3  # the square of an input's rounding to 8 bits, over that of the input, roughly
ON_A_GRID = 0.5  # of the error without offsets: weights that were not quantised before have more


class Layout(NamedTuple):
    """What a product wants to see of a row: its inputs, some times over, and sums of groups, for
    the two nibbles of their offsets."""

    inputs: int
    copies: int = 1
    groups: int = 0


class Inputs:
    """Memory for the rows that a product takes. Who makes them writes to `x_TI`; what else the
    product wants lies behind, so that nothing is joined. It serves all products of a layout."""

    def __init__(self, rows: int, layout: Layout, dtype: torch.dtype = torch.float32):
        inputs, copies, groups = layout
        end = inputs * copies
        width = end + 2 * (groups + -groups % GROUP)
        empty = torch.zeros if groups else torch.empty
        self.all_TN = empty(rows, width, dtype=dtype)
        self.x_TI = self.all_TN[:, :inputs] if width > inputs else self.all_TN
        self._again_TI = self.all_TN[:, inputs:end] if copies == 2 else None
        self._sums_T2G: Tensor | None = None
        if groups:
            self._sums_T2G = self.all_TN[:, end:].unflatten(1, (2, -1))[..., :groups]
            groups_TGI = self.x_TI.unflatten(1, (groups, GROUP))
            self._groups_T2GI = groups_TGI[:, None].expand(-1, 2, -1, -1)
            self._sum_scale = torch.tensor(SUM_SCALE)  # a number would be made a tensor every time

    def finished(self) -> Tensor:
        """All that a product takes, once the inputs are there."""
        if self._again_TI is not None:
            self._again_TI.copy_(self.x_TI)
        if self._sums_T2G is not None:
            torch.sum(self._groups_T2GI, -1, out=self._sums_T2G)
            self._sums_T2G.mul_(self._sum_scale)
        return self.all_TN


class Product(Protocol):
    """A matrix that multiplies rows, and adds its bias if it has one."""

    bytes: int
    layout: Layout

    def multiply(self, all_TN: Tensor) -> Tensor:
        """The product of finished inputs."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...


class _OfInputs(ABC):
    """A product that is asked with rows alone."""

    layout: Layout

    @abstractmethod
    def multiply(self, all_TN: Tensor) -> Tensor: ...

    def __call__(self, x_TI: Tensor) -> Tensor:
        inputs = Inputs(len(x_TI), self.layout, x_TI.dtype)
        inputs.x_TI.copy_(x_TI)
        return self.multiply(inputs.finished())


class FloatProduct(_OfInputs):
    """A plain matrix [in, out]."""

    def __init__(self, weight_IO: Tensor, bias: Tensor | None):
        self._weight_IO = weight_IO
        self._bias = bias
        self.layout = Layout(len(weight_IO))
        self.bytes = weight_IO.nbytes

    def multiply(self, all_TN: Tensor) -> Tensor:
        if self._bias is None:
            return torch.mm(all_TN, self._weight_IO)
        return torch.addmm(self._bias, all_TN, self._weight_IO)


class Packed(ABC):
    """A matrix [in, out] in few bits for a GPU, whose kernels widen it as they multiply. Its bias
    is not in it."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @abstractmethod
    def widened(self) -> Tensor:
        """The plain matrix that it stands for, [out, in]."""


class Codes(NamedTuple):
    """A quantised matrix: whole numbers, and a scale per group of them."""

    codes_OI: Tensor  # int8
    scales_OG: Tensor

    def widened(self) -> Tensor:
        groups = self.scales_OG.shape[1]
        values_OGI = self.codes_OI.unflatten(1, (groups, -1)) * self.scales_OG[..., None]
        return values_OGI.flatten(1)


def quantised(weight_OI: Tensor, span: tuple[int, int], group: int, *, half: bool = True) -> Codes:
    """The nearest whole numbers within a span. Of several scales per group the one with the least
    squared error is taken; `half` rounds it to bfloat16.

    The scale of a file in blocks (its largest value stands for the lowest number) is among them, so
    that a matrix that was on such a grid stays on it.
    """
    rows = max(1, WEIGHTS_AT_ONCE // weight_OI.shape[1])
    parts = [_quantised_rows(part, span, group, half) for part in weight_OI.split(rows)]
    return _below(parts)


def _below(parts: Iterable[Codes]) -> Codes:
    """Matrices of more outputs."""
    return Codes(*(torch.cat(found) for found in zip(*parts)))


def _quantised_rows(weight_OI: Tensor, span: tuple[int, int], group: int, half: bool) -> Codes:
    low, high = span
    w_OGI = weight_OI.float().unflatten(1, (-1, group))
    lowest, highest = w_OGI.aminmax(dim=-1, keepdim=True)
    largest = torch.maximum(highest, -lowest)
    candidates = [largest / high]
    if high < 16:  # where numbers are few, what is cut off and what is rounded must balance
        signed = torch.where(highest > -lowest, highest, lowest)
        candidates += [signed / low, largest / (high + 0.75), largest / (high + 1.5)]
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for scale in candidates:
        scale = torch.where(scale == 0, 1.0, scale)
        if half:
            scale = scale.bfloat16().float()
        codes = (w_OGI * scale.reciprocal()).round_().clamp_(low, high)
        if len(candidates) == 1:
            return Codes(codes.flatten(1).to(torch.int8), scale.squeeze(-1))
        error = (codes * scale).sub_(w_OGI).square_().sum(-1, keepdim=True)
        if best is None:
            best = (codes, scale, error)
            continue
        better = error < best[2]
        best = (
            torch.where(better, codes, best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, error, best[2]),
        )
    assert best is not None
    codes, scale, _ = best
    return Codes(codes.flatten(1).to(torch.int8), scale.squeeze(-1))


class Offsets(NamedTuple):
    """A quantised matrix whose groups have a lowest value of their own: code * scale + offset."""

    codes: Codes
    offsets_OG: Tensor
    plain: Codes  # the nearest without offsets
    error: float  # of all its values, squared
    plain_error: float

    def widened(self) -> Tensor:
        return self.codes.widened() + self.offsets_OG.repeat_interleave(GROUP, 1)


def quantised_with_offsets(weight_OI: Tensor) -> Offsets:
    """The nearest of 16 values from the lowest to the highest of each group: files of the kinds
    Q4_0, Q4_1 and Q4_K have such weights, and keep them. A group in which that would be worth less
    than it costs has the offset 0."""
    rows = max(1, WEIGHTS_AT_ONCE // weight_OI.shape[1])
    parts = [_offset_rows(part) for part in weight_OI.split(rows)]
    return Offsets(
        codes=_below(part.codes for part in parts),
        offsets_OG=torch.cat([part.offsets_OG for part in parts]),
        plain=_below(part.plain for part in parts),
        error=sum(part.error for part in parts),
        plain_error=sum(part.plain_error for part in parts),
    )


def _offset_rows(weight_OI: Tensor) -> Offsets:
    w_OGI = weight_OI.float().unflatten(1, (-1, GROUP))
    low, high = w_OGI.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).bfloat16().float()
    scale = torch.where(scale == 0, 1.0, scale)
    own = ((w_OGI - low) * scale.reciprocal()).round_().clamp_(0, 15).sub_(8)
    plain = _quantised_rows(weight_OI, NIBBLE, GROUP, half=True)
    codes = plain.codes_OI.unflatten(1, (-1, GROUP)).float()
    found = _Groups(own, scale, low + 8 * scale), _Groups(codes, plain.scales_OG[..., None])
    errors = [groups.error(w_OGI) for groups in found]
    costs = [error + ROUNDED * groups.noise() for groups, error in zip(found, errors)]
    taken = costs[0] < costs[1]
    pairs = zip(*(groups.with_offset() for groups in found))
    chosen, scale, offset = (torch.where(taken, one, other) for one, other in pairs)
    return Offsets(
        codes=Codes(chosen.flatten(1).to(torch.int8), scale.squeeze(-1)),
        offsets_OG=offset.squeeze(-1),
        plain=plain,
        error=float(torch.where(taken, errors[0], errors[1]).sum()),
        plain_error=float(errors[1].sum()),
    )


class _Groups(NamedTuple):
    """One way to write weights as groups."""

    codes_OGI: Tensor
    scale_OG1: Tensor
    offset_OG1: Tensor | None = None

    def with_offset(self) -> tuple[Tensor, Tensor, Tensor]:
        offset = self.offset_OG1
        return *self[:2], torch.zeros_like(self.scale_OG1) if offset is None else offset

    def error(self, w_OGI: Tensor) -> Tensor:
        """Of all values of a group, squared."""
        codes, scale, offset = self.with_offset()
        return (codes * scale).add_(offset).sub_(w_OGI).square_().sum(-1, keepdim=True)

    def noise(self) -> Tensor:
        """What one step of rounding in every input and in their sum would do, squared: where a
        few large weights share a group, an offset and its codes are large and cancel."""
        codes, scale, offset = self.with_offset()
        return (codes * scale).square_().sum(-1, keepdim=True) + (offset / SUM_SCALE).square()


def _nibbles(found: Codes) -> tuple[Codes, Codes]:
    """8-bit codes as 16 times one nibble plus another."""
    codes_OI, scales_OG = found
    high_OI = (codes_OI + 8) >> 4
    return Codes(high_OI, 16 * scales_OG), Codes(codes_OI - (high_OI << 4), scales_OG)


def _beside(*parts: Codes) -> Codes:
    """Matrices of more inputs."""
    return Codes(*(torch.cat(found, 1) for found in zip(*parts)))


class Int4Product(_OfInputs):
    """A 4-bit matrix in groups of 32, times rows that become 8-bit numbers on the way.

    Where its weights are on a grid with offsets, as those of a 4-bit file are, it keeps them: an
    offset meets the sum of its group of inputs, so those sums are more inputs.
    """

    def __init__(self, weight_OI: Tensor, bias: Tensor | None = None):
        found = quantised_with_offsets(weight_OI)
        self.layout = Layout(weight_OI.shape[1])
        on_a_grid = found.error < ON_A_GRID * found.plain_error
        codes = self._with_sums(found.codes, found.offsets_OG) if on_a_grid else found.plain
        self._pack(codes, bias)

    @classmethod
    def of_codes(cls, codes: Codes, offsets_OG: Tensor | None, bias: Tensor | None) -> Int4Product:
        """Of a matrix that is quantised in groups of 32 already."""
        made = cls.__new__(cls)
        made.layout = Layout(codes.codes_OI.shape[1])
        made._pack(codes if offsets_OG is None else made._with_sums(codes, offsets_OG), bias)
        return made

    def _with_sums(self, codes: Codes, offsets_OG: Tensor) -> Codes:
        groups = offsets_OG.shape[1]
        self.layout = self.layout._replace(groups=groups)
        # In 4 bits the large offset of one group would round away those of 31 others.
        offsets_OG = F.pad(offsets_OG / SUM_SCALE, (0, -groups % GROUP))
        return _beside(codes, *_nibbles(quantised(offsets_OG, TWO_NIBBLES, GROUP)))

    def _pack(self, found: Codes, bias: Tensor | None) -> None:
        self.outputs, self.inputs = found.codes_OI.shape
        above = (found.codes_OI + 8).to(torch.uint8)
        pairs = above[:, ::2] | (above[:, 1::2] << 4)
        self._packed = torch.ops.aten._dyn_quant_pack_4bit_weight(
            pairs.contiguous(),
            found.scales_OG.bfloat16().contiguous(),
            None if bias is None else bias.float(),
            GROUP,
            self.inputs,
            self.outputs,
        )
        self.bytes = self._packed.nbytes

    def multiply(self, all_TN: Tensor) -> Tensor:
        return torch.ops.aten._dyn_quant_matmul_4bit(
            all_TN, self._packed, GROUP, self.inputs, self.outputs
        )


class Int8ByNibbles(Int4Product):
    """An 8-bit matrix in groups of 32 as a 4-bit one with twice the inputs: w = 16 high + low."""

    def __init__(self, weight_OI: Tensor, bias: Tensor | None = None):
        self.layout = Layout(weight_OI.shape[1], copies=2)
        self._pack(_beside(*_nibbles(quantised(weight_OI, TWO_NIBBLES, GROUP))), bias)


class Int8Product(_OfInputs):
    """An 8-bit matrix with a scale per output, times rows as 8-bit numbers with a scale each."""

    def __init__(self, weight_OI: Tensor, bias: Tensor | None = None):
        codes_OI, scales_O1 = quantised(weight_OI, BYTE, weight_OI.shape[1], half=False)
        self._packed = torch.ops.onednn.qlinear_prepack(codes_OI, [1, codes_OI.shape[1]])
        self._scales_O = scales_O1[:, 0].contiguous()
        self._zeros_O = torch.zeros(len(codes_OI), dtype=torch.int32)
        self._bias = bias
        self.layout = Layout(codes_OI.shape[1])
        self.bytes = codes_OI.nbytes + self._scales_O.nbytes

    def multiply(self, x_TI: Tensor) -> Tensor:
        scale_T1 = x_TI.abs().amax(-1, keepdim=True).mul_(1 / 127).clamp_min_(1e-30)
        codes_TI = (x_TI / scale_T1).round_().to(torch.int8)
        y_TO = torch.ops.onednn.qlinear_pointwise(
            codes_TI, 1.0, 0, self._packed, self._scales_O, self._zeros_O,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        y_TO = y_TO * scale_T1
        return y_TO if self._bias is None else y_TO.add_(self._bias)


class WidenedProduct(_OfInputs):
    """A quantised matrix as floats: for machines that have no product of whole numbers."""

    def __init__(self, weight_OI: Tensor, bias: Tensor | None = None, bits: int = 4):
        group = GROUP if weight_OI.shape[1] % GROUP == 0 else weight_OI.shape[1]
        span = NIBBLE if bits == 4 else TWO_NIBBLES
        self._weight_OI = quantised(weight_OI, span, group).widened()
        self._bias = bias
        self.layout = Layout(weight_OI.shape[1])
        self.bytes = self._weight_OI.nbytes

    def multiply(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self._weight_OI, self._bias)


def widened_4(weight_OI: Tensor, bias: Tensor | None = None) -> Product:
    return WidenedProduct(weight_OI, bias, 4)


def widened_8(weight_OI: Tensor, bias: Tensor | None = None) -> Product:
    return WidenedProduct(weight_OI, bias, 8)


Matrix = Tensor | Packed | Product
MakeProduct = Callable[[Tensor, Tensor | None], Product]

# What `quantize` may be, and the kinds of product that each may use; the last always runs.
KINDS: dict[str, dict[str, MakeProduct]] = {
    "int4": {"int4": Int4Product, "widened": widened_4},
    "int8": {"nibbles": Int8ByNibbles, "onednn": Int8Product, "widened": widened_8},
}


# The last matrix of a model needs precision most: what it is, by what the others are.
HEAD = {"int4": "int8", "int8": "int8", "fp8": "fp8"}


def keeps_bits(product: Callable[[Tensor], Tensor], inputs: int) -> bool:
    """Does a row give the same bits alone and beside others, however many?"""
    x_TI = torch.randn(CHECKED_ROWS[-1], inputs, generator=torch.Generator().manual_seed(0))
    x_TI[3] *= 100  # a row must not be rounded by the scale of another
    all_TO = product(x_TI)
    return all(
        torch.equal(product(x_TI[:rows].contiguous()), all_TO[:rows]) for rows in CHECKED_ROWS
    )


@cache
def has_room(make: MakeProduct) -> bool:
    """Have sums room for the largest products? oneDNN adds pairs of them in 16 bits where a
    processor has nothing better, as those with AVX2 have not, and cuts off what is more."""
    product = make(torch.ones(8, 2 * GROUP), None)
    return torch.allclose(product(torch.ones(4, 2 * GROUP)), torch.tensor(2.0 * GROUP), rtol=0.02)


@dataclass(frozen=True)
class FloatLayout:
    """How float matrices lie in memory: by outputs as the library has them, or by inputs."""

    by_inputs: bool

    def of(self, weight_OI: Tensor) -> Tensor:
        """A matrix as [in, out]."""
        return weight_OI.t().contiguous() if self.by_inputs else weight_OI.t()


def times(x_TI: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """Rows times a matrix, [in, out] if it is a tensor."""
    if isinstance(matrix, Packed):
        matrix = matrix.widened().t()
    if not isinstance(matrix, Tensor):
        return matrix(x_TI)  # its bias is in it
    return x_TI @ matrix if bias is None else torch.addmm(bias, x_TI, matrix)


def joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))
