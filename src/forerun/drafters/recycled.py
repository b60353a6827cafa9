"""A rejected guess may be right a little later: an index of such runs of tokens by the token before
them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from forerun.families.causal import MAX_TAIL_TOKENS, Tail

MOST_KEYS = 4096  # tokens that the index knows continuations of; the least recently used goes first

MOST_ADDED = 1000  # runs that may be looked through one by one
SEEN_TWICE = 3  # times as many places of a token as continuations are kept: some say the same

Seen = tuple[tuple[int, ...], int]  # a run, and what comes behind so many tokens of it


class RunPool:
    """Continuations by the token before them, the latest first, none twice."""

    def __init__(self, longest: int, per_key: int = 8):
        self.longest = longest
        self.per_key = per_key
        # for every token, the runs that it stands in and its place there, counted from 1: much is
        # added and little asked for
        self._seen: OrderedDict[int, list[Seen]] = OrderedDict()
        self._added: list[tuple[int, ...]] = []  # runs that are not in the index yet
        self._asked: list[int] = []  # tokens that were asked about since

    def add(self, run: Sequence[int]) -> None:
        """Remember a run of tokens: after every token of it, what came next."""
        self._added.append(tuple(run))

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed this token, the latest first."""
        if len(self._added) + len(self._asked) > MOST_ADDED:
            self.index()
        self._asked.append(token)
        new = [
            (run, place)
            for run in self._added
            if token in run
            for place, other in enumerate(run[:-1], 1)
            if other == token
        ]
        return list(self._latest(self._seen.get(token, []) + new))

    def index(self) -> None:
        """Put what was added into the index, which had better be done while a model works."""
        most = SEEN_TWICE * self.per_key
        for run in self._added:
            for place, token in enumerate(run[:-1], 1):
                seen = self._seen.setdefault(token, [])
                seen.append((run, place))
                self._seen.move_to_end(token)
                if len(seen) > most:
                    seen[:] = reversed(self._latest(seen).values())
        for token in filter(self._seen.__contains__, self._asked):
            self._seen.move_to_end(token)
        self._added.clear()
        self._asked.clear()
        while len(self._seen) > MOST_KEYS:
            self._seen.popitem(last=False)

    def _latest(self, seen: Sequence[Seen]) -> dict[tuple[int, ...], Seen]:
        """The latest different continuations, and where each was seen."""
        found: dict[tuple[int, ...], Seen] = {}
        for one in reversed(seen):
            run, place = one
            found.setdefault(run[place : place + self.longest], one)
            if len(found) == self.per_key:
                break
        return found


def tails_of(
    chain: Sequence[int], runs: Iterable[Sequence[int]], count: int, longest: int
) -> list[Tail]:
    """At most `count` runs as tails: where each leaves the chain, and what it says from there.

    No two begin alike, so that the chain and its tails are a tree. Runs that only repeat the chain
    are left out.
    """
    found: list[Tail] = []
    begun: set[tuple[int, int]] = set()
    room = MAX_TAIL_TOKENS
    for run in runs:
        if len(found) == count:
            break
        depart = _common_prefix(chain, run) if chain else 0
        tokens = run[depart : min(longest, depart + room)]
        if tokens and (depart, tokens[0]) not in begun:
            begun.add((depart, tokens[0]))
            found.append(Tail(depart, tokens))
            room -= len(tokens)
    return found


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for count, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return count
    return min(len(a), len(b))


def tree_of(chain: Sequence[int], tails: Sequence[Tail]) -> tuple[list[int], list[int]]:
    """Tokens of a chain and its tails, and the number of each one's parent; node 0 is the text,
    node i the token i - 1."""
    tokens = list(chain)
    parents = list(range(len(chain)))
    for tail in tails:
        parents += [tail.depart, *range(len(tokens) + 1, len(tokens) + len(tail.tokens))]
        tokens += tail.tokens
    return tokens, parents


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes on the way from the text to a node, the text not among them."""
    found = []
    while node:
        found.append(node)
        node = parents[node - 1]
    return found[::-1]
