"""A language from left to right as the constraint of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import zip_longest
from typing import Generic, NamedTuple, cast

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

SOME = 8  # words of a bitmask: those of single characters, of which most states allow many
MOST_KNOWN = 32  # states of one text whose masks are kept
MOST_FORCED = 16  # tokens that must follow a drawn one and are looked after with it


class Writable:
    """The tokens that a text may hold."""

    def __init__(self, possible_W: np.ndarray, ends: frozenset[int], vocab: int):
        self.ordinary_W = possible_W & ~bitmask(ends, vocab)
        self.ending_W = possible_W & bitmask(ends, vocab)
        self._ends = ends
        self._ending_words = np.flatnonzero(self.ending_W).tolist()  # few

    def known(self, masks_NW: np.ndarray, accepts: Sequence[bool]) -> list[Known]:
        """What may follow some states, given what a language allows there. The masks are narrowed
        in place: they are large."""
        allowed_NW = np.bitwise_and(masks_NW, self.ordinary_W, out=masks_NW)
        many = ((allowed_NW[:, :SOME] != 0).sum(1) > 1).tolist()
        for row, accepted in enumerate(accepts):
            if accepted:
                for word in self._ending_words:
                    allowed_NW[row, word] |= self.ending_W[word]
        return [
            Known(allowed_NW, row, accepts[row], many[row], self._only(allowed_NW[row], many[row]))
            for row in range(len(many))
        ]

    def _only(self, allowed_W: np.ndarray, many: bool) -> int | None:
        token = None if many else only_token(allowed_W)
        return None if token in self._ends else token


class Known(NamedTuple):
    """What may follow a state."""

    masks_NW: np.ndarray  # bitmasks of some states that were found out together
    row: int  # of this one
    accepts: bool
    many: bool  # are there surely several tokens that do not end the text?
    only: int | None  # the token that must follow, where there is one

    @property
    def mask_W(self) -> np.ndarray:
        return self.masks_NW[self.row]


@lru_cache(maxsize=64)
def _writable(possible: bytes, ends: frozenset[int], vocab: int) -> Writable:
    """That of one set of tokens is kept: most requests have the same, and are looked after
    together."""
    return Writable(np.frombuffer(possible, np.int32), ends, vocab)


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
        self.writable = _writable(possible_W.tobytes(), ends, vocab)
        self._known: dict[State, Known] = {}
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
        return self.language.kept.once((key, self.writable), make)

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
            return np.zeros((len(prefixes), len(self.writable.ending_W)), np.int32)
        states = self._states(chain, max(prefixes, default=0))
        rows = [
            self._mask(states[length])
            if position == self.next + length
            and length < len(states)
            and not (length and self._is_over(states[length]))
            else None
            for length, position in zip(prefixes, positions)
        ]
        if len(prefixes) == len(rows) == 1 and rows[0] is not None:
            return rows[0][None]
        masks_LW = np.full((len(prefixes), len(self.writable.ending_W)), ANY, np.int32)
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
            state = self.after(states[-1], token)
            if state is None:
                break
            states.append(state)
        return states

    def after(self, state: State, token: int) -> State | None:
        """The state after one token more; None where it is not allowed, or ends the text."""
        return None if token in self.ends else self.language.advance(state, token)

    def known(self, state: State) -> Known:
        """What may follow a state. It is kept: a state is asked about several times."""
        known = self._known.get(state)
        if known is None:
            masks_1W = self.language.allowed(state)[None].copy()
            [known] = self.writable.known(masks_1W, [self.language.accepts(state)])
            self.learn(state, known)
        return known

    def learn(self, state: State, known: Known) -> None:
        """Keep what may follow a state."""
        while len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[state] = known

    def known_at(self, position: int) -> Known | None:
        """What is known of the token at a position: at the first blank, if anything is."""
        if position != self.next or self._state is None:
            return None
        return self._known.get(self._state)

    def _mask(self, state: State) -> np.ndarray:
        return self.known(state).mask_W

    def _is_over(self, state: State) -> bool:
        """Does a text end with the token that leads here, and no token may say so? A draft may lead
        here, and what its last row would draw is for nobody."""
        known = self.known(state)
        return known.accepts and not known.many and not known.mask_W.any()

    def open_states(self, chain: Sequence[int]) -> list[Node]:
        """The states along a chain whose masks an engine has not been asked for."""
        if not isinstance(self.language, MatcherLanguage):
            return []
        if not chain:
            states = [self._state]
        elif len(chain) == 1 and isinstance(self._state, Node) and self._state.seen:
            states = [self.after(self._state, chain[0])]  # as nearly always
        else:
            states = [*self._states(chain, len(chain))]
        return [one for one in states if isinstance(one, Node) and not one.seen]

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
        ordinary_W = self.writable.ordinary_W
        if len(states) <= len(before):
            return np.zeros_like(ordinary_W)
        return self._mask(states[-1]) & ordinary_W

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
        return self.known(self._state).only

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
        if self._state is None:
            return False
        known = self.known(self._state)
        if known.many or not known.accepts:
            return False
        return not (known.mask_W & self.writable.ordinary_W).any()


def look_ahead(
    asked: Sequence[tuple[Constraint, Sequence[int]]], follow_forced: bool = False
) -> None:
    """Have the engines of several sequences find, at once, what may follow each token of a chain;
    and, if that is wanted, what follows the tokens that must come after it. What they will be asked
    is then known; no answer changes."""
    with suppress(Exception):  # of an engine: whoever asks it on its own will see
        waiting: dict[LeftToRight[Node], dict[Node, None]] = {}
        for constraint, chain in asked:
            if isinstance(constraint, LeftToRight):
                states = constraint.open_states(chain)
                if states:  # of all its chains
                    waiting.setdefault(constraint, {}).update(dict.fromkeys(states))
        for each in zip_longest(*waiting.values()):  # an engine is at one state of a text at a time
            _look_together([(c, state) for c, state in zip(waiting, each) if state is not None])
        if follow_forced:
            _follow_forced([(c, next(reversed(found))) for c, found in waiting.items()])


def _follow_forced(last: Sequence[tuple[LeftToRight[Node], Node]]) -> None:
    """Look after the tokens that must follow some states, one after the other."""
    for _ in range(MOST_FORCED):
        forced = [(c, state, c.known(state).only) for c, state in last]
        after = [(c, c.after(state, token)) for c, state, token in forced if token is not None]
        last = [(c, state) for c, state in after if state is not None]
        if not last:
            break
        _look_together([(c, state) for c, state in last if not state.seen])


def _look_together(asked: Sequence[tuple[LeftToRight[Node], Node]]) -> None:
    """Have the engines of several texts say what they allow, each at one state."""
    texts = [(cast("MatcherLanguage", constraint.language), state) for constraint, state in asked]
    for members, masks_NW in look_together(texts):
        alike: dict[Writable, list[int]] = {}
        for row, member in enumerate(members):
            alike.setdefault(asked[member][0].writable, []).append(row)
        for writable, rows in alike.items():
            mine_NW = masks_NW if len(rows) == len(members) else masks_NW[rows]
            mine = [asked[members[row]] for row in rows]
            accepts = [state.seen is not None and state.seen.accepts for _, state in mine]
            for (constraint, state), known in zip(mine, writable.known(mine_NW, accepts)):
                constraint.learn(state, known)


def masks_found_together(asked: Sequence[tuple[Constraint | None, int]]) -> np.ndarray | None:
    """The masks of the first blank of several texts, [N, W], if they were found out together;
    (constraint, position) of each."""
    known = [
        one.known_at(position) if isinstance(one, LeftToRight) else None for one, position in asked
    ]
    first = known[0]
    if first is None:
        return None
    masks_NW = first.masks_NW
    rows = [one.row for one in known if one is not None and one.masks_NW is masks_NW]
    if len(rows) < len(known):
        return None
    return masks_NW if rows == list(range(len(masks_NW))) else masks_NW[rows]
