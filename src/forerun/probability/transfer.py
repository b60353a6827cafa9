"""Copies between the host and a device that do not wait; and what runs where."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def can_fuse(x: Tensor) -> bool:
    """Are these numbers that our kernels take, where they run?"""
    return HAS_TRITON and x.is_cuda and x.dtype.itemsize <= 4


def to_device(
    values: Sequence[object] | np.ndarray, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Numbers of the host as a tensor on a device.

    The host does not wait: the device may still run a forward, and what is queued meanwhile runs
    right after it.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    if isinstance(values, np.ndarray):
        pinned = torch.from_numpy(values).to(dtype).pin_memory()
        return pinned.to(device, non_blocking=True)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def array_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The same for an array, which nobody may write to afterwards."""
    tensor = torch.from_numpy(array)
    return tensor if device.type != "cuda" else tensor.pin_memory().to(device, non_blocking=True)


def send(numbers: Tensor, place: Tensor) -> None:
    """Copy numbers of the host to where a device keeps them. The host does not wait, and may write
    others at once: until the device has come to the copy, what is copied has memory of its own."""
    place.copy_(numbers.pin_memory() if place.is_cuda else numbers, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host. Work queued on the device afterwards is not waited for."""

    def __init__(self, tensor: Tensor):
        self._copy = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy = pinned.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            # The tensor's device need not be the current one.
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def numbers(self) -> list[list[float]]:
        """The numbers, row by row, as soon as they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()
