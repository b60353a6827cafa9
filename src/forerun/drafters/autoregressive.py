"""A smaller left-to-right model as drafter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forerun.accept import draw
from forerun.core import Canvas, Conditional, Draft


@dataclass(frozen=True)
class ModelDrafter:
    """Draws token after token from the small model's law, under the request's own sampling parameters."""

    model: Conditional

    async def propose(self, seq: Canvas, k: int) -> Draft:
        tokens: list[int] = []
        laws = []
        while len(tokens) < k and not (tokens and seq.ends(tokens[-1])):
            q_V = await self.model.following(seq, tokens)
            tokens += await seq.draw(draw, q_V)
            laws.append(q_V)
        return Draft(seq.next(len(tokens)), tokens, torch.stack(laws) if laws else None)
