"""Families turn a sequence with blanks into rows: pure, and the only place that knows how a kind of model reads text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar


class Family(ABC):
    """What the engine and the interface need to know about a kind of model."""

    name: ClassVar[str]
    answers: ClassVar[tuple[type, ...]]  # the questions of `core` that it makes plans for
    never: tuple[int, ...] = ()  # tokens that are never a possible outcome: a mask
    default = "ar"  # the method that decodes unless another is named
    needs_prompt = True  # must something be given before the first question?

    @classmethod
    @abstractmethod
    def of(cls, config: Any) -> Family | None:
        """The family of a checkpoint with this config, or None if it is of another kind."""

    def slots(self, context: int) -> int:
        """How many cache slots a lane needs for a canvas of `context` tokens."""
        return context
