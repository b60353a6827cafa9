"""Reference laws from the documented definitions: NumPy, and nothing of Forerun.

Certification compares whole sequences that the engine writes with the laws below. What could be
wrong in both would have to be wrong twice, so this file may import nothing from the package, and
`tests/certify/test_reference.py` checks that it does not. It is slow and short.

A canvas is a list of tokens with None for every blank. V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

Law = dict[tuple[int, ...], float]
Canvas = Sequence[int | None]


# The table model: two layers of hashes instead of attention.


@cache
def scramble(*numbers: int) -> int:
    """A chain of splitmix64 steps: add the golden ratio's constant, then the finaliser."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state = state ^ state >> 31
    return state


@dataclass(frozen=True)
class View:
    """Rows of (position, token), which rows each of them sees, and the row that speaks of the
    blank in question."""

    rows: Sequence[tuple[int, int]]
    sees: Sequence[Sequence[int]]
    speaker: int


@dataclass(frozen=True)
class Table:
    """A row's logits are a hash of its position and of what each row that it sees has seen."""

    vocab: int
    seed: int
    sharpness: float = 2.0
    known: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict, compare=False)

    def logits(self, view: View) -> np.ndarray:
        position, _ = view.rows[view.speaker]
        memories = [self._memory(view, row) for row in view.sees[view.speaker]]
        key = (position, *memories)
        if key not in self.known:
            state = scramble(self.seed, *key)
            parts = [(scramble(state, 0, v) // 2**16 + 0.5) / 2**48 for v in range(self.vocab)]
            self.known[key] = 2 * self.sharpness * (np.array(parts) - 0.5)
        return self.known[key]

    @staticmethod
    def _memory(view: View, row: int) -> int:
        """What a row remembers of the rows that it sees: 63 bits."""
        flat = [number for seen in view.sees[row] for number in view.rows[seen]]
        return scramble(*flat) // 2


# How each kind of model reads a canvas. `given` and `decided` map positions to tokens; `decided` is
# in the order of the decisions.

Reading = Callable[[Mapping[int, int], Mapping[int, int], int, int], View]


def reads_causally() -> Reading:
    """Every token sees itself and all before it; the last one speaks of the next."""

    def read(given: Mapping[int, int], decided: Mapping[int, int], length: int, at: int) -> View:
        rows = sorted({**given, **decided}.items())[:at]
        return View(rows, [range(i + 1) for i in range(len(rows))], at - 1)

    return read


def reads_any_subset(mask: int) -> Reading:
    """Given tokens see each other. A decided token sees the given ones, those decided before it and
    itself. A mask at the blank sees all of them and itself, and speaks."""

    def read(given: Mapping[int, int], decided: Mapping[int, int], length: int, at: int) -> View:
        rows = [*sorted(given.items()), *decided.items(), (at, mask)]
        sees = [range(max(i + 1, len(given))) for i in range(len(rows))]
        return View(rows, sees, len(rows) - 1)

    return read


def reads_whole(mask: int, shifted: bool = False) -> Reading:
    """Everything sees everything, blanks as masks; a blank's own row speaks of it. In a shifted
    model the row before it does."""

    def read(given: Mapping[int, int], decided: Mapping[int, int], length: int, at: int) -> View:
        known = {**given, **decided}
        rows = [(i, known.get(i, mask)) for i in range(length)]
        return View(rows, [range(length)] * length, max(at - shifted, 0))

    return read


@dataclass(frozen=True)
class Policy:
    """A cache policy of a masked model. Rows outside the block hold what they saw when everything
    was last computed: at the block's first decision, and after every `refresh` decisions of it."""

    name: str  # prefix: what lies before the block is outside; dual: what lies after it too
    block: int
    refresh: int
    mask: int
    shifted: bool = False


def reads_stale(policy: Policy, blanks: Sequence[int]) -> Reading:
    """A canvas under a policy. `decided` is in the order of the decisions, so that what was decided
    at the last refresh can be told."""

    def read(given: Mapping[int, int], decided: Mapping[int, int], length: int, at: int) -> View:
        block = blanks.index(at) // policy.block
        members = blanks[block * policy.block :][: policy.block]
        here = sum(position in members for position in decided)
        behind = here % policy.refresh
        fresh = dict(list(decided.items())[: len(decided) - behind])
        last = max(members) if policy.name == "dual" else length - 1
        inside = range(max(members[0] - policy.shifted, 0), last + 1)
        outside = [i for i in range(length) if i not in inside]
        order = [*outside, *inside]
        # Two copies of the canvas, then and now: rows outside the block are the old ones, and see
        # the old canvas; those inside are the new ones.
        old = [(i, {**given, **fresh}.get(i, policy.mask)) for i in order]
        new = [(i, {**given, **decided}.get(i, policy.mask)) for i in order]
        n = len(outside)
        now = [*range(n), *range(length + n, 2 * length)]
        sees = [range(length)] * length + [now] * length
        speaker = order.index(max(at - policy.shifted, 0))
        return View([*old, *new], sees, length + speaker)

    return read


def reads_one_by_one(mask: int, finished: int = 1, shifted: bool = False) -> Reading:
    """A block model from left to right. Finished blocks of `finished` tokens see themselves whole;
    later tokens see all before them. A mask behind the text speaks; in a shifted model the last
    token does."""

    def read(given: Mapping[int, int], decided: Mapping[int, int], length: int, at: int) -> View:
        rows = sorted({**given, **decided}.items())[:at]
        whole = at - at % finished
        sees = [range(i - i % finished + finished if i < whole else i + 1) for i in range(at)]
        if not shifted:
            rows = [*rows, (at, mask)]
            sees = [*sees, range(at + 1)]
        return View(rows, sees, len(rows) - 1)

    return read


def reads_in_blocks(
    mask: int, block: int, shifted: bool = False, causal: str = "nothing"
) -> Reading:
    """A token sees all up to the end of its own block, blanks as masks.

    `causal` says what is read as in blocks of one token: the decided beginning of the block that is
    being filled (prefix), or all that is decided (text).
    """

    def read(given: Mapping[int, int], decided: Mapping[int, int], length: int, at: int) -> View:
        known = {**given, **decided}
        first_blank = next(i for i in range(length) if i not in known)
        start = first_blank - first_blank % block
        end = min(start + block, length)

        def horizon(i: int) -> int:
            is_beginning = start <= i < first_blank
            if (causal == "text" and i < first_blank) or (causal == "prefix" and is_beginning):
                return i + 1
            return min(i - i % block + block, end)

        speaker = at - shifted
        stop = end if speaker >= start else start
        rows = [(i, known.get(i, mask)) for i in range(stop)]
        return View(rows, [range(min(horizon(i), stop)) for i in range(stop)], speaker)

    return read


# One token.


@dataclass(frozen=True)
class Parameters:
    """What a request asks for, by the documented names."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_tokens: Sequence[int] | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Words:
    """A language by all its words, and what each token spells. A token may follow a text if some
    word begins with both."""

    spelled: tuple[str, ...]
    words: frozenset[str]

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(self.spelled[token] for token in tokens)

    def begins_word(self, text: str) -> bool:
        return any(word.startswith(text) for word in self.words)

    def is_over(self, text: str, possible: Sequence[int]) -> bool:
        """Is it a word that no token can go on with?"""
        longer = [text + self.spelled[token] for token in possible]
        return text in self.words and not any(map(self.begins_word, longer))


@dataclass(frozen=True)
class Hole:
    """Blanks that must hold a word. Where `ends` are given, it may end with one of them before the
    last blank, and after `least` tokens."""

    blanks: tuple[int, ...]
    words: Words
    ends: frozenset[int] = frozenset()
    least: int = 0

    def holds(self, tokens: Sequence[int]) -> bool:
        """Is this a way to fill it?"""
        length = next((i for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        too_soon = length < len(tokens) and length < self.least
        return self.words.text(tokens[:length]) in self.words.words and not too_soon


@cache
def ways_to_fill(hole: Hole, possible: tuple[int, ...]) -> list[tuple[int, ...]]:
    """By trying all of them."""
    every = itertools.product(possible, repeat=len(hole.blanks))
    return [tokens for tokens in every if hole.holds(tokens)]


@dataclass(frozen=True)
class Request:
    """A canvas to fill. `ends` are the tokens that end the text, `never` those that are not
    written; the mask is among them. `words` is what an output from left to right must be, `holes`
    what blanks must hold that are filled in any order."""

    canvas: tuple[int | None, ...]
    parameters: Parameters
    ends: frozenset[int]
    never: frozenset[int]
    mask: int | None = None
    words: Words | None = None
    holes: tuple[Hole, ...] = ()

    @property
    def given(self) -> dict[int, int]:
        return {i: token for i, token in enumerate(self.canvas) if token is not None}

    @property
    def blanks(self) -> list[int]:
        return [i for i, token in enumerate(self.canvas) if token is None]


def request(
    prompt: Canvas,
    parameters: Parameters,
    eos: Sequence[int] = (),
    mask: int | None = None,
    words: Words | None = None,
) -> Request:
    """Text goes on after a prompt until an end token or max_tokens. A prompt with holes is filled
    to its end: there the model's own end token is never written."""
    never = set() if mask is None else {mask}
    own = set() if parameters.ignore_eos else set(eos)
    ends = own | set(parameters.stop_token_ids)
    if None in prompt:
        never |= own
        ends -= own
    canvas = (*prompt, *[None] * (parameters.max_tokens or 0))
    return Request(canvas, parameters, frozenset(ends), frozenset(never), mask, words)


def softmax(logits_V: np.ndarray) -> np.ndarray:
    weights_V = np.exp(logits_V - logits_V.max())
    return weights_V / weights_V.sum()


def own_law(
    logits_V: np.ndarray, asked: Request, decided: Mapping[int, int], at: int
) -> np.ndarray:
    """The model's own law, before any parameter, of what may stand there. A mask is no outcome."""
    tokens = range(len(logits_V))
    refused_V = [t == asked.mask or not fits_hole(asked, decided, at, t) for t in tokens]
    return softmax(np.where(refused_V, -np.inf, logits_V))


def edited(
    logits_V: np.ndarray, asked: Request, decided: Mapping[int, int], place: int
) -> np.ndarray:
    """Everything before the temperature, in the documented order: allowed tokens and bias, minimum
    length, repetition penalty (prompt and output), presence and frequency penalties (output).

    `place` is how many places of the output come before this one.
    """
    wanted = asked.parameters
    prompt = Counter(asked.given.values())
    output = Counter(decided.values())
    edited_V = np.array(logits_V, dtype=np.float64)
    for token in range(len(edited_V)):
        logit = edited_V[token] + (wanted.logit_bias or {}).get(token, 0.0)
        refused = wanted.allowed_tokens is not None and token not in wanted.allowed_tokens
        too_soon = token in asked.ends and place < wanted.min_tokens
        if token in prompt or token in output:
            r = wanted.repetition_penalty
            logit = logit / r if logit > 0 else logit * r
        if token in output:
            logit -= wanted.presence_penalty + wanted.frequency_penalty * output[token]
        if refused or too_soon or token in asked.never or not fits(asked, decided, token):
            logit = -np.inf
        if asked.holes and not fits_hole(asked, decided, asked.blanks[place], token):
            logit = -np.inf
        edited_V[token] = logit
    return edited_V


def fits(asked: Request, decided: Mapping[int, int], token: int) -> bool:
    """May a token follow what is decided, from left to right? One that ends the text may where that
    is a word; others where they begin one together."""
    if asked.words is None:
        return True
    text = asked.words.text(list(decided.values()))
    if token in asked.ends:
        return text in asked.words.words
    return asked.words.begins_word(text + asked.words.spelled[token])


def fits_hole(asked: Request, decided: Mapping[int, int], at: int, token: int) -> bool:
    """Is there a way to fill the hole that this blank belongs to, with this token there?"""
    for hole in asked.holes:
        if at in hole.blanks:
            known = {**decided, at: token}
            wanted = asked.parameters.allowed_tokens
            every = range(len(hole.words.spelled)) if wanted is None else wanted
            possible = tuple(t for t in every if t not in asked.never)
            ways = ways_to_fill(hole, possible)
            return any(all(known.get(i, t) == t for i, t in zip(hole.blanks, way)) for way in ways)
    return True


def is_over(asked: Request, tokens: Sequence[int], vocab: int) -> bool:
    """Has the text ended: with a token that ends it, or as nothing may follow?"""
    if tokens and tokens[-1] in asked.ends:
        return True
    if asked.words is None:
        return False
    wanted = asked.parameters.allowed_tokens
    ordinary = set(range(vocab) if wanted is None else wanted) - asked.ends - asked.never
    return asked.words.is_over(asked.words.text(tokens), sorted(ordinary))


def token_law(
    logits_V: np.ndarray, asked: Request, decided: Mapping[int, int], place: int
) -> np.ndarray:
    """The law that one token is drawn from: temperature, top-k, top-p, min-p, in this order.
    Temperature 0 is certain of the likeliest token."""
    wanted = asked.parameters
    logits_V = edited(logits_V, asked, decided, place)
    if wanted.temperature == 0:
        law_V = np.zeros_like(logits_V)
        law_V[np.argmax(logits_V)] = 1.0
        return law_V
    law_V = softmax(logits_V / wanted.temperature)
    likeliest = np.argsort(-law_V, kind="stable")
    if wanted.top_k:
        law_V[likeliest[wanted.top_k :]] = 0
        law_V = law_V / law_V.sum()
    if wanted.top_p < 1:
        mass = 0.0
        for token in likeliest:  # the token that crosses top_p stays
            share = law_V[token]
            if mass >= wanted.top_p:
                law_V[token] = 0
            mass += share
        law_V = law_V / law_V.sum()
    law_V[law_V < wanted.min_p * law_V.max()] = 0
    return law_V / law_V.sum()


# Whole outputs.


def left_to_right(table: Table, reading: Reading, asked: Request) -> Law:
    """Chain and any-subset laws: blank after blank, each given all before it, until an end."""
    blanks = asked.blanks
    finished: Law = {}

    def go_on(tokens: tuple[int, ...], probability: float) -> None:
        if len(tokens) == len(blanks) or is_over(asked, tokens, table.vocab):
            finished[tokens] = probability
            return
        decided = dict(zip(blanks, tokens))
        view = reading(asked.given, decided, len(asked.canvas), blanks[len(tokens)])
        law_V = token_law(table.logits(view), asked, decided, len(tokens))
        for token in np.flatnonzero(law_V):
            go_on((*tokens, int(token)), probability * law_V[token])

    go_on((), 1.0)
    return finished


OpenBlanks = Callable[[Sequence[int]], Sequence[int]]


def blocks_of_blanks(blanks: Sequence[int], block: int) -> OpenBlanks:
    """Masked models: every `block` blanks are a block, finished before the next is begun."""
    number = {position: i // block for i, position in enumerate(blanks)}
    return lambda left: [at for at in left if number[at] == number[left[0]]]


def blocks_of_text(block: int, part: int | None = None, alone: bool = False) -> OpenBlanks:
    """Block models: blocks count from the first token of the text, parts from the beginning of
    their block. In a shifted model a block's first token is decided `alone`, as the block before
    speaks of it."""

    def number(at: int) -> tuple[int, int]:
        return at // block, at % block // (part or block)

    def open_blanks(left: Sequence[int]) -> Sequence[int]:
        if alone and left[0] % block == 0:
            return left[:1]
        return [at for at in left if number(at) == number(left[0])]

    return open_blanks


def decision(laws_NV: np.ndarray, own_NV: np.ndarray, order: str = "confidence") -> np.ndarray:
    """The law [N, V] of which blank is decided and as what. Every blank draws from its law; the
    token that the model's own law finds likeliest is decided, of equals the first.

    In order of entropy or margin, the blank with the least entropy, or with the largest lead of its
    likeliest token over the next, is decided, whatever it draws.
    """
    chances_NV = np.array(laws_NV)
    if order != "confidence":
        sorted_NV = np.sort(own_NV, 1)
        logs_NV = np.log(np.where(own_NV > 0, own_NV, 1.0))
        entropy_N = -(own_NV * logs_NV).sum(1)
        margin_N = sorted_NV[:, -1] - sorted_NV[:, -2]
        first = int(np.argmin(entropy_N) if order == "entropy" else np.argmax(margin_N))
        chances_NV[np.arange(len(own_NV)) != first] = 0
        return chances_NV
    for i, own_V in enumerate(own_NV):
        for token, confidence in enumerate(own_V):
            for j, other_V in enumerate(own_NV):
                if j != i:
                    loses_V = other_V < confidence if j < i else other_V <= confidence
                    chances_NV[i, token] *= laws_NV[j][loses_V].sum()
    return chances_NV


def finished_output(
    asked: Request, blanks: Sequence[int], decided: Mapping[int, int]
) -> tuple[int, ...] | None:
    """The output up to an end with everything before it decided, or up to the last blank."""
    tokens: tuple[int, ...] = ()
    for at in blanks:
        if at not in decided:
            return None
        tokens = (*tokens, decided[at])
        if decided[at] in asked.ends:
            break
    return tokens


def stepwise(
    table: Table,
    reading: Reading,
    asked: Request,
    open_blanks: OpenBlanks,
    in_order: bool = False,
    by: str = "confidence",
) -> Law:
    """Decoding in order of confidence, one blank at a time. Penalties look back on everything that
    is decided, wherever it stands."""
    blanks = asked.blanks
    finished: Law = defaultdict(float)
    # A model that looks at the whole canvas does not know in which order it was filled, unless some
    # of what it looks at is old.
    states: dict[tuple[tuple[int, int], ...], float] = {(): 1.0}
    while states:
        later: dict[tuple[tuple[int, int], ...], float] = defaultdict(float)
        for state, probability in states.items():
            decided = dict(state)
            output = finished_output(asked, blanks, decided)
            if output is not None:
                finished[output] += probability
                continue
            candidates = open_blanks([at for at in blanks if at not in decided])
            laws = []
            own = []
            for at in candidates:
                logits_V = table.logits(reading(asked.given, decided, len(asked.canvas), at))
                laws.append(token_law(logits_V, asked, decided, blanks.index(at)))
                own.append(own_law(logits_V, asked, decided, at))
            chances_NV = decision(np.array(laws), np.array(own), by)
            for i, token in np.argwhere(chances_NV):
                after = tuple({**decided, candidates[i]: int(token)}.items())
                after = after if in_order else tuple(sorted(after))
                later[after] += probability * chances_NV[i, token]
        states = dict(later)
    return dict(finished)


def distance(ours: Law, theirs: Law) -> float:
    """Total variation."""
    return sum(abs(ours.get(x, 0.0) - theirs.get(x, 0.0)) for x in {*ours, *theirs}) / 2
