"""What was decided, when and why: the trace of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """One commit: what was decided, why, and at which forward of the target."""

    forward: int
    reason: str
    positions: list[int]
    tokens: list[int]
    drafted: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        """How many drafted tokens were kept."""
        return len(self.drafted) - len(self.rejected)


@dataclass
class Trace:
    """The events of one sequence, and how many forwards it took part in."""

    events: list[Event] = field(default_factory=list)
    forwards: int = 0  # of the target
    draft_forwards: int = 0
    # Told of every event, on the engine's thread: it must not block.
    listener: Callable[[Event], object] | None = field(default=None, repr=False)

    def record(
        self,
        reason: str,
        positions: Sequence[int],
        tokens: Sequence[int],
        drafted: Sequence[int] = (),
        rejected: Sequence[int] = (),
    ) -> None:
        event = Event(
            self.forwards, reason, list(positions), list(tokens), list(drafted), list(rejected)
        )
        self.events.append(event)
        if self.listener is not None:
            self.listener(event)

    def drafts(self) -> list[Event]:
        """The verdicts on drafts."""
        return [event for event in self.events if event.drafted]
