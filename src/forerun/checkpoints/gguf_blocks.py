"""The float32 values of a GGUF tensor's blocks: those of the package `gguf`, bit for bit, on all
threads. Kinds of blocks that are not here are left to the package.

N blocks, of which each has a scale (or 8 or 16 of them), B bytes, V values; uint8 in, float32 out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

VALUES_AT_ONCE = 1 << 22  # little enough for the processor's cache, enough for all its threads
BITS = torch.arange(8, dtype=torch.uint8)[:, None]


def widen(data: np.ndarray, kind: Any) -> np.ndarray:
    """As `gguf.dequantize`; of bytes without a shape, values without one."""
    import gguf.quants

    data = np.array(data)  # from the file
    fill = WIDEN.get(kind.name)
    if fill is None:
        return gguf.quants.dequantize(data, kind)
    traits = gguf.quants._type_traits[kind]
    blocks = torch.from_numpy(data).view(-1, traits.type_size)
    out = torch.empty(len(blocks), traits.block_size)
    step = max(1, VALUES_AT_ONCE // traits.block_size)
    for some, values in zip(blocks.split(step), out.split(step)):
        fill(some, values)
    return out.numpy().reshape(*data.shape[:-1], -1)


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
    return blocks_NB[:, at : at + 2].contiguous().view(torch.float16).float()


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


WIDEN = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
