"""Where the engine's time goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch


@dataclass
class Clock:
    """Where the engine's time went, in seconds.

    A GPU works on its own while the engine already queues the next thing. With `times_device`, the
    clock also marks when forwards and rules began and ended there, and `read_device_times` puts
    those times in place of the host's.
    """

    times_device: bool = False
    forward: float = 0.0
    rules: float = 0.0
    total: float = 0.0
    # Parts of the host's time:
    waits: float = 0.0  # for outcomes to arrive
    masks: float = 0.0  # for what constraints allow
    forwards: int = 0
    _marks: list[tuple[str, torch.cuda.Event]] = field(default_factory=list)

    @property
    def outside_share(self) -> float:
        """The share of all time that was not spent inside a backbone's forward."""
        return 1 - self.forward / self.total if self.total else 0.0

    def mark(self, name: str, device: torch.device) -> None:
        """What the GPU did from the last mark to here is called so: forward, rules or host."""
        if self.times_device and device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            self._marks.append((name, event))

    def read_device_times(self) -> None:
        """Put the GPU's own times in place of the host's."""
        if not self._marks:
            return
        self._marks[-1][1].synchronize()
        seconds = {"forward": 0.0, "rules": 0.0, "host": 0.0}
        for (_, begin), (name, end) in pairwise(self._marks):
            seconds[name] += begin.elapsed_time(end) / 1e3
        self.forward = seconds["forward"]
        self.rules = seconds["rules"]
        self._marks.clear()
