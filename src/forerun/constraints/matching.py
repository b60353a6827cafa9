"""A grammar engine's matcher, which moves along one text, as a language whose states are values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

Made = TypeVar("Made")

MOST_KEPT = 16  # things made for the beginning of one grammar's texts


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

    def allowed_together(self, others: Sequence[Matcher]) -> np.ndarray:
        """What it and others of its kind allow, one after the other, [N, W]."""

    @property
    def error(self) -> str:
        """Why it goes no further, if it met a limit of its own."""


class Seen(NamedTuple):
    """What a matcher said at a state."""

    allowed_W: np.ndarray
    accepts: bool


class Node:
    """A state: the tokens that lead to it, as a path from the root."""

    __slots__ = ("after", "depth", "parent", "seen", "token")

    def __init__(self, parent: Node | None, token: int):
        self.parent = parent
        self.token = token
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.after: dict[int, Node | None] = {}
        self.seen: Seen | None = None

    def look(self, matcher: Matcher, allowed_W: np.ndarray | None = None) -> Seen:
        """Keep what the matcher says here."""
        mask_W = matcher.allowed() if allowed_W is None else allowed_W
        self.seen = Seen(mask_W, matcher.accepts())
        return self.seen

    def forget(self) -> None:
        """Nobody asks what follows any more."""
        self.after = {}
        self.seen = None


class BeginningsKept:
    """What is known of the beginnings of a grammar's texts, kept with it: all texts begin there."""

    def __init__(self) -> None:
        self.root: Seen | None = None
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, made once; only the last few are kept."""
        if key not in self._made:
            while len(self._made) >= MOST_KEPT:
                self._made.pop(next(iter(self._made)))
            self._made[key] = make()
        return self._made[key]


class MatcherLanguage:
    """One text's way through a grammar, drafts included. The matcher is moved to whichever state is
    asked about: back to where the ways part, then forward. What it said is kept, so a verdict on a
    draft that was drawn under the mask asks nothing twice."""

    def __init__(self, matcher: Matcher, kept: BeginningsKept | None = None):
        self.matcher = matcher
        self.kept = BeginningsKept() if kept is None else kept
        self._root = Node(None, -1)
        self._at = self._root
        if self.kept.root is None:
            seen = self._root.look(matcher)
            self.kept.root = None if matcher.error else seen
        else:
            self._root.seen = self.kept.root

    def start(self) -> Node:
        return self._root

    def advance(self, state: Node, token: int) -> Node | None:
        if token not in state.after:
            if self._at is not state:
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

    def _looked_at(self, state: Node) -> Seen:
        if state.seen is not None:
            return state.seen
        self.move_to(state)
        return state.look(self.matcher)

    def move_to(self, state: Node) -> None:
        """Move the matcher to a state."""
        if self._at is state:
            return
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


def look_together(
    asked: Sequence[tuple[MatcherLanguage, Node]],
) -> list[tuple[list[int], np.ndarray]]:
    """Have the matchers of several texts say at once what they allow, each at one state: no
    language may be there twice, and no state may be known. For each kind of matcher, whose texts
    are of that kind, by index, and their masks [N, W]."""
    kinds: dict[type, list[int]] = {}
    for i, (language, state) in enumerate(asked):
        language.move_to(state)
        kinds.setdefault(type(language.matcher), []).append(i)
    found = []
    for members in kinds.values():
        first, *others = [asked[i][0].matcher for i in members]
        masks_NW = first.allowed_together(others)
        for i, mask_W in zip(members, masks_NW, strict=True):
            language, state = asked[i]
            state.look(language.matcher, mask_W)
        found.append((members, masks_NW))
    return found
