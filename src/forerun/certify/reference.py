"""Reference laws straight from the definition: no engine, no rows, no method.

A certificate compares what a method writes with one of these.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forerun.backbones.table import TableBackbone, digest
from forerun.families.base import Family
from forerun.families.block import Block
from forerun.options import Sampling
from forerun.probability.logits import ChainRows, TokenHistory, laws_from_logits

Law = dict[tuple[int, ...], float]
Prompt = Sequence[int | None]
Rows = Sequence[tuple[int, int]]  # (position, token)
State = tuple[int | None, ...]  # a canvas, with None for every blank


def blanks_of(canvas: Prompt) -> list[int]:
    return [i for i, token in enumerate(canvas) if token is None]


def reference_law(
    target: TableBackbone,
    prompt: Prompt,
    *,
    eos: Sequence[int] = (),
    mask: int | None = None,
    family: Family | None = None,
    size: int = 1,
    **options: Any,
) -> Law:
    """The law of whole sequences, one conditional after another.

    Of a block model it is left-to-right decoding; with a `size`, of text whose finished blocks of
    that size see themselves whole.
    """
    sampling = Sampling(**options)
    infills = None in prompt
    ends = frozenset() if sampling.ignore_eos else frozenset(eos)
    stops = (frozenset() if infills else ends) | frozenset(sampling.stop_token_ids)
    never = (frozenset() if mask is None else {mask}) | (ends if infills else frozenset())
    canvas = [*prompt, *[None] * (sampling.max_tokens or 0)]
    given = [(i, token) for i, token in enumerate(canvas) if token is not None]
    blanks = blanks_of(canvas)
    finished: Law = {}
    growing: Law = {(): 1.0}
    for position in blanks:
        longer: Law = defaultdict(float)
        for tokens, probability in growing.items():
            decided = list(zip(blanks, tokens))
            if isinstance(family, Block):
                row = block_context([*given, *decided], family, size)
            else:
                row = context(given, decided, position, mask)
            prompt_ids = np.asarray([token for _, token in given], np.int64)
            history = TokenHistory(sampling, prompt_ids, target.vocab, stops, frozenset(never))
            for token in tokens:
                history.add(token)
            for token, p in enumerate(_law(target, row, history)):
                if p > 0:
                    ended = token in stops
                    (finished if ended else longer)[(*tokens, token)] = probability * p
        growing = dict(longer)
    return finished | growing


def _law(target: TableBackbone, row: tuple[int, list[int]], history: TokenHistory) -> list[float]:
    """The law of a row that stands at a position and sees rows with these digests."""
    logits_V = target.logits(*row)
    return laws_from_logits(logits_V[None], [ChainRows(history, [], [0])])[0].tolist()


def context(given: Rows, decided: Rows, position: int, mask: int | None) -> tuple[int, list[int]]:
    """What the next token's law depends on, by definition: where its row stands, and the digests of
    all rows that it sees.

    Left to right, every row sees all before it. With a mask token: given rows see each other,
    decided ones see the given and what was decided before them, and the query, a mask at the
    blank's position, sees them all and itself.
    """
    if mask is None:
        text = [*given, *decided]
        return text[-1][0], [digest(text[: i + 1]) for i in range(len(text))]
    after = [digest([*given, *decided[: i + 1]]) for i in range(len(decided))]
    query = digest([*given, *decided, (position, mask)])
    return position, [*[digest(given)] * len(given), *after, query]


def block_context(text: Rows, family: Block, size: int) -> tuple[int, list[int]]:
    """The same for the token after a text in a block model.

    Its finished blocks see themselves whole; each row of the block that is being filled sees all
    before it. Then comes a mask that sees them all and itself, unless the last row speaks of what
    follows.
    """
    n = len(text)
    finished = n // size * size
    ends = [(i // size + 1) * size if i < finished else i + 1 for i in range(n)]
    digests = [digest(text[:end]) for end in ends]
    if family.shifted:
        return text[-1][0], digests
    return n, [*digests, digest([*text, (n, family.mask_token)])]


@dataclass(frozen=True)
class CanvasReading:
    """How a model reads a canvas that is filled in any order."""

    target: TableBackbone
    mask: int
    block: int
    sub_block: int | None
    family: Family | None

    def context(self, state: State, position: int) -> tuple[int, list[int]]:
        """What the law of a blank depends on: the row that speaks of it and what that row sees."""
        rows = [(i, self.mask if token is None else token) for i, token in enumerate(state)]
        if not isinstance(self.family, Block):
            return position, [digest(rows)] * len(rows)
        row = position - self.family.shifted
        end = min((row // self.block + 1) * self.block, len(rows))
        return row, [digest(rows[: (i // self.block + 1) * self.block]) for i in range(end)]

    def laws(
        self, state: State, position: int, sampling: Sampling
    ) -> tuple[list[float], list[float]]:
        """A blank's law under the sampling parameters, and the model's own."""
        logits_V = self.target.logits(*self.context(state, position)).clone()
        logits_V[self.mask] = -torch.inf
        history = TokenHistory(sampling, np.zeros(0, np.int64), self.target.vocab, frozenset())
        law_V = laws_from_logits(logits_V[None], [ChainRows(history, [], [0])])[0]
        return law_V.tolist(), logits_V.softmax(-1).tolist()

    def open_blanks(self, left: list[int], blanks: list[int]) -> list[int]:
        """The blanks that stepwise decoding may decide next, of those that are left."""
        if isinstance(self.family, Block) and self.family.shifted and left[0] % self.block == 0:
            return left[:1]

        def number(i: int) -> int:
            ordinal = i if isinstance(self.family, Block) else blanks.index(i)
            return ordinal // self.block

        found = [i for i in left if number(i) == number(left[0])]
        if self.sub_block is not None:
            part = left[0] % self.block // self.sub_block
            found = [i for i in found if i % self.block // self.sub_block == part]
        return found


def stepwise_law(
    target: TableBackbone,
    canvas: Prompt,
    *,
    mask: int,
    block: int,
    sub_block: int | None = None,
    family: Family | None = None,
    **options: Any,
) -> Law:
    """The law of stepwise decoding of a masked model, from its definition.

    Every open blank of the block draws a token from its law; the one that the model's own law finds
    likeliest is decided; again, until none is open. A block model's blocks are counted from the
    first token; in a shifted one a block's first token is decided before the others.
    """
    sampling = Sampling(**options)
    reading = CanvasReading(target, mask, block, sub_block, family)
    canvas = [*canvas, *[None] * (sampling.max_tokens or 0)]
    blanks = blanks_of(canvas)
    finished: Law = defaultdict(float)
    states: dict[State, float] = {tuple(canvas): 1.0}
    while states:
        state, probability = states.popitem()
        left = [i for i in blanks if state[i] is None]
        if not left:
            tokens = tuple(token for token in (state[i] for i in blanks) if token is not None)
            finished[tokens] += probability
            continue
        open_now = reading.open_blanks(left, blanks)
        laws = [reading.laws(state, i, sampling) for i in open_now]
        for drawn in itertools.product(range(target.vocab), repeat=len(open_now)):
            chance = float(np.prod([law[token] for (law, _), token in zip(laws, drawn)]))
            if chance > 0:
                confidence = [model_law[token] for (_, model_law), token in zip(laws, drawn)]
                best = int(np.argmax(confidence))
                position = open_now[best]
                after = (*state[:position], drawn[best], *state[position + 1 :])
                states[after] = states.get(after, 0.0) + probability * chance
    return dict(finished)
