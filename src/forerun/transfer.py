"""Numbers on their way to a device."""

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
