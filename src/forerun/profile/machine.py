"""What measurements ran on."""

from __future__ import annotations

import os
import platform
from datetime import date

import torch


def machine() -> str:
    """The device, the version of torch, and today's date."""
    device = f"{os.cpu_count()} cores ({platform.machine()})"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return f"{device}, torch {torch.__version__}, {date.today()}"
