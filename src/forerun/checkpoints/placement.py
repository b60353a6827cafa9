"""On which device a model computes, and in which precision."""

from __future__ import annotations

import torch

from forerun.errors import BadOption, unknown

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


QUANTIZE = ("int8", "int4", "fp8")  # bits per weight


def check_quantize(quantize: str | None) -> None:
    if quantize is not None and quantize not in QUANTIZE:
        raise unknown("quantize", str(quantize), QUANTIZE)


def device_named(device: str | None) -> torch.device:
    """The named device; by default cuda where there is one, else cpu."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        where = torch.device("meta")
    if where.type == "mps":
        raise BadOption(
            f"device={device!r} is not supported: Forerun computes laws in float64, which MPS does "
            "not have. Use 'cpu'."
        )
    if where.type not in ("cpu", "cuda"):
        raise BadOption(f"device={device!r} is not supported: use 'cpu' or 'cuda'.")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise BadOption(f"device={device!r}: this machine has no usable CUDA device; use 'cpu'.")
    return where


def dtype_named(dtype: str | None, device: torch.device) -> torch.dtype | None:
    """The named precision; by default float32 on a cpu, and the checkpoint's own on cuda. None is
    the checkpoint's own, which 'auto' asks for by name."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else None
    if dtype == "auto":
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("dtype", name, ["auto", *DTYPES])
    return DTYPES[name]
