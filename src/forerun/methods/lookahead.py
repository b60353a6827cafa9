"""Lookahead decoding (Fu et al., 2024), the published baseline of recycled Jacobi iterates: a
window of them makes n-grams, which are judged once their first token is reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, cat

from forerun.drafters.recycled import RunPool, tails_of
from forerun.errors import BadOption
from forerun.families.causal import MAX_TAIL_TOKENS, Tail, TreeScorer
from forerun.methods.jacobi import guess
from forerun.methods.multiblock import GuessTree, commit
from forerun.options import check_whole
from forerun.registry import method
from forerun.sequence.canvas import Canvas


@dataclass(frozen=True)
class LookaheadOptions:
    window: int = field(default=10, metadata={"help": "places looked ahead at once, W"})
    ngram: int = field(
        default=5, metadata={"help": "tokens of an n-gram, N; the last N - 1 iterates are kept"}
    )
    guesses: int = field(default=10, metadata={"help": "n-grams judged per forward, G"})

    def __post_init__(self) -> None:
        check_whole("window", self.window)
        check_whole("ngram", self.ngram, least=3)
        check_whole("guesses", self.guesses)
        rows = (self.window + self.guesses) * (self.ngram - 1)
        if rows > MAX_TAIL_TOKENS:
            raise BadOption(
                f"window={self.window}, ngram={self.ngram}, guesses={self.guesses} take {rows} "
                f"tokens; {MAX_TAIL_TOKENS} fit."
            )


@method("lookahead", guarantee="exact", reference="ar")
async def lookahead(seq: Canvas, target: TreeScorer, options: LookaheadOptions) -> None:
    """Keep a window of past Jacobi iterates, collect the n-grams along its columns, judge those
    that begin with the last token.

    Row l of the window is the iterate of l steps after the oldest; column w speaks of the w-th
    place ahead. A column's next token sees the oldest row up to it and the column itself: a tail of
    the oldest row.
    """
    longest = options.ngram - 1
    rows = [guess(seq, [], options.window, "random") for _ in range(longest)]
    pool = RunPool(longest, per_key=options.guesses)
    while seq.goes_on():
        left = seq.remaining - 1
        runs = pool.after(int(seq.text[-1]))
        judged = tails_of([], runs, options.guesses, min(longest, left))
        width = max(min(options.window, left - (longest - 1)), 0)  # near the end nothing is ahead
        columns = [Tail(w, column) for w, column in enumerate(zip(*rows[1:]), 1)][:width]
        tree = GuessTree([], judged)
        descent = await target.descended(
            seq,
            rows[0][:width],
            [*judged, *columns],
            tree,
            pick=partial(laws_of, tree, columns),
            meanwhile=pool.index,
        )
        commit(seq, tree, descent, first_block=0)
        fresh = descent.likeliest[len(tree.tokens) + 1 :][:width]
        for ngram in zip(*rows, fresh):
            pool.add(ngram)
        if fresh:
            rows = [*rows[1:], [*fresh, *rows[-1][len(fresh) :]]]


def laws_of(tree: GuessTree, columns: Sequence[Tail], p_LV: Tensor) -> Tensor:
    """Of the laws of the oldest row, of n-grams and of columns: those of the tree, which are the
    text's and the n-grams'; and of each column the last, as only what is likeliest after it is
    wanted."""
    main = 1 + len(columns)
    end = main + len(tree.tokens)
    of_tree = [p_LV[:1], p_LV[main:end]]
    if not columns:
        return cat(of_tree)
    length = len(columns[0].tokens)
    return cat([*of_tree, p_LV[end + length - 1 :: length]])
