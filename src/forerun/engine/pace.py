"""How many rows of prompts a forward reads while others write: as many as leave their steps below
twice the usual time, as measured while it runs."""

from __future__ import annotations

import statistics
from collections import deque

import torch

FIRST = {"cpu": 4}  # rows to begin with
FIRST_ELSEWHERE = 128
LEAST = 2
MOST = 2048
LOOKS = 3  # steps whose middle one decides


class Pace:
    """The rows of one model. They are powers of two, so that few sizes of forwards are captured.

    Processes that share a model must all do the same, so there they stay as they are.
    """

    def __init__(self, device: torch.device, rows: int | None = None):
        self.rows = rows or FIRST.get(device.type, FIRST_ELSEWHERE)
        self._fixed = rows is not None or several_processes()
        self._usual: float | None = None
        self._more: deque[float] = deque(maxlen=LOOKS)

    def stepped(self, seconds: float, read_prompts: bool) -> None:
        """A step of those who write took so long, and read rows of prompts or not."""
        if self._fixed:
            return
        if not read_prompts:
            before = self._usual
            self._usual = seconds if before is None else 0.8 * before + 0.2 * seconds
            return
        if self._usual is None:
            return
        self._more.append(seconds / self._usual - 1)
        if len(self._more) < LOOKS:
            return
        more = statistics.median(self._more)
        if more > 0.95 and self.rows > LEAST:
            self._set(self.rows // 2)
        elif more < 0.45 and self.rows < MOST:  # with twice the rows it would be below 0.9
            self._set(self.rows * 2)

    def _set(self, rows: int) -> None:
        self.rows = rows
        self._more.clear()


def several_processes() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
