"""Numbers on their way to a device and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor of a device, without waiting for the device: it may still be busy with a forward, and what
    is asked of it meanwhile runs right after that."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Coming:
    """A tensor on its way to the host. What is asked of the device after this is not waited for."""

    def __init__(self, tensor: Tensor):
        self._here, self._arrived = tensor, None
        if tensor.device.type == "cuda":
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))  # which need not be the current device

    def there(self) -> list[Any]:
        """Its numbers, as soon as they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here.tolist()
