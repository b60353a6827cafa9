"""A model that fills blanks as drafter: all tokens of a draft at once, or in a few steps from left
to right (SpecDiff)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.adaptive import adaptive_length
from forerun.drafters.base import NO_DRAFT, Draft, Drafter
from forerun.errors import BadOption, NothingPossible
from forerun.families.base import BlankFiller, SelfDrafter
from forerun.families.masked import CacheScope, CanvasFiller
from forerun.options import check_flag, check_positive, check_whole
from forerun.probability.acceptance import sample_each
from forerun.probability.distributions import tempered
from forerun.probability.selection import most_confident, reveal
from forerun.sequence.canvas import Canvas


@dataclass(frozen=True)
class DiffusionDrafter:
    """Draws the next tokens from their marginals. In several steps, later tokens know earlier ones.

    Rejection judges a law exactly if it depends only on tokens to its left. That holds here, and
    not where blanks are revealed at random (`ddpm_cache`, the paper's) or in order of confidence.
    """

    model: BlankFiller
    steps: int = field(default=1, metadata={"help": "forwards of the drafter per draft"})
    keep: bool = field(
        default=False,
        metadata={"help": "keep the drafter's keys of the text, though it once saw blanks there"},
    )
    adapt: bool = field(
        default=False, metadata={"help": "draft fewer than k tokens while few are accepted"}
    )
    draft_temperature: float = field(
        default=1.0, metadata={"help": "temperature of drafts, times the request's own"}
    )
    first: int = field(
        default=0,
        metadata={"help": "`first_draft` drafts so many tokens at the beginning instead"},
    )
    first_draft: Any = field(
        default="lookup",
        metadata={"help": "what drafts those: lookup, or a smaller left-to-right model"},
    )
    opening: Drafter | None = None  # what `first_draft` names
    # Forwards of this sequence so far: the first one trusts no keys of an earlier request.
    _forwards: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        check_whole("first", self.first, least=0)
        if self.first_draft != "lookup" and not self.first:
            raise BadOption(
                f"first_draft={self.first_draft!r} needs first=, the number of tokens that it "
                f"drafts."
            )
        check_flag("keep", self.keep)
        check_flag("adapt", self.adapt)
        check_positive("draft_temperature", self.draft_temperature)

    @property
    def drafts_alike(self) -> bool:
        return self.steps == 1 and not self.first and not self.adapt

    def forwards(self, k: int) -> Sequence[int]:
        share = -(-k // self.steps)
        return [share] * -(-k // share)

    async def propose(self, seq: Canvas, k: int) -> Draft:
        if seq.history.generated < self.first and self.opening is not None:
            return await self.opening.propose(seq, k)
        if not self.model.family.can_begin(seq):
            return NO_DRAFT
        count = adaptive_length(seq, k) if self.adapt else k
        return await self.fill(seq, seq.next(count))

    async def fill(self, seq: Canvas, positions: list[int]) -> Draft:
        if not positions:
            return NO_DRAFT
        tokens: list[int] = []
        laws: list[Tensor] = []
        share = -(-len(positions) // self.steps)
        while len(tokens) < len(positions) and not any(map(seq.ends, tokens)):
            now = positions[len(tokens) : len(tokens) + share]
            placed = list(zip(positions, tokens))
            q = await self._marginals(seq, now, placed, positions[-1] + 1)
            q = tempered(q, self.draft_temperature)
            try:
                drawn = await seq.draw(sample_each, now, q)
            except NothingPossible:  # the drafter says no numbers: what is drawn may stay
                break
            tokens += drawn.tokens[: len(now)]
            laws.append(q)
        tokens = seq.up_to_end(tokens)
        if not tokens:
            return NO_DRAFT
        return Draft(positions[: len(tokens)], tokens, torch.cat(laws)[: len(tokens)])

    async def _marginals(
        self, seq: Canvas, now: list[int], placed: list[tuple[int, int]], length: int
    ) -> Tensor:
        """The laws of some blanks given the text and what is drafted so far."""
        if isinstance(self.model, CanvasFiller):
            scope = self._scope(now[0], length)
            [laws] = await self.model.canvases(seq, [now], [placed], scope)
            return laws.law
        if not placed:
            return await self.model.marginals(seq, now)
        assert isinstance(self.model, SelfDrafter)
        chain = [token for _, token in placed]
        verdict, drafts = await self.model.verdict_and_drafts(
            seq, chain, len(now) - 1, [len(chain)]
        )
        return torch.cat([verdict[len(chain) :], drafts])

    def _scope(self, first: int, length: int) -> CacheScope:
        """What of the drafter's cache is trusted: nothing, or with `keep` all before the draft."""
        begins = not self._forwards
        self._forwards.append(first)
        start = first if self.keep else 0
        return CacheScope("prefix", start, length, fresh=begins or not self.keep, length=length)


@dataclass(frozen=True)
class ConfidenceDrafter(DiffusionDrafter):
    """Every step reveals the most confident blanks, wherever they are.

    The law of a revealed token then depends on tokens to its right. Above temperature 0 rejection
    against it is biased; at temperature 0 it is not.
    """

    model: CanvasFiller
    steps: int = field(default=2, metadata={"help": "forwards of the drafter per draft"})

    async def fill(self, seq: Canvas, positions: list[int]) -> Draft:
        if not positions:
            return NO_DRAFT
        share = -(-len(positions) // self.steps)
        placed: list[tuple[int, int]] = []
        laws: dict[int, Tensor] = {}
        while len(placed) < len(positions):
            scope = self._scope(positions[0], positions[-1] + 1)
            now = [position for position in positions if position not in laws]
            [answer] = await self.model.canvases(seq, [now], [placed], scope)
            law = tempered(answer.law, self.draft_temperature)
            selection = await seq.draw(most_confident(share), now, law, answer.model_law)
            for position, token in selection.placements(now):
                placed.append((position, token))
                laws[position] = law[now.index(position)]
        tokens = [token for _, token in sorted(placed)]
        return Draft(positions, tokens, torch.stack([laws[p] for p in positions]))


SMALLEST_TIME = 1e-5  # of MDLM's sampler


@dataclass(frozen=True)
class DdpmCacheDrafter(DiffusionDrafter):
    """The paper's own (Table 5): MDLM's reverse process. From time t to s every blank stays masked
    with probability s / t, else it draws its token. What is masked after T steps is drawn in one
    more.

    A step that reveals nothing leaves the canvas as it was, so its laws serve the next step too. As
    in order of confidence, a token's law depends on tokens to its right.
    """

    model: CanvasFiller
    steps: int = field(default=2, metadata={"help": "steps T of the reverse process"})

    async def fill(self, seq: Canvas, positions: list[int]) -> Draft:
        if not positions:
            return NO_DRAFT
        placed: list[tuple[int, int]] = []
        laws: dict[int, Tensor] = {}
        law: Tensor | None = None
        for chance in reveal_chances(self.steps):
            now = [position for position in positions if position not in laws]
            if not now:
                break
            if law is None:
                scope = self._scope(positions[0], positions[-1] + 1)
                [answer] = await self.model.canvases(seq, [now], [placed], scope)
                law = tempered(answer.law, self.draft_temperature)
            revealed = await seq.draw(reveal(chance), now, law)
            for position, token in revealed.placements(now):
                placed.append((position, token))
                laws[position] = law[now.index(position)]
            law = law if len(now) + len(placed) == len(positions) else None
        tokens = [token for _, token in sorted(placed)]
        return Draft(positions, tokens, torch.stack([laws[p] for p in positions]))


def reveal_chances(steps: int) -> list[float]:
    """With which probability a blank is revealed in each step, and at last for certain."""
    times = [1 + (SMALLEST_TIME - 1) * step / steps for step in range(steps + 1)]
    return [*(1 - s / t for t, s in pairwise(times)), 1.0]
