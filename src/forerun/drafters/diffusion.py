"""A model that fills blanks as drafter: all tokens of a draft at once, or in a few steps from left to right (SpecDiff)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.accept import each
from forerun.choose import surest
from forerun.core import Canvas, Canvases, Draft, Drafter, Marginal, Scope
from forerun.drafters.pace import pace
from forerun.errors import BadOption
from forerun.laws import tempered
from forerun.parameters import check_flag, check_positive, check_whole


@dataclass(frozen=True)
class DiffusionDrafter:
    """Draws the next tokens from their marginals. In several steps, later tokens know earlier ones: a law that depends only on
    tokens to its left is a law that rejection can judge exactly, which the paper's order of confidence is not."""

    model: Marginal
    steps: int = field(default=1, metadata={"help": "forwards of the drafter per draft"})
    keep: bool = field(
        default=False, metadata={"help": "keep the drafter's keys of the text, though it once saw blanks after them"}
    )
    adapt: bool = field(default=False, metadata={"help": "draft fewer than k tokens while few are accepted"})
    draft_temperature: float = field(default=1.0, metadata={"help": "temperature of drafts, times the request's own"})
    first: int = field(default=0, metadata={"help": "so many tokens at the beginning are drafted by `first_draft` instead"})
    first_draft: Any = field(default="lookup", metadata={"help": "what drafts those: lookup, or a smaller left-to-right model"})
    opening: Drafter | None = None  # what `first_draft` names

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        check_whole("first", self.first, least=0)
        if self.first_draft != "lookup" and not self.first:
            raise BadOption(f"first_draft={self.first_draft!r} needs first=, the number of tokens that it drafts.")
        check_flag("keep", self.keep)
        check_flag("adapt", self.adapt)
        check_positive("draft_temperature", self.draft_temperature)

    async def propose(self, seq: Canvas, k: int) -> Draft:
        if seq.history.generated < self.first and self.opening is not None:
            return await self.opening.propose(seq, k)
        return await self.fill(seq, seq.next(pace(seq, k) if self.adapt else k))

    async def fill(self, seq: Canvas, positions: list[int]) -> Draft:
        tokens: list[int] = []
        laws: list[Tensor] = []
        share = -(-len(positions) // self.steps) if positions else 1
        while len(tokens) < len(positions) and not any(map(seq.ends, tokens)):
            now = positions[len(tokens) : len(tokens) + share]
            q = tempered(await self._marginals(seq, now, list(zip(positions, tokens)), positions[-1] + 1), self.draft_temperature)
            tokens += (await seq.draw(each, now, q))[: len(now)]
            laws.append(q)
        return Draft(positions[: len(tokens)], tokens, torch.cat(laws)[: len(tokens)] if laws else None)

    async def _marginals(self, seq: Canvas, now: list[int], placed: list[tuple[int, int]], length: int) -> Tensor:
        """The laws of some blanks given the text and what is drafted so far."""
        model: Any = self.model
        if Canvases not in model.family.answers:
            return await self._conditional(seq, now, placed)
        scope = Scope("prefix", now[0] if self.keep else 0, length, fresh=not self.keep, length=length)
        [(law, _)] = await model.canvases(seq, [now], [placed], scope)
        return law

    async def _conditional(self, seq: Canvas, now: list[int], placed: list[tuple[int, int]]) -> Tensor:
        """An any-subset model says it by conditionals of the draft and the marginals after them."""
        if not placed:
            return await self.model.marginals(seq, now)
        model: Any = self.model
        verdict, ahead = await model.outlook(seq, [t for _, t in placed], len(now) - 1, [len(placed)])
        return torch.cat([verdict[len(placed) :], ahead])


@dataclass(frozen=True)
class ConfidenceDrafter(DiffusionDrafter):
    """The paper's order: in every step the surest blanks are revealed, wherever they are. The law of a revealed token then depends
    on tokens to its right, so that above temperature 0 rejection against it is biased; at temperature 0 it is not."""

    model: Canvases
    steps: int = field(default=2, metadata={"help": "forwards of the drafter per draft"})

    async def fill(self, seq: Canvas, positions: list[int]) -> Draft:
        if not positions:
            return Draft([], [])
        share = -(-len(positions) // self.steps)
        placed: list[tuple[int, int]] = []
        laws: dict[int, Tensor] = {}
        while len(placed) < len(positions):
            now = [p for p in positions if p not in laws]
            scope = Scope("prefix", positions[0] if self.keep else 0, fresh=not self.keep, length=positions[-1] + 1)
            [(law, own)] = await self.model.canvases(seq, [now], [placed], scope)
            law = tempered(law, self.draft_temperature)
            chosen = await seq.draw(surest(share), now, law, own)
            for i, (position, token) in enumerate(zip(now, chosen)):
                if token > 0:
                    placed.append((position, token - 1))
                    laws[position] = law[i]
        return Draft(positions, [token for _, token in sorted(placed)], torch.stack([laws[p] for p in positions]))
