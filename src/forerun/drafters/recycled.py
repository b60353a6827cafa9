"""A rejected guess may be right a little later: an index of such runs of tokens by the token before
them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from forerun.families.causal import MAX_TAIL_TOKENS, Tail

MOST_KEYS = 4096  # tokens that the index knows continuations of; the least recently used goes first


class RunPool:
    """Continuations by the token before them, the latest first, none twice."""

    def __init__(self, longest: int, per_key: int = 8):
        self.longest = longest
        self.per_key = per_key
        self._after: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, run: Sequence[int]) -> None:
        """Remember a run of tokens: after every token of it, what came next."""
        for end, token in enumerate(run[:-1], 1):
            later = tuple(run[end : end + self.longest])
            known = self._after.setdefault(token, OrderedDict())
            self._after.move_to_end(token)
            known[later] = None
            known.move_to_end(later)
            if len(known) > self.per_key:
                known.popitem(last=False)
        while len(self._after) > MOST_KEYS:
            self._after.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed this token, the latest first."""
        if token not in self._after:
            return []
        self._after.move_to_end(token)
        return list(reversed(self._after[token]))


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
        depart = _common_prefix(chain, run)
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
