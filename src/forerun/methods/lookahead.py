"""Lookahead decoding (Fu et al., 2024), the published baseline of recycled Jacobi iterates: a window of them makes n-grams, which
are judged once their first token is reached."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import cat

from forerun.accept import descend
from forerun.core import TAILS, Branching, Canvas
from forerun.drafters.recycled import Pool, path, tails, tree
from forerun.errors import BadOption
from forerun.methods.jacobi import guess
from forerun.methods.multiblock import commit
from forerun.parameters import check_whole
from forerun.registry import method


@dataclass(frozen=True)
class Lookahead:
    window: int = field(default=10, metadata={"help": "places looked ahead at once, W"})
    ngram: int = field(default=5, metadata={"help": "tokens of an n-gram, N; the last N - 1 iterates are kept"})
    guesses: int = field(default=10, metadata={"help": "n-grams judged per forward, G"})

    def __post_init__(self) -> None:
        check_whole("window", self.window)
        check_whole("ngram", self.ngram, least=3)
        check_whole("guesses", self.guesses)
        rows = self.window * (self.ngram - 1) + self.guesses * (self.ngram - 1)
        if rows > TAILS:
            raise BadOption(f"window={self.window}, ngram={self.ngram}, guesses={self.guesses} take {rows} tokens; {TAILS} fit.")


@method("lookahead", guarantee="exact", reference="ar", options=Lookahead)
async def lookahead(seq: Canvas, target: Branching, window: int, ngram: int, guesses: int) -> None:
    """Keep a window of past Jacobi iterates, collect the n-grams along its columns, judge those that begin with the last token.

    Row l of the window is the iterate of l steps after the oldest; column w speaks of the w-th place ahead. A column's next token
    sees the oldest row up to it and the column itself: a tail of the oldest row.
    """
    rows = [guess(seq, [], window, "random") for _ in range(ngram - 1)]
    pool = Pool(ngram - 1, per_key=guesses)
    while not seq.done:
        left = seq.remaining - 1
        judged = tails([], pool.after(int(seq.text[-1])), guesses, min(ngram - 1, left))
        width = min(window, left - (ngram - 2))  # near the end there is nothing to look ahead to
        columns = [(w + 1, [row[w] for row in rows[1:]]) for w in range(width)]
        main, *answers = await target.branches(seq, rows[0][: max(width, 0)], [*judged, *columns])
        tokens, parents = tree([], judged)
        ends = [answer[-1:] for answer in answers[len(judged) :]]  # no nodes of the tree: only what is likeliest there is wanted
        node, token, *said = await seq.draw(descend, tokens, parents, cat([main[:1], *answers[: len(judged)], *ends]))
        commit(seq, path(node, parents), token, [], judged, 0)
        fresh = said[len(tokens) + 1 :][: len(ends)]
        for w, new in enumerate(fresh):
            pool.add([*(row[w] for row in rows), new])
        rows = [*rows[1:], [*fresh, *rows[-1][len(fresh) :]]] if fresh else rows
