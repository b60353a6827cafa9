"""Matrices in blocks, as GGUF files have them: left where they lie until a product takes them, or
widened to the float32 values of the package `gguf`, bit for bit, on all threads.

O outputs, I inputs; N blocks, of which each has a scale (or 8 or 16 of them), B bytes, V values;
uint8 in, float32 out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

VALUES_AT_ONCE = 1 << 22  # little enough for the processor's cache, enough for all its threads
NO_NUMBER = 0x7C00  # in half precision, the bits that are all set in infinities and NaN
BITS = torch.arange(8, dtype=torch.uint8)[:, None]


class Kind(NamedTuple):
    """One of the ways in which values lie in a block."""

    number: int  # by which files, and our C++, name it
    values: int
    size: int  # bytes
    halves: tuple[int, ...]  # where its numbers in half precision begin
    fill: Callable[[Tensor, Tensor], None]  # values from blocks


@dataclass(frozen=True)
class Blocks:
    """A matrix [O, I]."""

    kind: str
    rows_OB: Tensor  # the bytes of each output

    @property
    def shape(self) -> tuple[int, int]:
        kind = KINDS[self.kind]
        outputs, size = self.rows_OB.shape
        return outputs, size // kind.size * kind.values

    def numel(self) -> int:
        outputs, inputs = self.shape
        return outputs * inputs

    def widened(self) -> Tensor:
        return widened(self.rows_OB, self.kind).view(self.shape)

    def by_outputs(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        """With other outputs, or another order of them."""
        return Blocks(self.kind, change(self.rows_OB))

    def is_finite(self) -> bool:
        """Is every value a number? They are if those in half precision are."""
        kind = KINDS[self.kind]
        words_NW = self.rows_OB.reshape(-1, kind.size).view(torch.int16)
        halves = [words_NW[:, at // 2] & NO_NUMBER for at in kind.halves]
        return not any(bool((half == NO_NUMBER).any()) for half in halves)


def joined_blocks(weights: Sequence[object]) -> Blocks | None:
    """Several matrices as one, where all are in blocks of one kind."""
    parts = [weight for weight in weights if isinstance(weight, Blocks)]
    if len(parts) < len(weights) or len({part.kind for part in parts}) > 1:
        return None
    if len(parts) == 1:
        return parts[0]
    return Blocks(parts[0].kind, torch.cat([part.rows_OB for part in parts]))


def widened(data: Tensor, name: str) -> Tensor:
    """The values of bytes in blocks of a kind, one after another."""
    kind = KINDS[name]
    blocks_NB = data.reshape(-1, kind.size)
    out_NV = torch.empty(len(blocks_NB), kind.values)
    step = max(1, VALUES_AT_ONCE // kind.values)
    for some, values in zip(blocks_NB.split(step), out_NV.split(step)):
        kind.fill(some, values)
    return out_NV.flatten()


def _q4_0(blocks_NB: Tensor, out_NV: Tensor) -> None:
    codes = _nibbles(blocks_NB[:, 2:]) - 8
    out_NV.copy_(codes.view(torch.int8)).mul_(_half(blocks_NB, 0))


def _q4_1(blocks_NB: Tensor, out_NV: Tensor) -> None:
    out_NV.copy_(_nibbles(blocks_NB[:, 4:])).mul_(_half(blocks_NB, 0)).add_(_half(blocks_NB, 2))


def _q5_0(blocks_NB: Tensor, out_NV: Tensor) -> None:
    fifth = blocks_NB[:, 2:6, None] >> BITS[:, 0] & 1
    codes = (_nibbles(blocks_NB[:, 6:]) | (fifth.flatten(1) << 4)) - 16
    out_NV.copy_(codes.view(torch.int8)).mul_(_half(blocks_NB, 0))


def _q8_0(blocks_NB: Tensor, out_NV: Tensor) -> None:
    out_NV.copy_(blocks_NB[:, 2:].view(torch.int8)).mul_(_half(blocks_NB, 0))


def _q4_k(blocks_NB: Tensor, out_NV: Tensor) -> None:
    out_NV.copy_(_nibbles(blocks_NB[:, 16:].unflatten(1, (4, 32))).flatten(1))
    _by_eight_scales(blocks_NB, out_NV)


def _q5_k(blocks_NB: Tensor, out_NV: Tensor) -> None:
    fifth = blocks_NB[:, None, 16:48] >> BITS & 1
    lower = _nibbles(blocks_NB[:, 48:].unflatten(1, (4, 32)))
    out_NV.copy_(lower.flatten(1) | (fifth.flatten(1) << 4))
    _by_eight_scales(blocks_NB, out_NV)


def _q6_k(blocks_NB: Tensor, out_NV: Tensor) -> None:
    high = blocks_NB[:, 128:192].unflatten(1, (2, 1, 32)) >> BITS[::2] & 3
    lower = _nibbles(blocks_NB[:, :128].unflatten(1, (2, 64)))
    codes = (lower.flatten(1) | (high.flatten(1) << 4)) - 32
    scales = _half(blocks_NB, 208) * blocks_NB[:, 192:208].view(torch.int8)
    out_NV.copy_(codes.view(torch.int8)).unflatten(1, (16, 16)).mul_(scales[..., None])


def _half(blocks_NB: Tensor, at: int) -> Tensor:
    """A number in half precision that begins at a byte of every block."""
    return blocks_NB.view(torch.float16)[:, at // 2, None].float()


def _nibbles(some: Tensor) -> Tensor:
    """The lower halves of bytes, and behind them the upper ones."""
    some = some.contiguous()
    return torch.cat([some & 15, some >> 4], -1)


def _by_eight_scales(blocks_NB: Tensor, out_NV: Tensor) -> None:
    """Times the scale of every 32 values, less their offset: 6 bits each, packed into 12 bytes."""
    first, second, rest = blocks_NB[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 2) & 48)], 1)
    offsets = torch.cat([second & 63, (rest >> 4) | ((second >> 2) & 48)], 1)
    values = out_NV.unflatten(1, (8, 32)).mul_((_half(blocks_NB, 0) * scales)[..., None])
    values.sub_((_half(blocks_NB, 2) * offsets)[..., None])


KINDS = {
    "Q4_0": Kind(2, 32, 18, (0,), _q4_0),
    "Q4_1": Kind(3, 32, 20, (0, 2), _q4_1),
    "Q5_0": Kind(6, 32, 22, (0,), _q5_0),
    "Q8_0": Kind(8, 32, 34, (0,), _q8_0),
    "Q4_K": Kind(12, 256, 144, (0, 2), _q4_k),
    "Q5_K": Kind(13, 256, 176, (0, 2), _q5_k),
    "Q6_K": Kind(14, 256, 210, (208,), _q6_k),
}
