"""Seconds that a piece of work takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

QUEUED_RUNS = 8


def median_seconds(run: Callable[[], object], device: torch.device, turns: int) -> float:
    """Median seconds. The first run is not counted."""
    seconds = []
    for turn in range(turns + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def queued_seconds(run: Callable[[], object], turns: int) -> float:
    """Median seconds of a GPU that always has the next run waiting, so that the host's work is not
    counted."""
    for _ in range(3):  # the first ones are captured
        run()
    seconds = []
    for _ in range(turns):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        run()  # behind which the others queue up
        begin.record()
        for _ in range(QUEUED_RUNS):
            run()
        end.record()
        end.synchronize()
        milliseconds = begin.elapsed_time(end) / QUEUED_RUNS
        seconds.append(milliseconds / 1e3)
    return statistics.median(seconds)
