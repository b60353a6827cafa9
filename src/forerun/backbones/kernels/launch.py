"""How kernels follow each other: programmatic dependent launch.

Of few rows, or narrow ones, the time of a kernel is mostly its beginning and its end. There every
kernel lets the next one begin at once, on GPUs that can. The next one waits for it before it reads
anything.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FEW_ROWS = 16
# Of a small model, whose hidden states have at most so many numbers, as measured on an H200 for
# 576, 896 and 1536; not for 3584.
NARROW = 2048
FEW_NARROW_ROWS = 128

# How a kernel is launched. Kernels compare with these numbers, which Triton does not look up.
IN_TURN = 0  # after the last kernel
OVERLAPPED = 1  # beside the last kernel, on which it waits
OVERLAPPED_BY_NEXT = 2  # that, and the next kernel may begin at once


def launch_options(x: Tensor, rows: int, width: int | None = None) -> dict[str, int]:
    """How to launch a kernel for so many rows; `width` numbers each, if they are not those of x.
    With many rows, kernels that wait would only be in the way of those that work."""
    if not x.is_cuda or torch.version.cuda is None:
        return dict(LAUNCH=IN_TURN)
    if torch.cuda.get_device_capability(x.device) < (9, 0):
        return dict(LAUNCH=IN_TURN)
    is_narrow = (width or x.numel() // max(1, rows)) <= NARROW
    few = FEW_NARROW_ROWS if is_narrow else FEW_ROWS
    return dict(LAUNCH=OVERLAPPED_BY_NEXT if rows <= few else OVERLAPPED, launch_pdl=True)


@triton.jit
def wait_for_last(LAUNCH: tl.constexpr):
    """Let the next kernel begin, if it may; go on when the last one has finished."""
    if LAUNCH == 2:
        gdc_launch_dependents()
    if LAUNCH > 0:
        gdc_wait()


def power_of_two(n: int) -> int:
    """The least power of two that is not below n: Triton's blocks have such sizes."""
    return 1 << max(0, n - 1).bit_length()
