"""What rules decide, by name.

A rule runs once for all sequences of a batch. On the device every field of its outcome is a tensor
with one row per sequence: [B] for a number, [B, N] for a list. A method receives its own
sequence's row as plain numbers, which is what the types here say.

A negative number says that there is no outcome: the law had no mass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

O = TypeVar("O", bound="Outcome")  # noqa: E741

Placement = Sequence[tuple[int, int]]  # (position, token), in the order of placing


@dataclass(frozen=True)
class Outcome:
    """Base of what rules return."""

    @classmethod
    def of_batch(cls: type[O], **columns: Tensor) -> O:
        """The outcome of a whole batch: a tensor for every field, one row per sequence."""
        make: Callable[..., O] = cls
        return make(**columns)

    def columns(self) -> dict[str, Tensor]:
        """The tensors of a batch by field."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Token(Outcome):
    """One token drawn from a law."""

    token: int


@dataclass(frozen=True)
class Tokens(Outcome):
    """One token drawn from each of several laws."""

    tokens: list[int]


@dataclass(frozen=True)
class Verdict(Outcome):
    """How many drafted tokens are accepted, and the token after them."""

    accepted: int
    token: int


@dataclass(frozen=True)
class JacobiStep(Verdict):
    """A verdict on a guess, and the likeliest token at every place: the next guess."""

    likeliest: list[int]
    # The next guess as it is if places that nothing is known about repeat the token before them. A
    # forward of it can begin before the host knows it.
    repeated: list[int]


@dataclass(frozen=True)
class Descent(Outcome):
    """The node at which the text leaves a tree of guesses, and the token there."""

    node: int
    token: int
    likeliest: list[int]  # after every node, and in any further rows


@dataclass(frozen=True)
class Selection(Outcome):
    """A token for every blank, and which blanks are decided now."""

    tokens: list[int]
    chosen: list[bool]

    def placements(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """What is decided, (position, token)."""
        rows = zip(positions, self.tokens, self.chosen)
        return [(position, token) for position, token, chosen in rows if chosen]


@dataclass(frozen=True)
class Ranking(Outcome):
    """The likeliest token of every blank, how confident the model is of it, and what blanks are
    decided in the order of."""

    tokens: list[int]
    confidence: list[float]
    score: list[float]


@dataclass(frozen=True)
class Column:
    """Where one field of an outcome stands in a packed row."""

    name: str
    kind: type[bool] | type[int] | type[float]
    width: int | None  # of a list; None for a single number

    def read(self, row: Sequence[float], start: int) -> object:
        if self.width is None:
            return self.kind(row[start])
        numbers = row[start : start + self.width]
        if numbers and isinstance(numbers[0], self.kind):  # a row's numbers are all of one kind
            return numbers
        return [self.kind(number) for number in numbers]


class PackedOutcome:
    """An outcome of a batch as one tensor, so that one copy brings it to the host."""

    def __init__(self, outcome: Outcome):
        self.outcome = outcome
        self.type = type(outcome)
        tensors = outcome.columns()
        self.columns = [_column(name, tensor) for name, tensor in tensors.items()]
        # as of a token or a verdict
        self._all_whole = all(one.width is None and one.kind is int for one in self.columns)
        fractions = any(tensor.is_floating_point() for tensor in tensors.values())
        dtype = torch.float64 if fractions else torch.long
        parts = [tensor.to(dtype).view(len(tensor), -1) for tensor in tensors.values()]
        self.tensor = parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def unpack(self, row: Sequence[float]) -> Outcome | None:
        """The outcome of one sequence as plain numbers; None if a law had no mass."""
        if min(row) < 0:
            return None
        make: Callable[..., Outcome] = self.type
        if self._all_whole:
            return make(*row)
        values: dict[str, object] = {}
        start = 0
        for column in self.columns:
            values[column.name] = column.read(row, start)
            start += 1 if column.width is None else column.width
        return make(**values)


def _column(name: str, tensor: Tensor) -> Column:
    kind: type[bool] | type[int] | type[float] = int
    if tensor.dtype == torch.bool:
        kind = bool
    elif tensor.is_floating_point():
        kind = float
    return Column(name, kind, tensor.shape[1] if tensor.dim() == 2 else None)
