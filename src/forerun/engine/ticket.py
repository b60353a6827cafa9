"""A request inside the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.engine.schedule import Due
from forerun.errors import NotAble
from forerun.probability.outcomes import Outcome
from forerun.sequence.canvas import Canvas, Draw, MoreRounds
from forerun.sequence.question import Continuation, Question

DecodingCoroutine = Coroutine[Any, Any, None]
Awaited = Draw[Any] | Question | MoreRounds


def do_nothing() -> None:
    pass


@dataclass(eq=False)
class Ticket:
    """A request: its sequence, and how to start the method that decodes it.

    `on_change` is called whenever the sequence has grown or ended.
    """

    seq: Canvas
    start: Callable[[], DecodingCoroutine]
    on_change: Callable[[], None] = do_nothing
    asks_costs: bool = False  # does its method ask what forwards cost?
    priority: int = 0  # higher goes first
    due: Due | None = None
    ends_early: bool = True  # may its text end before all blanks are filled?
    error: Exception | None = None
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    ended: float | None = None

    @property
    def over(self) -> bool:
        return self.ended is not None


@dataclass(eq=False)
class Running:
    """A ticket that has a lane: its method runs, or waits for the engine."""

    ticket: Ticket
    lane: int
    coroutine: DecodingCoroutine
    waits_for: Awaited | None = None
    last_question: Question | None = None  # that was answered
    looked: Question | None = None  # the last one to a drafter that looks into its target
    drew: Draw[Any] | None = None  # the last draw from what that one answered
    alike: int = 0  # drafts in a row, as long as the last and drawn in the same way
    # In a row, by kind: forwards around drafts that were begun ahead in vain.
    surprises: dict[type, int] = field(default_factory=dict)
    draft_question: Question | None = None  # the last one to a model that drafts
    written: Sequence[int] = ()  # what that model wrote by itself, if it did
    _last_draft: tuple[int, float] | None = None
    seq: Canvas = field(init=False)

    def __post_init__(self) -> None:
        self.seq = self.ticket.seq

    def count_answered(self, answer: object = None) -> None:
        """Count what the sequence waited for: a draw, or a forward, or, if an outcome is the answer
        to a question, both."""
        waited = self.waits_for
        if isinstance(waited, Draw):
            self.seq.draws += 1
        elif isinstance(waited, Continuation):
            self.seq.draws += waited.drawn + isinstance(answer, Outcome)
            self.seq.trace.draft_forwards += waited.drawn if waited.drafting else 0
            self.seq.trace.forwards += 0 if waited.drafting else max(1, waited.drawn)
        elif isinstance(waited, Question):
            self.seq.draws += isinstance(answer, Outcome)
            if waited.drafting:
                self.seq.trace.draft_forwards += 1
            else:
                self.seq.trace.forwards += 1

    def note_question(self, question: Question, looks: bool) -> None:
        """It has its answer. `looks`: the model looks into its target."""
        self.last_question = question
        if question.drafting:
            self.draft_question = question
            self.looked = question if looks else self.looked

    def note_draft(self, asked: Continuation, tokens: Sequence[int]) -> None:
        """It has had a draft written."""
        self.draft_question = asked
        self.written = tokens
        draft = (asked.tokens, asked.temperature)
        self.alike = self.alike + 1 if draft == self._last_draft else 1
        self._last_draft = draft

    def wait_for(self, draw: Draw[Any]) -> None:
        """The method waits on, now for a draw from what it asked about."""
        self.count_answered()
        self.waits_for = draw

    def resume(self, answer: object) -> None:
        """Let the method go on until it waits again. StopIteration says that it has returned."""
        self.waits_for = _servable(self.coroutine.send(answer))

    def throw(self, error: Exception) -> None:
        """Let the method go on with an error in place of an answer."""
        self.waits_for = _servable(self.coroutine.throw(error))


def _servable(awaited: object) -> Awaited:
    """What a method awaits, if the engine can serve it."""
    if isinstance(awaited, (Draw, Question, MoreRounds)):  # a union would be made anew each time
        return awaited
    raise NotAble(f"a method may await a model's questions and seq.draw, not {awaited!r}.")
