"""Bigrams of the canvas as drafter (Guo & Ermon, Algorithm 2): free, and good where tokens repeat their neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.accept import draw
from forerun.core import BLANK, Canvas, Draft


@dataclass(frozen=True)
class NgramDrafter:
    """Each token from c(. | the token to its left), decided or just drafted; from the canvas' own tokens where that one is new.

    At temperature 0 the likeliest follower, as a point mass. The paper's equation 23 writes the pair the wrong way round.
    """

    async def propose(self, seq: Canvas, k: int) -> Draft:
        positions, tokens, laws = seq.next(k), [], []
        canvas = seq.canvas.copy()
        if not (canvas != BLANK).any():
            return Draft([], [])
        for position in positions:
            q_V = follower_law(canvas, position, seq.history.vocab)
            if seq.history.sampling.temperature == 0:
                token = int(q_V.argmax())
            else:
                [token] = await seq.draw(draw, q_V)
            canvas[position] = token
            tokens.append(token)
            laws.append(q_V)
            if seq.ends(token):
                break
        greedy = seq.history.sampling.temperature == 0
        return Draft(positions[: len(tokens)], tokens, None if greedy or not laws else torch.stack(laws))


def follower_law(canvas: np.ndarray, position: int, vocab: int) -> Tensor:
    """c(a | b): how often a stands right of b in the canvas, where b is the token left of the position; how often a stands
    anywhere if nothing is known to follow b, or if there is no token to the left."""
    followers = canvas[:0]
    if position > 0:
        left = np.flatnonzero(canvas[:-1] == canvas[position - 1])
        followers = canvas[left + 1]
        followers = followers[followers != BLANK]
    if not len(followers):
        followers = canvas[canvas != BLANK]
    counts_V = torch.bincount(torch.from_numpy(followers.astype(np.int64)), minlength=vocab).double()
    return counts_V / counts_V.sum()
