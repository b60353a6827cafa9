"""A smaller left-to-right model as drafter."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from forerun.accept import draw
from forerun.core import Canvas, Conditional, Draft
from forerun.laws import tempered
from forerun.parameters import check_positive


@dataclass(frozen=True)
class ModelDrafter:
    """Draws token after token from the small model's law, under the request's own sampling parameters."""

    model: Conditional
    draft_temperature: float = field(default=1.0, metadata={"help": "temperature of drafts, times the request's own"})

    def __post_init__(self) -> None:
        check_positive("draft_temperature", self.draft_temperature)

    async def propose(self, seq: Canvas, k: int) -> Draft:
        tokens: list[int] = []
        laws = []
        while len(tokens) < k and not (tokens and seq.ends(tokens[-1])):
            q_V = tempered(await self.model.following(seq, tokens), self.draft_temperature)
            tokens += await seq.draw(draw, q_V)
            laws.append(q_V)
        return Draft(seq.next(len(tokens)), tokens, torch.stack(laws) if laws else None)
