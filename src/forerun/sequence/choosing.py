"""Who may draft for a sequence, and who says whether it pays: what a method and the engine know of
each other where a method lets the engine choose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, TypeVar


class ExpectedRound(NamedTuple):
    """What is to be expected of drafts that the engine makes and judges by itself, each."""

    tokens: float
    rows: float
    seconds: float = 0.0  # that drafting takes


class Offer(Protocol):
    """Somebody who could draft the next tokens, and what is to be expected of it."""

    @property
    def name(self) -> str: ...

    @property
    def known_as(self) -> str:
        """Who of that name it is: there may be several draft models."""
        ...

    @property
    def learns_unasked(self) -> bool:
        """Is it known how well it would do, though it does not draft?"""
        ...

    @property
    def lengths(self) -> Collection[int]:
        """Lengths of a draft that are worth considering."""
        ...

    def chances(self, most: int) -> Sequence[float]:
        """Of each of the next tokens to be accepted, given those before it; none where there is
        nothing to say."""
        ...

    def seconds(self, k: int) -> float:
        """What drafting k tokens costs, beside their rows."""
        ...

    def seconds_to_begin(self) -> float:
        """What must be done once before it can draft, such as reading the text."""
        ...

    def round_behind(self, k: int, tokens: float) -> ExpectedRound | None:
        """Each of the rounds that follow a draft of k tokens by themselves, if any do. The draft is
        expected to bring so many."""
        ...


O = TypeVar("O", bound=Offer)  # noqa: E741


class Chooser(Protocol):
    """Chooses for one sequence, step by step."""

    def choose(self, offers: Sequence[O], most: int) -> tuple[O | None, int]:
        """Who drafts how many tokens in the next step, at most so many; None: nobody."""
        ...

    @property
    def text_length(self) -> int:
        """Tokens that may be written without a choice in between, if nobody drafts."""
        ...

    def leave(self) -> None:
        """The sequence is over."""
        ...
