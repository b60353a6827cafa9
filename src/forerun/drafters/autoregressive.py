"""A smaller model as drafter: token after token, each from its own law."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from forerun.drafters.base import NO_DRAFT, Draft
from forerun.families.base import ChainScorer
from forerun.options import check_positive
from forerun.probability.acceptance import sample_token
from forerun.probability.distributions import tempered
from forerun.sequence.canvas import Canvas


@dataclass(frozen=True)
class ModelDrafter:
    """Draws token after token from the draft model's law, under the request's own sampling
    parameters."""

    model: ChainScorer
    draft_temperature: float = field(
        default=1.0, metadata={"help": "temperature of drafts, times the request's own"}
    )

    def __post_init__(self) -> None:
        check_positive("draft_temperature", self.draft_temperature)

    async def propose(self, seq: Canvas, k: int) -> Draft:
        if not self.model.family.can_begin(seq):  # a hole at the very beginning
            return NO_DRAFT
        tokens: list[int] = []
        laws = []
        while len(tokens) < k and not (tokens and seq.ends(tokens[-1])):
            q_V = tempered(await self.model.next_law(seq, tokens), self.draft_temperature)
            drawn = await seq.draw(sample_token, q_V)
            tokens.append(drawn.token)
            laws.append(q_V)
        return Draft(seq.next(len(tokens)), tokens, torch.stack(laws) if laws else None)
