"""A grammar engine's matcher, which moves along one text, as a language whose states are values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """What engines offer: a position in a text that goes forward token by token, and back."""

    def consume(self, token: int) -> bool:
        """Go on with a token, if it is allowed. Whether it is."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, as a bitmask [W]; none after an error."""

    def accepts(self) -> bool:
        """May the text end here?"""

    def guess(self) -> list[int]:
        """Tokens that spell what must follow."""

    def allowed_together(self, others: Sequence[Matcher]) -> Sequence[np.ndarray]:
        """What it and others of its kind allow, one after the other."""

    @property
    def error(self) -> str:
        """Why it goes no further, if it met a limit of its own."""


class Node:
    """A state: the tokens that lead to it, as a path from the root."""

    __slots__ = ("_allowed_W", "accepts", "after", "depth", "parent", "token")

    def __init__(self, parent: Node | None, token: int):
        self.parent = parent
        self.token = token
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.after: dict[int, Node | None] = {}
        self._allowed_W: np.ndarray | None = None
        self.accepts = False

    def look(self, matcher: Matcher, allowed_W: np.ndarray | None = None) -> None:
        """Keep what the matcher says here."""
        self._allowed_W = matcher.allowed() if allowed_W is None else allowed_W
        self.accepts = matcher.accepts()

    @property
    def known(self) -> bool:
        return self._allowed_W is not None

    @property
    def allowed_W(self) -> np.ndarray:
        assert self._allowed_W is not None, "looked at"
        return self._allowed_W

    def forget(self) -> None:
        """Nobody asks what follows any more."""
        self.after = {}
        self._allowed_W = None


class MatcherLanguage:
    """One text's way through a grammar, drafts included. The matcher is moved to whichever state is
    asked about: back to where the ways part, then forward. What it said is kept, so a verdict on a
    draft that was drawn under the mask asks nothing twice."""

    def __init__(self, matcher: Matcher):
        self.matcher = matcher
        self._root = Node(None, -1)
        self._at = self._root

    def start(self) -> Node:
        return self._root

    def advance(self, state: Node, token: int) -> Node | None:
        if token not in state.after:
            self.move_to(state)
            allowed = self.matcher.consume(token)
            node = Node(state, token) if allowed else None
            state.after[token] = node
            self._at = node or state
        return state.after[token]

    def allowed(self, state: Node) -> np.ndarray:
        return self._looked_at(state).allowed_W

    def accepts(self, state: Node) -> bool:
        return self._looked_at(state).accepts

    @property
    def error(self) -> str:
        return self.matcher.error

    def guess(self, state: Node) -> list[int]:
        self.move_to(state)
        return self.matcher.guess()

    def settle(self, state: Node) -> None:
        if state.parent is not None:
            state.parent.forget()
            state.parent.after = {state.token: state}

    def _looked_at(self, state: Node) -> Node:
        if not state.known:
            self.move_to(state)
            state.look(self.matcher)
        return state

    def move_to(self, state: Node) -> None:
        """Move the matcher to a state."""
        here: Node | None = self._at
        there: Node | None = state
        forward: list[int] = []
        back = 0
        while here is not there:
            assert here is not None and there is not None, "of one tree"
            if here.depth >= there.depth:
                back += 1
                here = here.parent
            else:
                forward.append(there.token)
                there = there.parent
        if back:
            self.matcher.rollback(back)
        for token in reversed(forward):
            self.matcher.consume(token)
        self._at = state


def look_together(asked: Sequence[tuple[MatcherLanguage, Node]]) -> None:
    """Have the matchers of several texts say at once what they allow, each at one state: no
    language may be there twice."""
    unknown = [(language, state) for language, state in asked if not state.known]
    kinds: dict[type, list[tuple[MatcherLanguage, Node]]] = {}
    for language, state in unknown:
        language.move_to(state)
        kinds.setdefault(type(language.matcher), []).append((language, state))
    for alike in kinds.values():
        first, *others = [language.matcher for language, _ in alike]
        masks = first.allowed_together(others)
        for (language, state), mask_W in zip(alike, masks, strict=True):
            state.look(language.matcher, mask_W)
