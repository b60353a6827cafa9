"""Regular languages as automata: over bytes, and over the tokens of one vocabulary.

S states, B = 256 bytes, V tokens, C classes of tokens, N nodes of a level of the vocabulary's tree.
State S is dead: no way leads out of it. A token automaton treats tokens alike that lead from every
state to the same one. They form a class, and there are few: all that is asked of an automaton costs
S x C, not S x V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from forerun.constraints.spelling import Spelling
from forerun.errors import BadOption

BYTES = 256
MOST_CELLS = 1 << 28  # states times tokens


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over bytes."""

    table_SB: np.ndarray
    final_S: np.ndarray
    start: int

    @property
    def states(self) -> int:
        return len(self.final_S)

    def accepts(self, text: bytes) -> bool:
        state = self.start
        for byte in text:
            if state == self.states:
                return False
            state = int(self.table_SB[state, byte])
        return state < self.states and bool(self.final_S[state])


def automaton_of_choices(choices: Sequence[bytes]) -> ByteAutomaton:
    """The automaton of a few texts."""
    ways: list[dict[int, int]] = [{}]
    final = {0} if b"" in choices else set()
    for text in choices:
        state = 0
        for byte in text:
            if byte not in ways[state]:
                ways[state][byte] = len(ways)
                ways.append({})
            state = ways[state][byte]
        final.add(state)
    table_SB = np.full((len(ways), BYTES), len(ways), np.int32)
    for state, after in enumerate(ways):
        table_SB[state, list(after)] = list(after.values())
    final_S = np.zeros(len(ways), bool)
    final_S[list(final)] = True
    return ByteAutomaton(table_SB, final_S, 0)


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A deterministic automaton over tokens, by classes. Tokens of class 0 lead nowhere. `over` is
    the state of a text that has ended, if there is one."""

    next_SC: np.ndarray
    class_V: np.ndarray
    final_S: np.ndarray
    start: int
    over: int | None = None

    @property
    def states(self) -> int:
        return len(self.final_S)

    def step(self, state: int, token: int) -> int:
        if state == self.states:
            return state
        return int(self.next_SC[state, self.class_V[token]])

    def accepts(self, tokens: Sequence[int]) -> bool:
        state = self.start
        for token in tokens:
            state = self.step(state, token)
        return state < self.states and bool(self.final_S[state])

    @cached_property
    def ways_SW(self) -> np.ndarray:
        """From which state some token leads to which: bits, packed into words."""
        return packed_ways(self.next_SC)

    def lengths(self, most: int) -> list[int]:
        """How many tokens a text of the language may have, up to `most`."""
        reached_S = np.zeros(self.states, bool)
        reached_S[self.start] = True
        found = []
        for length in range(most + 1):
            if (reached_S & self.final_S).any():
                found.append(length)
            reached_S = unpacked(np.bitwise_or.reduce(self.ways_SW[reached_S], 0), self.states)
        return found


def packed_ways(next_SC: np.ndarray) -> np.ndarray:
    """A bit for every pair of states, whether one class at least leads from one to the other."""
    states = len(next_SC)
    ways_SS = np.zeros((states, states + 1), bool)
    ways_SS[np.arange(states)[:, None], next_SC] = True
    return packed(ways_SS[:, :states])


def packed(flags: np.ndarray) -> np.ndarray:
    """Truth values along the last axis as bits of words."""
    width = -(-flags.shape[-1] // 64) * 64
    whole = np.zeros((*flags.shape[:-1], width), bool)
    whole[..., : flags.shape[-1]] = flags
    return np.packbits(whole, axis=-1, bitorder="little").view(np.uint64)


def unpacked(words: np.ndarray, count: int) -> np.ndarray:
    """Bits as truth values."""
    return np.unpackbits(words.view(np.uint8), count=count, bitorder="little").view(bool)


def token_automaton(language: ByteAutomaton, spelling: Spelling) -> TokenAutomaton:
    """What every token does from every state, with tokens that do the same in one class."""
    if language.states * len(spelling) > MOST_CELLS:
        raise BadOption(
            f"the constraint has {language.states} states, and with {len(spelling)} tokens at "
            f"most {MOST_CELLS // len(spelling)} can be held: make it simpler."
        )
    tokens, next_ST = _walk(language, spelling)
    rng = np.random.default_rng(0)
    weight_S = rng.integers(1, 1 << 62, language.states, np.uint64) | np.uint64(1)
    hash_T = weight_S @ next_ST.astype(np.uint64)
    _, first_C, class_T = np.unique(hash_T, return_index=True, return_inverse=True)
    next_SC = next_ST[:, first_C]
    assert (next_SC[:, class_T] == next_ST).all(), "two classes of tokens have one hash"
    dead_S1 = np.full((language.states, 1), language.states, next_SC.dtype)
    class_V = np.zeros(len(spelling), np.intp)  # of the kind that indexing is fastest with
    class_V[tokens] = 1 + class_T
    next_SC = np.concatenate([dead_S1, next_SC], 1).astype(np.int32)
    return TokenAutomaton(next_SC, class_V, language.final_S, language.start)


def _walk(language: ByteAutomaton, spelling: Spelling) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that lead from some state to a live one, and to which: [S, T].

    The tree of tokens is walked level by level from all states at once. Nodes that are dead from
    all of them are left out, and with them all tokens below.
    """
    dead = language.states
    kind = np.int16 if dead < 1 << 15 else np.int32
    table_SB = np.concatenate([language.table_SB, np.full((1, BYTES), dead)]).astype(kind)
    # Before the first level there is the root alone.
    state_SN: np.ndarray = np.arange(dead, dtype=kind)[:, None]
    place_N = np.zeros(1, np.int64)  # where each node of the level before is in it; -1 if left out
    tokens = []
    columns = []
    for level in spelling.levels:
        kept_N = np.flatnonzero(place_N[level.parent_N] >= 0)
        parent_N = place_N[level.parent_N[kept_N]]
        state_SN = table_SB[state_SN[:, parent_N], level.byte_N[kept_N]]
        alive_N = (state_SN != dead).any(0)
        state_SN = state_SN[:, alive_N]
        place_N = np.full(len(level.parent_N), -1)
        place_N[kept_N[alive_N]] = np.arange(state_SN.shape[1])
        ends = place_N[level.node_T]
        tokens.append(level.token_T[ends >= 0])
        columns.append(state_SN[:, ends[ends >= 0]])
    if not tokens:
        return np.zeros(0, np.int64), np.zeros((dead, 0), kind)
    return np.concatenate(tokens), np.concatenate(columns, 1)


def restricted(automaton: TokenAutomaton, possible_V: np.ndarray) -> TokenAutomaton:
    """The same without tokens that are never written, so that no way counts on them."""
    left_V = np.where(possible_V, automaton.class_V, 0)
    kept_C, number_V = np.unique(np.append(left_V, 0), return_inverse=True)  # class 0 stays
    return replace(automaton, next_SC=automaton.next_SC[:, kept_C], class_V=number_V[:-1])


def with_ends(automaton: TokenAutomaton, ends: Sequence[int]) -> TokenAutomaton:
    """The same for a text that may end before its last place: after a text of the language one of
    the `ends` may come, and after that anything."""
    states = automaton.states
    over = states  # one state more; the dead one comes after it
    next_SC = np.where(automaton.next_SC == states, states + 1, automaton.next_SC)
    after_end_S1 = np.where(automaton.final_S, over, states + 1)[:, None]
    next_SC = np.concatenate([next_SC, after_end_S1], 1)
    next_SC = np.concatenate([next_SC, np.full((1, next_SC.shape[1]), over)]).astype(np.int32)
    class_V = automaton.class_V.copy()
    class_V[list(ends)] = next_SC.shape[1] - 1
    final_S = np.append(automaton.final_S, True)
    return TokenAutomaton(next_SC, class_V, final_S, automaton.start, over)


def without_ends(automaton: TokenAutomaton) -> TokenAutomaton:
    """What `with_ends` made, where the text may not end yet: same states, but the ends lead
    nowhere."""
    next_SC = automaton.next_SC.copy()
    next_SC[:, -1] = automaton.states
    return replace(automaton, next_SC=next_SC)
