"""What a drafter is, and what it proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forerun.sequence.canvas import Canvas


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for some positions, and the law each was drawn from.

    q = None is a point mass on every token.
    """

    positions: Sequence[int]
    tokens: Sequence[int]
    q: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)


NO_DRAFT = Draft([], [])


class Drafter(Protocol):
    """Something that proposes the next tokens of a sequence."""

    async def propose(self, seq: Canvas, k: int) -> Draft:
        """At most k tokens for the next blanks; fewer, or none, where there is nothing to say."""
        ...
