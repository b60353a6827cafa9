"""Bigrams of the canvas as drafter (Guo & Ermon, Algorithm 2): free, and good where tokens repeat
their neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.base import NO_DRAFT, Draft
from forerun.probability.acceptance import sample_token
from forerun.sequence.canvas import BLANK, Canvas


@dataclass(frozen=True)
class NgramDrafter:
    """Each token from c(. | the token to its left), decided or just drafted; from the canvas' own
    tokens where that one is new.

    At temperature 0 the likeliest follower, as a point mass. The paper's equation 23 writes the
    pair the wrong way round.
    """

    async def propose(self, seq: Canvas, k: int) -> Draft:
        greedy = seq.history.sampling.temperature == 0
        positions = seq.next(k)
        canvas = seq.tokens.copy()
        if not (canvas != BLANK).any():
            return NO_DRAFT
        tokens: list[int] = []
        laws: list[Tensor] = []
        for position in positions:
            q_V = follower_law(canvas, position, seq.history.vocab)
            if greedy:
                token = int(q_V.argmax())
            else:
                token = (await seq.draw(sample_token, q_V)).token
            canvas[position] = token
            tokens.append(token)
            laws.append(q_V)
            if seq.ends(token):
                break
        q = None if greedy or not laws else torch.stack(laws)
        return Draft(positions[: len(tokens)], tokens, q)


def follower_law(canvas: np.ndarray, position: int, vocab: int) -> Tensor:
    """c(a | b): how often a stands right of b in the canvas, where b is the token left of the
    position. If nothing is known to follow b, or there is no token to the left: how often a stands
    anywhere."""
    followers = canvas[:0]
    if position > 0:
        left = np.flatnonzero(canvas[:-1] == canvas[position - 1])
        followers = canvas[left + 1]
        followers = followers[followers != BLANK]
    if not len(followers):
        followers = canvas[canvas != BLANK]
    tokens = torch.from_numpy(followers.astype(np.int64))
    counts_V = torch.bincount(tokens, minlength=vocab).double()
    return counts_V / counts_V.sum()
