"""Reference laws straight from the definition: no engine, no rows, no method.

A certificate compares what a method writes with one of these.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.backbones.table import TableBackbone, digest
from forerun.constraints.base import Constraint, bitmask
from forerun.constraints.engines import compiled
from forerun.constraints.left_to_right import LeftToRight
from forerun.constraints.vocabulary import Vocabulary
from forerun.families.base import Family
from forerun.families.block import Block
from forerun.options import Sampling
from forerun.probability.logits import ChainRows, TokenHistory, laws_from_logits

Law = dict[tuple[int, ...], float]
Holes = Sequence[dict[str, str] | None] | None  # what each hole must hold
Prompt = Sequence[int | None]
Rows = Sequence[tuple[int, int]]  # (position, token)
State = tuple[int | None, ...]  # a canvas, with None for every blank


def blanks_of(canvas: Prompt) -> list[int]:
    return [i for i, token in enumerate(canvas) if token is None]


def runs_of(canvas: Prompt) -> list[tuple[int, ...]]:
    """The holes of a canvas: runs of blanks."""
    numbered = itertools.groupby(enumerate(canvas), lambda one: one[1] is None)
    return [tuple(i for i, _ in run) for blank, run in numbered if blank]


@cache
def vocabulary_of(spelled: tuple[bytes, ...]) -> Vocabulary:
    """A vocabulary for which grammars are compiled once, whoever asks."""
    return Vocabulary(len(spelled), spelled=spelled)


class First(NamedTuple):
    """A first token that was decided together with the end of the prompt, and the tokens that a
    constraint takes it for."""

    token: int
    stands_for: tuple[int, ...]


@dataclass(frozen=True)
class BlankLanguage:
    """What some blanks must spell together: a text that an expression matches, up to one of the
    `ends`, which may not come before `least` tokens."""

    blanks: tuple[int, ...]
    regex: str
    spelled: tuple[bytes, ...]
    outcomes: tuple[int, ...]
    ends: frozenset[int] = frozenset()
    least: int = 0

    def holds(self, tokens: Sequence[int]) -> bool:
        """Do tokens in all of its blanks spell such a text?"""
        text = b""
        for count, token in enumerate(tokens):
            if token in self.ends:
                if count < self.least:
                    return False
                break
            text += self.spelled[token]
        return re.fullmatch(self.regex, text.decode()) is not None

    def allowed(self, state: State, position: int) -> frozenset[int]:
        """The tokens at a blank that some filling of the others goes with: all are tried."""
        known = tuple(state[i] for i in self.blanks)
        return self._allowed(known, self.blanks.index(position))

    @cache  # noqa: B019 - of a few small ones, for as long as a certificate takes
    def _allowed(self, known: tuple[int | None, ...], place: int) -> frozenset[int]:
        choices = [self.outcomes if token is None else (token,) for token in known]
        return frozenset(
            tokens[place] for tokens in itertools.product(*choices) if self.holds(tokens)
        )


class Asked:
    """What a request asks for: a canvas, sampling parameters, tokens that end the text and tokens
    that are never written."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        eos: Sequence[int],
        mask: int | None,
        spelled: Sequence[bytes] | None = None,
        first: First | None = None,
    ):
        self.sampling = sampling
        self.first = first
        self.mask = mask
        self._vocabulary: Vocabulary | None = None
        if spelled is not None:
            self._vocabulary = vocabulary_of(tuple(spelled))
        self.canvas = (*prompt, *[None] * (sampling.max_tokens or 0))
        ends = frozenset() if sampling.ignore_eos else frozenset(eos)
        stops = frozenset(sampling.stop_token_ids)
        never = frozenset() if mask is None else frozenset([mask])
        # A hole is filled to its end: an end token inside would say otherwise.
        self.stops = stops if None in prompt else stops | ends
        self.never = never | ends if None in prompt else never
        self.prompt_ids = np.asarray([t for t in self.canvas if t is not None], np.int64)
        self.languages: list[BlankLanguage] = []

    def constrain(self, spelled: Sequence[bytes] | None, holes: Holes) -> Asked:
        """Hold the blanks of a canvas to languages: each hole to its own, or all that is generated
        to the request's expression."""
        allowed = self.sampling.allowed_tokens
        possible = set(range(len(spelled or ())) if allowed is None else allowed) - self.never
        same = tuple(spelled or ()), tuple(sorted(possible))
        if holes is not None:
            pairs = zip(runs_of(self.canvas), holes, strict=True)
            self.languages = [BlankLanguage(b, hole["regex"], *same) for b, hole in pairs if hole]
        elif self.sampling.regex is not None:
            blanks = tuple(blanks_of(self.canvas))
            ending = self.stops, self.sampling.min_tokens
            self.languages = [BlankLanguage(blanks, self.sampling.regex, *same, *ending)]
        return self

    def left(self, logits_V: Tensor, state: State, position: int) -> Tensor:
        """The logits of what the languages leave at a blank."""
        for language in self.languages:
            if position in language.blanks:
                allowed = list(language.allowed(state, position))
                masked_V = torch.full_like(logits_V, -torch.inf)
                masked_V[allowed] = logits_V[allowed]
                logits_V = masked_V
        return logits_V

    def law(self, logits_V: Tensor, decided: Sequence[int], place: int) -> list[float]:
        """The law of a blank with `place` blanks before it, after some decisions."""
        vocab = len(logits_V)
        constraint = self.constraint(decided)
        history = TokenHistory(self.sampling, self.prompt_ids, vocab, self.stops, self.never)
        for token in decided:
            history.add(token)
        history.constraint = constraint
        rows = ChainRows(history, [], [0], [place], positions=[len(decided)])
        return laws_from_logits(logits_V[None], [rows])[0].tolist()

    def constraint(self, decided: Sequence[int]) -> Constraint | None:
        """What is asked of the text, after some decisions from left to right; positions count from
        the first."""
        spec = self.sampling.constraint
        if spec is None or self._vocabulary is None:
            return None
        allowed = self.sampling.allowed_tokens
        size = self._vocabulary.size
        possible = set(range(size) if allowed is None else allowed) - self.never
        language = compiled(spec, self._vocabulary).language()
        found = LeftToRight(language, 0, self.stops, size, bitmask(possible, size))
        for position, token in enumerate(decided):
            if self.first is not None and position == 0:
                found.begin(position, self.first.stands_for)
            else:
                found.add(position, token)
        return found

    def ends(self, decided: Sequence[int]) -> bool:
        """Does the text end with the last decision?"""
        constraint = self.constraint(decided)
        return decided[-1] in self.stops or (constraint is not None and constraint.finished)


def reference_law(  # noqa: PLR0913 - keywords of a public function
    target: TableBackbone,
    prompt: Prompt,
    *,
    eos: Sequence[int] = (),
    mask: int | None = None,
    family: Family | None = None,
    size: int = 1,
    spelled: Sequence[bytes] | None = None,
    first: First | None = None,
    holes: Holes = None,
    **options: Any,
) -> Law:
    """The law of whole sequences, one conditional after another.

    Of a block model it is left-to-right decoding; with a `size`, of text whose finished blocks of
    that size see themselves whole. `first` is the first token, where it was decided with the
    prompt.
    """
    asked = Asked(prompt, Sampling(**options), eos, mask, spelled, first)
    if holes is not None:
        asked.constrain(spelled, holes)
    canvas = asked.canvas
    given = [(i, token) for i, token in enumerate(canvas) if token is not None]
    blanks = blanks_of(canvas)
    finished: Law = {}
    growing: Law = {(): 1.0} if first is None else {(first.token,): 1.0}
    if first is not None and asked.ends((first.token,)):
        return growing
    for position in blanks if first is None else blanks[1:]:
        longer: Law = defaultdict(float)
        for tokens, probability in growing.items():
            decided = list(zip(blanks, tokens))
            if isinstance(family, Block):
                row = block_context([*given, *decided], family, size)
            else:
                row = context(given, decided, position, mask)
            state = tuple({**dict(enumerate(canvas)), **dict(decided)}.values())
            logits_V = asked.left(target.logits(*row), state, position)
            law = asked.law(logits_V, tokens, len(tokens))
            for token, p in enumerate(law):
                if p > 0:
                    ended = asked.ends((*tokens, token))
                    (finished if ended else longer)[(*tokens, token)] = probability * p
        growing = dict(longer)
    return finished | growing


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


class KeptKeys(NamedTuple):
    """A cache policy at one moment: the canvas that keys were last computed on, the block that it
    was done for, and how many tokens have been decided since."""

    state: State
    block: int
    since: int


@dataclass(frozen=True)
class CanvasReading:
    """How a model reads a canvas that is filled in any order."""

    target: TableBackbone
    mask: int
    block: int
    sub_block: int | None
    family: Family | None
    cache: str = "none"
    refresh: int = 1
    order: str = "confidence"

    def context(
        self, state: State, position: int, kept: KeptKeys | None, blanks: list[int]
    ) -> tuple[int, list[int]]:
        """What the law of a blank depends on: the row that speaks of it and what that row sees."""
        rows = self._rows(state)
        row = position - self.shifted
        if isinstance(self.family, Block):
            end = min((row // self.block + 1) * self.block, len(rows))
            return row, [digest(rows[: (i // self.block + 1) * self.block]) for i in range(end)]
        if kept is None:
            return max(row, 0), [digest(rows)] * len(rows)
        inside = self._computed(kept.block, blanks, len(rows))
        outside = [i for i in range(len(rows)) if i not in inside]
        order = [*outside, *inside]
        before = self._rows(kept.state)
        old = digest([before[i] for i in order])
        new = digest([rows[i] for i in order])
        return max(row, 0), [old] * len(outside) + [new] * len(inside)

    def _rows(self, state: State) -> list[tuple[int, int]]:
        return [(i, self.mask if token is None else token) for i, token in enumerate(state)]

    def _computed(self, block: int, blanks: list[int], length: int) -> range:
        """The rows that a policy computes anew for a block in every forward."""
        members = blanks[block * self.block : (block + 1) * self.block]
        end = members[-1] + 1 if self.cache == "dual" else length
        return range(max(members[0] - self.shifted, 0), end)

    def keep(
        self, state: State, kept: KeptKeys | None, left: list[int], blanks: list[int]
    ) -> KeptKeys | None:
        """The keys that the next decision reads: new ones when a block begins and after every
        `refresh` tokens of it."""
        if self.cache == "none":
            return None
        number = blanks.index(left[0]) // self.block
        if kept is not None and kept.block == number and kept.since < self.refresh:
            return kept
        return KeptKeys(state, number, 0)

    @property
    def shifted(self) -> bool:
        return self.family is not None and self.family.shifted

    def laws(
        self, state: State, position: int, asked: Asked, kept: KeptKeys | None = None
    ) -> tuple[list[float], list[float]]:
        """A blank's law under the sampling parameters, and the model's own."""
        blanks = blanks_of(asked.canvas)
        logits_V = self.target.logits(*self.context(state, position, kept, blanks)).clone()
        logits_V[self.mask] = -torch.inf
        logits_V = asked.left(logits_V, state, position)
        decided = [token for token in (state[i] for i in blanks) if token is not None]
        law = asked.law(logits_V, decided, blanks.index(position))
        return law, logits_V.softmax(-1).tolist()

    def score(self, model_law: list[float], token: int) -> float:
        """What the blanks are decided in the order of."""
        if self.order == "entropy":
            return sum(p * np.log(p) for p in model_law if p > 0)
        if self.order == "margin":
            *_, second, first = sorted(model_law)
            return first - second
        return model_law[token]

    def open_blanks(self, left: list[int], blanks: list[int]) -> list[int]:
        """The blanks that stepwise decoding may decide next, of those that are left."""
        is_block = isinstance(self.family, Block)
        if is_block and self.shifted and left[0] % self.block == 0:
            return left[:1]

        def number(i: int) -> int:
            ordinal = i if is_block else blanks.index(i)
            return ordinal // self.block

        found = [i for i in left if number(i) == number(left[0])]
        if self.sub_block is not None:
            part = left[0] % self.block // self.sub_block
            found = [i for i in found if i % self.block // self.sub_block == part]
        return found


def written(state: State, blanks: list[int], stops: frozenset[int]) -> tuple[int, ...] | None:
    """The output of a canvas that is finished: full, or full up to a token that ends the text."""
    tokens: list[int] = []
    for i in blanks:
        token = state[i]
        if token is None:
            return None
        tokens.append(token)
        if token in stops:
            break
    return tuple(tokens)


def stepwise_law(
    reading: CanvasReading,
    prompt: Prompt,
    *,
    eos: Sequence[int] = (),
    first: First | None = None,
    spelled: Sequence[bytes] | None = None,
    holes: Holes = None,
    **options: Any,
) -> Law:
    """The law of stepwise decoding of a masked model, from its definition.

    Every open blank of the block draws a token from its law; the one that the model's own law finds
    likeliest is decided; again, until none is open or the text has ended. A block model's blocks
    are counted from the first token; in a shifted one a block's first token is decided before the
    others. Under a cache policy, rows outside the block hold what they saw at the last refresh.
    """
    asked = Asked(prompt, Sampling(**options), eos, reading.mask)
    asked.constrain(spelled, holes)
    blanks = blanks_of(asked.canvas)
    finished: Law = defaultdict(float)
    begun: State = asked.canvas
    if first is not None:
        begun = (*begun[: blanks[0]], first.token, *begun[blanks[0] + 1 :])
    states: dict[tuple[State, KeptKeys | None], float] = {(begun, None): 1.0}
    while states:
        (state, kept), probability = states.popitem()
        tokens = written(state, blanks, asked.stops)
        if tokens is not None:
            finished[tokens] += probability
            continue
        left = [i for i in blanks if state[i] is None]
        kept = reading.keep(state, kept, left, blanks)
        open_now = reading.open_blanks(left, blanks)
        laws = [reading.laws(state, i, asked, kept) for i in open_now]
        possible = [[token for token, p in enumerate(law) if p > 0] for law, _ in laws]
        for drawn in itertools.product(*possible):
            chance = float(np.prod([law[token] for (law, _), token in zip(laws, drawn)]))
            drawn_from = zip(laws, drawn)
            best = int(np.argmax([reading.score(own, token) for (_, own), token in drawn_from]))
            position = open_now[best]
            filled = (*state[:position], drawn[best], *state[position + 1 :])
            after = (filled, kept and kept._replace(since=kept.since + 1))
            states[after] = states.get(after, 0.0) + probability * chance
    return dict(finished)
