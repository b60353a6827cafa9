"""A regular language on a canvas: which tokens may stand at a blank, so that the whole can still be
completed.

Every stretch of the canvas that a language holds for (a hole, or all that is generated) is a walk
through a token automaton. Going forward from the first place, the known tokens and the blanks say
which states can be reached; going backward from the last, from which states the end can. A token
may stand at a blank if it leads from a state of the first kind to one of the second. So some
completion exists after every decision, whatever the order of decisions.

P places of a stretch, S states (state S is dead), C classes of tokens, W words of a bitmask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from forerun.constraints.automaton import TokenAutomaton, packed, unpacked
from forerun.constraints.base import BITS, only_token, words

OPEN = -1  # a place without a token
ANY = -1  # every bit of a word
MOST_MASKS = 1024  # that a stretch remembers


@dataclass(frozen=True, eq=False)
class Stretch:
    """Places [start, end) of a canvas that must hold a text of a language. Places before `late` go
    by the automaton `early`, which does not let the text end yet."""

    start: int
    end: int
    automaton: TokenAutomaton
    early: TokenAutomaton | None = None
    late: int = 0

    def at(self, place: int) -> TokenAutomaton:
        if self.early is not None and place < self.late:
            return self.early
        return self.automaton

    @cached_property
    def masks(self) -> dict[tuple[bytes, bytes, bool], np.ndarray]:
        return {}


@dataclass(frozen=True, eq=False)
class Walk:
    """What is known of a stretch: its tokens, the states that each place can be reached in, and
    those from which the end can be reached. A value: a decision makes another."""

    stretch: Stretch
    token_P: np.ndarray
    reached_PS: np.ndarray  # before each place, and after the last
    ending_PS: np.ndarray

    @classmethod
    def begin(cls, stretch: Stretch, token_P: np.ndarray) -> Walk:
        states = stretch.automaton.states + 1
        reached_PS = np.zeros((len(token_P) + 1, states), bool)
        ending_PS = np.zeros_like(reached_PS)
        reached_PS[0, stretch.automaton.start] = True
        ending_PS[-1, :-1] = stretch.automaton.final_S
        walk = cls(stretch, token_P, reached_PS, ending_PS)
        for place in range(len(token_P)):
            reached_PS[place + 1] = walk._forward(place)
        for place in reversed(range(len(token_P))):
            ending_PS[place] = walk._backward(place)
        return walk

    @property
    def possible(self) -> bool:
        """Is there a completion?"""
        return bool(self.ending_PS[0, self.stretch.automaton.start])

    @property
    def complete(self) -> bool:
        """Is it full, or full up to where the text has ended?"""
        blanks = np.flatnonzero(self.token_P == OPEN)
        if not len(blanks):
            return True
        return np.flatnonzero(self.reached_PS[blanks[0]]).tolist() == [self.stretch.automaton.over]

    def with_token(self, position: int, token: int) -> Walk:
        """The walk once a token stands at a position. Only what changes is computed anew."""
        place = position - self.stretch.start
        token_P = self.token_P.copy()
        token_P[place] = token
        walk = replace(
            self,
            token_P=token_P,
            reached_PS=self.reached_PS.copy(),
            ending_PS=self.ending_PS.copy(),
        )
        for i in range(place, len(token_P)):
            reached_S = walk._forward(i)
            if (reached_S == walk.reached_PS[i + 1]).all():
                break
            walk.reached_PS[i + 1] = reached_S
        for i in range(place, -1, -1):
            ending_S = walk._backward(i)
            if (ending_S == walk.ending_PS[i]).all():
                break
            walk.ending_PS[i] = ending_S
        return walk

    def _forward(self, place: int) -> np.ndarray:
        """The states after a place, from those before it."""
        automaton = self.stretch.at(place)
        states = np.flatnonzero(self.reached_PS[place])
        after_S = np.zeros(automaton.states + 1, bool)
        if self.token_P[place] == OPEN:
            ways_W = np.bitwise_or.reduce(automaton.ways_SW[states], 0)
            after_S[:-1] = unpacked(ways_W, automaton.states)
        else:
            after_S[automaton.next_SC[states, automaton.class_V[self.token_P[place]]]] = True
            after_S[-1] = False
        return after_S

    def _backward(self, place: int) -> np.ndarray:
        """The states before a place from which those after it lead to the end."""
        automaton = self.stretch.at(place)
        after_S = self.ending_PS[place + 1]
        before_S = np.zeros_like(after_S)
        if self.token_P[place] == OPEN:
            before_S[:-1] = (automaton.ways_SW & packed(after_S[:-1])).any(1)
        else:
            token = self.token_P[place]
            before_S[:-1] = after_S[automaton.next_SC[:, automaton.class_V[token]]]
        return before_S

    def allowed(self, position: int) -> np.ndarray:
        """The tokens that some completion has at a blank, as a bitmask [W]."""
        place = position - self.stretch.start
        automaton = self.stretch.at(place)
        live_S = self.reached_PS[place] & self.ending_PS[place]
        after_S = self.ending_PS[place + 1]
        masks = self.stretch.masks
        key = live_S.tobytes(), after_S.tobytes(), automaton is self.stretch.early
        if key not in masks:
            if len(masks) >= MOST_MASKS:
                masks.clear()
            states = np.flatnonzero(live_S)
            allowed_C = after_S[automaton.next_SC[states]].any(0)
            masks[key] = class_bitmask(allowed_C, automaton.class_V)
        return masks[key]


def class_bitmask(allowed_C: np.ndarray, class_V: np.ndarray) -> np.ndarray:
    """The tokens of some classes, as a bitmask [W]."""
    flags_V = np.zeros(words(len(class_V)) * BITS, bool)
    flags_V[: len(class_V)] = allowed_C[class_V]
    return np.packbits(flags_V, bitorder="little").view(np.int32)


class OnCanvas:
    """The languages of a canvas's stretches as the constraint of one sequence. Blanks outside of
    them are free."""

    error = ""  # there is always a completion

    def __init__(self, stretches: Sequence[Stretch], canvas: Sequence[int], vocab: int):
        self.vocab = vocab
        tokens = np.array(canvas, np.int64)
        self._blanks = [int(i) for i in np.flatnonzero(tokens == OPEN)]
        self._walks = [Walk.begin(one, tokens[one.start : one.end]) for one in stretches]
        self._stretch_at = {
            position: i
            for i, stretch in enumerate(stretches)
            for position in range(stretch.start, stretch.end)
        }

    @property
    def possible(self) -> bool:
        """Is there a completion?"""
        return all(walk.possible for walk in self._walks)

    def masks(
        self,
        chain: Sequence[int],
        places: Sequence[int],
        prefixes: Sequence[int],
        positions: Sequence[int],
    ) -> np.ndarray:
        """Rows behind a chain that cannot be completed are free: nothing leads there."""
        masks_LW = np.full((len(prefixes), words(self.vocab)), ANY, np.int32)
        after = self._along(list(zip(places, chain))[: max(prefixes, default=0)])
        for row, (length, position) in enumerate(zip(prefixes, positions)):
            index = self._stretch_at.get(position)
            if index is not None and length < len(after):
                masks_LW[row] = after[length][index].allowed(position)
        return masks_LW

    def drafted_walks(
        self, chain: Sequence[int], places: Sequence[int], positions: Sequence[int]
    ) -> list[tuple[Walk, dict[int, int]]]:
        """The walks that drafted blanks belong to, after a chain, with the row of each place; none
        where the chain cannot be completed."""
        after = self._along(list(zip(places, chain)))
        if len(after) <= len(chain):
            return []
        rows: dict[int, dict[int, int]] = {}
        for row, position in enumerate(positions):
            index = self._stretch_at.get(position)
            if index is not None:
                place = position - self._walks[index].stretch.start
                rows.setdefault(index, {})[place] = row
        return [(after[-1][index], found) for index, found in rows.items()]

    @property
    def first_blank(self) -> int | None:
        return self._blanks[0] if self._blanks else None

    def _along(self, placement: Sequence[tuple[int, int]]) -> list[list[Walk]]:
        """The walks after every prefix of a placement, as far as there is a completion."""
        after = [self._walks]
        for position, token in placement:
            walks = self._with_token(after[-1], position, token)
            if walks is None:
                break
            after.append(walks)
        return after

    def _with_token(self, walks: list[Walk], position: int, token: int) -> list[Walk] | None:
        """The walks with one more token; None if it leaves no completion."""
        index = self._stretch_at.get(position)
        if index is None:
            return walks
        walk = walks[index].with_token(position, token)
        if not walk.possible:
            return None
        return [*walks[:index], walk, *walks[index + 1 :]]

    def compatible(self, placement: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """What of a placement can stand together, asked one after the other: tokens that were drawn
        at once know nothing of each other."""
        walks = self._walks
        kept = []
        for position, token in placement:
            more = self._with_token(walks, position, token)
            if more is not None:
                walks = more
                kept.append((position, token))
        return kept

    def add(self, position: int, token: int) -> None:
        walks = self._with_token(self._walks, position, token)
        assert walks is not None, f"token {token} at position {position} leaves no completion"
        self._walks = walks
        self._blanks.remove(position)

    def replace(self, position: int, token: int) -> None:
        walks = self._with_token(self._walks, position, token)
        assert walks is not None, f"token {token} at position {position} leaves no completion"
        self._walks = walks

    def forced(self) -> int | None:
        if not self._blanks or self._blanks[0] not in self._stretch_at:
            return None
        first = self._blanks[0]
        return only_token(self._walks[self._stretch_at[first]].allowed(first))

    def likely(self, count: int) -> list[int]:
        """What is forced, one after the other."""
        walks = self._walks
        found: list[int] = []
        for position in self._blanks[:count]:
            index = self._stretch_at.get(position)
            token = None if index is None else only_token(walks[index].allowed(position))
            after = None if token is None else self._with_token(walks, position, token)
            if token is None or after is None:
                break
            walks = after
            found.append(token)
        return found

    def usable(self, tokens: Sequence[int]) -> int:
        return len(self._along(list(zip(self._blanks, tokens)))) - 1

    @property
    def met(self) -> bool:
        return all(walk.complete for walk in self._walks)

    @property
    def finished(self) -> bool:
        return False  # a canvas is filled to its end, or to a token that ends the text
