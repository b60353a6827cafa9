"""What a drafter is, and what it proposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, runtime_checkable

from torch import Tensor

from forerun.families.base import ModelHandle
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


def spelled_out(seq: Canvas, k: int) -> Draft:
    """What a constraint says must come next, spelled as usual: a draft that costs nothing."""
    constraint = seq.history.constraint
    if constraint is None:
        return NO_DRAFT
    tokens = constraint.likely(k)
    return Draft(seq.next(len(tokens)), tokens)


def without_waste(seq: Canvas, draft: Draft) -> Draft:
    """A draft up to the first token that the constraint does not allow: no row behind it matters.

    A token that was drawn stays, as its rejection is part of the law. One that is certain goes: its
    rejection would change nothing.
    """
    constraint = seq.history.constraint
    if constraint is None or not draft.tokens:
        return draft
    count = constraint.usable(draft.tokens)
    if draft.q is None:
        return Draft(draft.positions[:count], draft.tokens[:count])
    count += 1
    return Draft(draft.positions[:count], draft.tokens[:count], draft.q[:count])


class Drafter(Protocol):
    """Something that proposes the next tokens of a sequence.

    It may also have `drafts_alike`: is every draft made as the last one was, whatever the verdict?
    Then the engine may draft and judge on by itself. And `most`: tokens of its longest draft.
    """

    async def propose(self, seq: Canvas, k: int) -> Draft:
        """At most k tokens for the next blanks; fewer, or none, where there is nothing to say."""
        ...


@runtime_checkable
class ModelDraft(Protocol):
    """A drafter that asks a model."""

    @property
    def model(self) -> ModelHandle: ...

    def forwards(self, k: int) -> Sequence[int]:
        """Of its model, for a draft of k tokens: the rows of each."""
        ...


def drafts_alike(drafter: Drafter) -> bool:
    return getattr(drafter, "drafts_alike", False)


def most_drafted(drafter: Drafter) -> int | None:
    """Tokens of its longest draft, if it says so."""
    return getattr(drafter, "most", None)


def draft_seconds(drafter: Drafter) -> Callable[[int], float]:
    """What a draft of so many tokens takes, by what forwards of its model cost."""
    if not isinstance(drafter, ModelDraft):
        return lambda k: 0.0
    costs = drafter.model.costs
    forwards = drafter.forwards
    seconds = cache(lambda k: sum(map(costs.forward, forwards(k))))
    return lambda k: seconds(k) if costs.known else 0.0
