"""The law of a healed prompt straight from its definition (`constraints/healing.py`), for
vocabularies of a few tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.certify.reference import Asked, First, Law
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
    """The log-probability that the model writes a cover; the parameters change the last logit,
    where it is the output's."""
    total = 0.0
    tokens = (*cover.spelling, cover.token)
    for i, token in enumerate(tokens):
        own_V = logits(kept, tokens[:i]).double().clone()
        own_V[list(asked.never)] = -math.inf
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
