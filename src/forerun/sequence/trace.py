"""What was decided, when and why: the trace of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass  # not frozen, which takes thrice as long to make: there are many
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


class Choice(NamedTuple):
    """What a method that chooses chose for a step, and from what."""

    forward: int  # of the target: the one that judges the draft
    drafter: str  # or none
    length: int  # tokens that it was to draft
    expected: float  # tokens of the step
    seconds: float  # expected of the step; 0 where nothing is known
    plain_seconds: float  # of a step without a draft


@dataclass
class Trace:
    """The events of one sequence, and how many forwards it took part in."""

    events: list[Event] = field(default_factory=list)
    forwards: int = 0  # of the target
    draft_forwards: int = 0
    choices: list[Choice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what else the caller should know
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

    def choose(self, drafter: str, length: int, expected: Sequence[float]) -> Choice:
        """Note what was chosen for the next step."""
        choice = Choice(self.forwards + 1, drafter, length, *expected)
        self.choices.append(choice)
        return choice

    def drafts(self) -> list[Event]:
        """The verdicts on drafts."""
        return [event for event in self.events if event.drafted]
