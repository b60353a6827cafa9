"""The law of a healed prompt, or of what is healed around holes, straight from its definition
(`constraints/healing.py`), for vocabularies of a few tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.certify.reference import Asked, First, Law, State, runs_of
from forerun.constraints.base import tokens_of
from forerun.constraints.left_to_right import LeftToRight
from forerun.constraints.vocabulary import longest_first
from forerun.probability.logits import ChainRows, TokenHistory, row_laws

MOST_BACK = 4

Logits = Callable[[Sequence[int], Sequence[int]], Tensor]  # after some kept tokens and some more


class End(NamedTuple):
    """How a prompt may end: its tokens, and the first of the output if that is decided too."""

    prompt: tuple[int, ...]
    first: First | None


class Cover(NamedTuple):
    spelling: tuple[int, ...]
    token: int
    over: bytes


def healing_point(spelled: Sequence[bytes], prompt: Sequence[int], least: int) -> int | None:
    """The first place, at most four tokens before the end, from which some token writes all that
    follows and more."""
    for point in range(max(least, len(prompt) - MOST_BACK), len(prompt)):
        rest = _said(spelled, prompt[point:])
        if any(text.startswith(rest) and text != rest for text in spelled):
            return point
    return None


def covers(spelled: Sequence[bytes], kept: Sequence[int], taken: Sequence[int]) -> Iterator[Cover]:
    """All ways to write what was taken back and maybe more, with tokens of one byte or more."""
    rest = _said(spelled, taken)
    before = _said(spelled, kept)
    found = [tuple(taken[:-1])]
    usual = longest_first(before + rest, spelled)
    point = len(usual) - len(taken)
    for end in range(1, len(rest) if usual[point:] == taken else 0):
        cut = longest_first(before + rest[:end], spelled)
        if cut[:point] == usual[:point] and _said(spelled, cut[point:]) == rest[:end]:
            found.append(tuple(cut[point:]))
    for spelling in {one[:i] for one in found for i in range(len(one) + 1)}:
        left = rest[len(_said(spelled, spelling)) :]
        for token, text in enumerate(spelled):
            if text and text.startswith(left):
                yield Cover(spelling, token, text[len(left) :])


def _said(spelled: Sequence[bytes], tokens: Sequence[int]) -> bytes:
    return b"".join(spelled[token] for token in tokens)


def healed_ends(
    asked: Asked, prompt: Sequence[int], spelled: Sequence[bytes], least: int, logits: Logits
) -> dict[End, float]:
    """The law of how a prompt ends. `asked` says what is asked for with the prompt as it was."""
    point = healing_point(spelled, prompt, least)
    if point is None:
        return {End(tuple(prompt), None): 1.0}
    kept = list(prompt[:point])
    ends: list[End] = []
    weights: list[float] = []
    for cover in covers(spelled, kept, list(prompt[point:])):
        stands_for = _spell_over(asked, spelled, cover.over)
        if stands_for is None:
            continue
        whole = (*kept, *cover.spelling)
        first = First(cover.token, stands_for)
        ends.append(End(whole, first) if cover.over else End((*whole, cover.token), None))
        weights.append(_weight(asked, kept, cover, logits))
    law = row_laws(torch.tensor([weights], dtype=torch.float64), [asked.sampling])[0].tolist()
    found: dict[End, float] = defaultdict(float)
    for end, probability in zip(ends, law, strict=True):
        found[end] += probability
    return dict(found)


def _spell_over(asked: Asked, spelled: Sequence[bytes], over: bytes) -> tuple[int, ...] | None:
    """Tokens that spell what is beyond the prompt, the longest that a constraint allows first; None
    where it allows none."""
    tokens: list[int] = []
    while over:
        constraint = asked.constraint(tokens)
        if constraint is None:
            return ()
        assert isinstance(constraint, LeftToRight)
        allowed = tokens_of(constraint.first())
        fitting = [t for t in allowed if spelled[t] and over.startswith(spelled[t])]
        if not fitting:
            return None
        tokens.append(int(max(fitting, key=lambda t: len(spelled[t]))))
        over = over[len(spelled[tokens[-1]]) :]
    return tuple(tokens)


def _weight(asked: Asked, kept: Sequence[int], cover: Cover, logits: Logits) -> float:
    tokens = (*cover.spelling, cover.token)
    return _logprob(asked, cover, [logits(kept, tokens[:i]) for i in range(len(tokens))])


def _logprob(asked: Asked, cover: Cover, logits: Sequence[Tensor]) -> float:
    """The log-probability that the model writes a cover, from what it says of each token; the
    parameters change the last logit, where it is the output's."""
    total = 0.0
    tokens = (*cover.spelling, cover.token)
    for i, token in enumerate(tokens):
        own_V = logits[i].double().clone()
        if asked.mask is not None:
            own_V[asked.mask] = -math.inf
        mass = float(own_V.logsumexp(-1))
        if cover.over and i == len(tokens) - 1:
            vocab = len(own_V)
            history = TokenHistory(
                asked.sampling, asked.prompt_ids, vocab, asked.stops, asked.never
            )
            own_V = ChainRows(history, [], [0]).edit(own_V[None])[0]
        total += float(own_V[token]) - mass
    return total


def healed_law(ends: dict[End, float], after: Callable[[End], Law]) -> Law:
    """The law of prompt and output together."""
    law: Law = defaultdict(float)
    for end, probability in ends.items():
        if probability > 0:
            for output, p in after(end).items():
                law[(*end.prompt, *output)] += probability * p
    return dict(law)


def covers_before(
    spelled: Sequence[bytes], taken: Sequence[int], kept: Sequence[int]
) -> Iterator[Cover]:
    """All ways to write what was taken back of a text after a hole, and maybe more before it: a
    token that ends with a beginning of it, and a spelling of the remainder, last token first."""
    rest = _said(spelled, taken)
    after = _said(spelled, kept)
    found = [tuple(taken[1:])]
    usual = longest_first(rest + after, spelled)
    behind = usual[len(taken) :]
    for start in range(1, len(rest) if usual[: len(taken)] == taken else 0):
        cut = longest_first(rest[start:] + after, spelled)
        n = len(cut) - len(behind)
        if cut[n:] == behind and _said(spelled, cut[:n]) == rest[start:]:
            found.append(tuple(cut[:n]))
    for spelling in {one[i:] for one in found for i in range(len(one) + 1)}:
        left = rest[: len(rest) - len(_said(spelled, spelling))]
        for token, text in enumerate(spelled):
            if text and text.endswith(left):
                yield Cover(spelling[::-1], token, text[: len(text) - len(left)])


class OpenHole(NamedTuple):
    """Places [first, last) of a canvas: a hole, and what was taken back on its sides. `middle` is
    where the text after it began."""

    first: int
    middle: int
    last: int
    before: list[Cover]
    after: list[Cover]


# What a model says of a place, given a canvas and tokens that are put on it one after the other.
CanvasLogits = Callable[[State, Sequence[tuple[int, int]], int], Tensor]


def healed_canvases(asked: Asked, spelled: Sequence[bytes], logits: CanvasLogits) -> Law:
    """The law of the canvas when all borders are healed, with -1 for every blank that is left: hole
    by hole, the left border first."""
    canvas = list(asked.canvas)
    runs = runs_of(canvas)
    holes = []
    taken = 0  # by the hole before
    for run, before, after in zip(runs, [(-1,), *runs], [*runs[1:], (len(canvas),)]):
        left = [int(token or 0) for token in asked.canvas[before[-1] + 1 : run[0]]]
        right = [int(token or 0) for token in asked.canvas[run[-1] + 1 : after[0]]]
        hole = _open_hole(spelled, run, left, right, taken)
        canvas[hole.first : hole.last] = [None] * (hole.last - hole.first)
        taken = hole.last - hole.middle
        holes.append(hole)
    law: dict[State, float] = {tuple(canvas): 1.0}
    for hole in holes:
        law = _heal_side(asked, logits, range(hole.first, hole.middle), hole.before, law)
        law = _heal_side(asked, logits, range(hole.first, hole.last)[::-1], hole.after, law)
    return {tuple(-1 if t is None else t for t in state): p for state, p in law.items()}


def _open_hole(
    spelled: Sequence[bytes],
    run: Sequence[int],
    left: list[int],
    right: list[int],
    taken: int,
) -> OpenHole:
    point = healing_point(spelled, left, taken)
    before = [] if point is None else list(covers(spelled, left[:point], left[point:]))
    first = run[0] if point is None else run[0] - len(left) + point
    count = _taken_after(spelled, right)
    after = list(covers_before(spelled, right[:count], right[count:])) if count else []
    return OpenHole(first, run[-1] + 1, run[-1] + 1 + count, before, after)


def _taken_after(spelled: Sequence[bytes], piece: Sequence[int]) -> int:
    """The most tokens, of the first four, that some token ends with all of, and more before."""
    for count in range(min(MOST_BACK, len(piece)), 0, -1):
        rest = _said(spelled, piece[:count])
        if any(text.endswith(rest) and text != rest for text in spelled):
            return count
    return 0


def _heal_side(
    asked: Asked,
    logits: CanvasLogits,
    places: Sequence[int],
    options: list[Cover],
    law: dict[State, float],
) -> dict[State, float]:
    """The law of the canvas once one side of a hole is healed: its covers stand at these places,
    from what is kept into the hole, as far as they are blank."""
    if not options:
        return law
    found: dict[State, float] = defaultdict(float)
    for state, probability in law.items():
        room = [place for place in places if state[place] is None]
        fitting = [cover for cover in options if len(cover.spelling) < len(room)]
        weights = []
        canvases = []
        for cover in fitting:
            put = list(zip(room, (*cover.spelling, cover.token)))
            said = [logits(state, put[:i], place) for i, (place, _) in enumerate(put)]
            weights.append(_logprob(asked, cover, said))
            canvases.append(tuple({**dict(enumerate(state)), **dict(put)}.values()))
        chances = row_laws(torch.tensor([weights], dtype=torch.float64), [asked.sampling])[0]
        for canvas, chance in zip(canvases, chances.tolist()):
            if chance > 0:
                found[canvas] += probability * chance
    return dict(found)
