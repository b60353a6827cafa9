"""A smaller model as drafter: token after token, each from its own law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from forerun.drafters.base import NO_DRAFT, Draft
from forerun.families.base import ChainScorer
from forerun.options import check_positive
from forerun.sequence.canvas import Canvas


@dataclass(frozen=True)
class ModelDrafter:
    """Draws token after token from the draft model's law, under the request's own sampling
    parameters."""

    drafts_alike: ClassVar[bool] = True
    model: ChainScorer
    draft_temperature: float = field(
        default=1.0, metadata={"help": "temperature of drafts, times the request's own"}
    )

    def __post_init__(self) -> None:
        check_positive("draft_temperature", self.draft_temperature)

    def forwards(self, k: int) -> Sequence[int]:
        return [1] * k

    async def propose(self, seq: Canvas, k: int) -> Draft:
        if not self.model.family.can_begin(seq):  # a hole at the very beginning
            return NO_DRAFT
        if not k:
            return NO_DRAFT
        written = await self.model.write_on(seq, k, self.draft_temperature)
        if not written.tokens:
            return NO_DRAFT
        return Draft(seq.next(len(written.tokens)), written.tokens, written.laws)
