"""A language from left to right as the constraint of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Generic

import numpy as np

from forerun.constraints.base import (
    ANY,
    Constraint,
    Language,
    State,
    bitmask,
    bitmask_without,
    only_token,
)
from forerun.constraints.matching import Made, MatcherLanguage, Node, look_together
from forerun.errors import BadOption

SOME = 8  # words of a bitmask


class LeftToRight(Generic[State]):
    """Rows see the mask of the state that their chain leads to. A row whose state is not known, as
    tokens before it are still open, is free: what is drafted there is judged by rows that are not.

    `first` is the position of the first blank; all behind it are blanks. Tokens that end the text
    are allowed where the language accepts it. `possible` are the tokens that may be written at all,
    as a bitmask.
    """

    def __init__(
        self,
        language: Language[State],
        first: int,
        ends: frozenset[int],
        vocab: int,
        possible: np.ndarray | None = None,
    ):
        self.language = language
        self.next = first
        self.ends = ends
        possible_W = bitmask_without((), vocab) if possible is None else possible
        self._ordinary_W = possible_W & ~bitmask(ends, vocab)
        self._ending_W = possible_W & bitmask(ends, vocab)
        self._seen: State | None = None
        self._seen_W = self._ending_W
        self._failure = ""
        self._state: State | None = language.start()
        if not self._mask(self._state).any():
            if language.error:
                raise BadOption(f"the constraint cannot be followed: {language.error}.")
            raise BadOption(
                "the constraint cannot be begun: no token spells the beginning of what it asks "
                "for, or allowed_tokens has none of those that do."
            )

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, made once for all texts of this grammar that may hold the same
        tokens. It may look at the beginning of a text only."""
        if not isinstance(self.language, MatcherLanguage):
            return make()
        tokens = (self._ordinary_W.tobytes(), self._ending_W.tobytes())
        return self.language.kept.once((key, tokens), make)

    def masks(
        self,
        chain: Sequence[int],
        places: Sequence[int],
        prefixes: Sequence[int],
        positions: Sequence[int],
    ) -> np.ndarray:
        try:
            return self._masks(chain, prefixes, positions)
        except Exception as error:  # of an engine: it must not reach those who share the batch
            self._fail(error)
            return self._masks(chain, prefixes, positions)

    def _fail(self, error: Exception) -> None:
        """Nothing more may be written."""
        self._state = None
        self._failure = f"{type(error).__name__}: {error}"

    def _masks(
        self, chain: Sequence[int], prefixes: Sequence[int], positions: Sequence[int]
    ) -> np.ndarray:
        if self._state is None:
            return np.zeros((len(prefixes), len(self._ending_W)), np.int32)
        states = self._states(chain, max(prefixes, default=0))
        rows = [
            self._mask(states[length])
            if position == self.next + length and length < len(states)
            else None
            for length, position in zip(prefixes, positions)
        ]
        if len(prefixes) == len(rows) == 1 and rows[0] is not None:
            return rows[0][None]
        masks_LW = np.full((len(prefixes), len(self._ending_W)), ANY, np.int32)
        for row, mask_W in enumerate(rows):
            if mask_W is not None:
                masks_LW[row] = mask_W
        return masks_LW

    def _states(self, chain: Sequence[int], longest: int) -> list[State]:
        """The states along a chain, up to the first token that is not allowed: what lies behind it
        cannot be reached, as its law gives that token nothing."""
        if self._state is None:
            return []
        states = [self._state]
        for token in chain[:longest]:
            state = self._after(states[-1], token)
            if state is None:
                break
            states.append(state)
        return states

    def _after(self, state: State, token: int) -> State | None:
        return None if token in self.ends else self.language.advance(state, token)

    def _mask(self, state: State) -> np.ndarray:
        """The tokens that may follow. The last answer is kept: a state is asked about several times
        in a row."""
        if self._seen is not state:
            mask_W = self.language.allowed(state) & self._ordinary_W
            self._seen_W = mask_W | self._ending_W if self.language.accepts(state) else mask_W
            self._seen = state
        return self._seen_W

    def open_states(self, chain: Sequence[int]) -> list[tuple[MatcherLanguage, Node]]:
        """The states along a chain whose masks an engine has not been asked for."""
        if not isinstance(self.language, MatcherLanguage):
            return []
        states = self._states(chain, len(chain)) if chain else [self._state]
        return [(self.language, one) for one in states if isinstance(one, Node) and not one.seen]

    def add(self, position: int, token: int) -> None:
        assert position == self.next, "decided from left to right"
        self.next += 1
        if self._state is not None and token not in self.ends:
            self._state = self.language.advance(self._state, token)
            if self._state is not None:
                self.language.settle(self._state)

    def first(self, before: Sequence[int] = ()) -> np.ndarray:
        """The tokens that may come next, or after some more, and do not end the text, as a
        bitmask; nothing after tokens that are not allowed."""
        states = self._states(before, len(before))
        if len(states) <= len(before):
            return np.zeros_like(self._ordinary_W)
        return self._mask(states[-1]) & self._ordinary_W

    def begin(self, position: int, tokens: Sequence[int]) -> None:
        """The token at the first blank is decided, and says what these tokens say."""
        for token in tokens:
            self.next = position
            self.add(position, token)

    def replace(self, position: int, token: int) -> None:
        raise AssertionError("a text from left to right is not edited")

    def forced(self) -> int | None:
        if self._state is None:
            return None
        token = only_token(self._mask(self._state))
        return None if token in self.ends else token

    def usable(self, tokens: Sequence[int]) -> int:
        states = self._states(tokens, len(tokens))
        if not states:
            return 0
        count = len(states) - 1
        ends = count < len(tokens) and tokens[count] in self.ends
        return count + 1 if ends and self.language.accepts(states[count]) else count

    def compatible(self, placement: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return list(placement)  # of one token: nothing is decided at once

    def likely(self, count: int) -> list[int]:
        if self._state is None:
            return []
        tokens = self.language.guess(self._state)[:count]
        return tokens[: self.usable(tokens)]

    @property
    def error(self) -> str:
        return self._failure or self.language.error

    @property
    def met(self) -> bool:
        return self._state is not None and self.language.accepts(self._state)

    @property
    def finished(self) -> bool:
        if self._state is None or not self.language.accepts(self._state):
            return False
        mask_W = self._mask(self._state)
        some = mask_W[:SOME] & self._ordinary_W[:SOME]  # mostly there are many
        return not some.any() and not (mask_W & self._ordinary_W).any()


def look_ahead(asked: Sequence[tuple[Constraint, Sequence[int]]]) -> None:
    """Have the engines of several sequences find, at once, what may follow each token of a chain.
    What they will be asked is then known; no answer changes."""
    with suppress(Exception):  # of an engine: whoever asks it on its own will see
        waiting: dict[Constraint, dict[Node, MatcherLanguage]] = {}
        for constraint, chain in asked:
            if isinstance(constraint, LeftToRight):
                for language, state in constraint.open_states(chain):
                    waiting.setdefault(constraint, {})[state] = language  # of all its chains
        rounds = zip_longest(*(found.items() for found in waiting.values()))
        for each in rounds:  # an engine is at one state of a text at a time
            look_together([(one[1], one[0]) for one in each if one is not None])
