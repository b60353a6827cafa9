"""What was guessed and rejected may be right a little later: an index of such runs of tokens by the token before them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from forerun.core import TAILS, Tail

KEYS = 4096  # tokens that the index knows continuations of, at most; the one not used for longest goes first


class Pool:
    """Continuations by the token before them, the latest first, none twice."""

    def __init__(self, longest: int, per_key: int = 8):
        self.longest, self.per_key = longest, per_key
        self._after: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, run: Sequence[int]) -> None:
        """Remember a run of tokens: from every token of it what came next."""
        for i in range(len(run) - 1):
            known = self._after.setdefault(run[i], OrderedDict())
            self._after.move_to_end(run[i])
            later = tuple(run[i + 1 : i + 1 + self.longest])
            known.pop(later, None)
            known[later] = None
            if len(known) > self.per_key:
                known.popitem(last=False)
        while len(self._after) > KEYS:
            self._after.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed this token, the latest first."""
        if token not in self._after:
            return []
        self._after.move_to_end(token)
        return list(reversed(self._after[token]))


def tails(chain: Sequence[int], runs: Iterable[Sequence[int]], count: int, longest: int) -> list[Tail]:
    """At most `count` runs as tails: where each leaves the chain, and what it says from there. No two begin alike, so that the
    chain and its tails are a tree; runs that only repeat the chain are left out."""
    found: list[Tail] = []
    begun: set[tuple[int, int]] = set()
    room = TAILS
    for run in runs:
        if len(found) == count:
            break
        same = next((i for i, (a, b) in enumerate(zip(chain, run)) if a != b), min(len(chain), len(run)))
        own = run[same : min(longest, same + room)]
        if own and (same, own[0]) not in begun:
            begun.add((same, own[0]))
            found.append((same, own))
            room -= len(own)
    return found


def tree(chain: Sequence[int], tails: Sequence[Tail]) -> tuple[list[int], list[int]]:
    """Tokens of a chain and its tails, and the number of each one's parent; node 0 is the text, node i the token i - 1."""
    tokens, parents = list(chain), list(range(len(chain)))
    for depart, own in tails:
        parents += [depart, *range(len(tokens) + 1, len(tokens) + len(own))]
        tokens += own
    return tokens, parents


def path(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes on the way from the text to a node, the text not among them."""
    found = []
    while node:
        found.append(node)
        node = parents[node - 1]
    return found[::-1]
