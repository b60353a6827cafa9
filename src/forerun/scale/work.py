"""Work that is cut into parts, and who does it.

A part is decoded by one worker that begins cold, on a fixed number of threads. So its answer is a
function of the part alone: whoever does it, and however often, the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from forerun.errors import ForerunError

Worker = Callable[[Any], Any]  # from what a part holds to its answer, both plain data


class WorkersLost(ForerunError, RuntimeError):
    """Workers end before they have answered anything."""


class Part(NamedTuple):
    """What one worker does at once. `value` is plain data."""

    name: str
    value: Any


class Answered(NamedTuple):
    """The answer to a part, and which process gave it."""

    name: str
    answer: Any
    pid: int


class WorkerPlan(Protocol):
    """How a worker is made, in whichever process. It can be pickled."""

    def make(self) -> Worker: ...


class Pool(Protocol):
    """Who does the work."""

    @property
    def workers(self) -> int: ...

    def run(self, plan: WorkerPlan, parts: Iterable[Part]) -> Iterator[Answered]:
        """The answers as they come, each once. What a lost worker had is done again."""
