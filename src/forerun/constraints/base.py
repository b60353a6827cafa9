"""What a constraint is, to those who turn logits into laws.

L rows, V vocabulary, W = V / 32 words of a bitmask: token v is bit v % 32 of word v // 32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np

State = TypeVar("State")

BITS = 32
ANY = -1  # a word that has every bit


class Language(Protocol[State]):
    """A language over tokens, from left to right. States are values: any of them may be asked about
    at any time. The tokens that end a text are none of its own."""

    def start(self) -> State: ...

    def advance(self, state: State, token: int) -> State | None:
        """The state after one token more; None where it is not allowed."""

    def allowed(self, state: State) -> np.ndarray:
        """The tokens that may follow, as a bitmask [W]."""

    def accepts(self, state: State) -> bool:
        """May the text end here?"""

    def guess(self, state: State) -> list[int]:
        """Tokens that spell what must follow in the usual way; others may be allowed."""

    @property
    def error(self) -> str:
        """Why it allows nothing any more, if something went wrong."""

    def settle(self, state: State) -> None:
        """The text has come to this state: nobody asks about others than those that follow it."""


class Constraint(Protocol):
    """What a constraint knows of one sequence. It is told of every decision, in its order."""

    def masks(
        self,
        chain: Sequence[int],
        places: Sequence[int],
        prefixes: Sequence[int],
        positions: Sequence[int],
    ) -> np.ndarray:
        """A bitmask [L, W] of int32 for rows that stand for one chain: row i is a law of the blank
        `positions[i]`, given what is decided and the first `prefixes[i]` tokens of the chain, which
        stand at `places`.

        It never raises, since other sequences share the batch: where nothing is allowed, no bit is
        set. A row that cannot be reached may have any. `positions` is shorter than `prefixes`
        where rows lie behind the canvas.
        """

    def add(self, position: int, token: int) -> None:
        """A blank was decided."""

    def replace(self, position: int, token: int) -> None:
        """A decided token gave way to another."""

    def forced(self) -> int | None:
        """The only token that may stand at the first blank, if there is only one."""

    def likely(self, count: int) -> list[int]:
        """At most `count` tokens that are a good guess of what follows, though others may be
        allowed."""

    def usable(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first one on, may come next one after the other."""

    def compatible(self, placement: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """What of some decisions, (position, token), can stand together: each on its own can."""

    @property
    def error(self) -> str:
        """Why nothing is allowed any more, where that is known."""

    @property
    def met(self) -> bool:
        """May the text end here?"""

    @property
    def finished(self) -> bool:
        """Must the text end here?"""


def words(vocab: int) -> int:
    """The length of a bitmask."""
    return -(-vocab // BITS)


def bitmask(tokens: Iterable[int], vocab: int) -> np.ndarray:
    """Some tokens as a bitmask [W]. That of a set is kept: many requests have the same."""
    return _of_set(tokens, vocab) if isinstance(tokens, frozenset) else _packed(tokens, vocab)


@lru_cache(maxsize=64)
def _of_set(tokens: frozenset[int], vocab: int) -> np.ndarray:
    mask_W = _packed(tokens, vocab)
    mask_W.flags.writeable = False
    return mask_W


def _packed(tokens: Iterable[int], vocab: int) -> np.ndarray:
    flags_V = np.zeros(words(vocab) * BITS, np.uint8)
    flags_V[tokens if isinstance(tokens, range) else list(tokens)] = 1
    return np.packbits(flags_V, bitorder="little").view(np.int32)


def bitmask_without(tokens: Iterable[int], vocab: int) -> np.ndarray:
    """All tokens but some as a bitmask [W]."""
    return ~bitmask(tokens, vocab) & _everything(vocab)


@lru_cache(maxsize=16)
def _everything(vocab: int) -> np.ndarray:
    return bitmask(range(vocab), vocab)


def tokens_of(mask_W: np.ndarray) -> np.ndarray:
    """The tokens of a bitmask."""
    return np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))


def only_token(mask_W: np.ndarray) -> int | None:
    """The token of a bitmask that has one and no other."""
    filled_W = mask_W != 0
    if np.count_nonzero(filled_W) != 1:
        return None
    first = int(filled_W.argmax())
    word = int(mask_W[first]) & 0xFFFFFFFF
    if word & (word - 1):
        return None
    return first * BITS + word.bit_length() - 1
