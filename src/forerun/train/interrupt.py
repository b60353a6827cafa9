"""Ctrl-C during training stops it after the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class InterruptGuard:
    """While it holds, the first Ctrl-C sets `requested`, and the second stops at once. Signals
    reach only the main thread; elsewhere it does nothing."""

    def __init__(self) -> None:
        self.requested = False
        self.in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> InterruptGuard:
        if self.in_main_thread:
            self.previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *_: object) -> None:
        if self.in_main_thread:
            signal.signal(signal.SIGINT, self.previous)
