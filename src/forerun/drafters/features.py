"""A drafter that looks into its target: one forward of a few layers over the target's own hidden
states (DFlash), with or without a correction by the token before (DSpark), or token after token
(EAGLE)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from forerun.drafters.adaptive import adaptive_length
from forerun.drafters.base import NO_DRAFT, Draft
from forerun.errors import NothingPossible, NothingToSee
from forerun.families.features import FeatureFiller
from forerun.options import check_flag, check_positive
from forerun.probability.acceptance import sample_each, sample_token
from forerun.probability.distributions import tempered
from forerun.probability.markov import Markov, draw_chain
from forerun.probability.outcomes import Tokens
from forerun.probability.transfer import to_device
from forerun.sequence.canvas import Canvas

AUTO = "auto"  # as `draft=`: the drafter that belongs to the model
SUFFIX = ":drafter"  # of the names of drafters that are shipped
KINDS = ("dflash", "dspark")  # of checkpoints in the layout of `speculators`


@dataclass(frozen=True)
class FeaturesDrafter:
    """Draws the next tokens from the laws of a block, each of which knows the text alone, or the
    text and the token before. Both are laws that rejection judges exactly.

    Nothing is drafted before the target has run: there is nothing to look into.
    """

    model: FeatureFiller
    adapt: bool = field(
        default=False, metadata={"help": "draft fewer than k tokens while few are accepted"}
    )
    draft_temperature: float = field(
        default=1.0, metadata={"help": "temperature of drafts, times the request's own"}
    )

    def __post_init__(self) -> None:
        check_flag("adapt", self.adapt)
        check_positive("draft_temperature", self.draft_temperature)

    @property
    def drafts_alike(self) -> bool:
        return not self.adapt

    @property
    def most(self) -> int:
        return self.model.family.block - 1

    def forwards(self, k: int) -> Sequence[int]:
        family = self.model.family
        return [1] * k if family.autoregressive else [family.block + 1]  # whatever is read of it

    async def propose(self, seq: Canvas, k: int) -> Draft:
        family = self.model.family
        if not seq.history.generated or not family.can_begin(seq):
            return NO_DRAFT
        count = min(adaptive_length(seq, k) if self.adapt else k, self.most)
        if count < 1:
            return NO_DRAFT
        try:
            tokens, q = await self._drawn(seq, count)
        except (NothingPossible, NothingToSee):
            # It drafts none of the tokens that are allowed here, or its target has to run first.
            return NO_DRAFT
        tokens = seq.up_to_end(tokens)
        return Draft(seq.next(len(tokens)), tokens, None if q is None else q[: len(tokens)])

    async def _drawn(self, seq: Canvas, k: int) -> tuple[list[int], Tensor | None]:
        """Drafted tokens and their laws; no laws where it is certain of them."""
        family = self.model.family
        if family.autoregressive:
            return await self._one_by_one(seq, k)
        if family.markov is not None:
            return await self._corrected(seq, k, family.markov)
        return await self._at_once(seq, k)

    async def _at_once(self, seq: Canvas, k: int) -> tuple[list[int], Tensor | None]:
        laws = await self.model.block(seq, k)
        q = tempered(laws.law, self.draft_temperature)
        drawn = await seq.draw(sample_each, seq.next(k), q)
        certain = seq.history.sampling.temperature == 0
        return drawn.tokens[:k], None if certain else q

    async def _corrected(
        self, seq: Canvas, k: int, markov: Markov
    ) -> tuple[list[int], Tensor | None]:
        laws = await self.model.block(seq, k)
        temperature = seq.history.sampling.temperature * self.draft_temperature
        last = int(seq.text[-1])
        rule: Callable[..., Tokens] = draw_chain(markov, temperature)
        drawn = await seq.draw(rule, seq.next(k), [last], laws.model_law)
        tokens = drawn.tokens[:k]
        if temperature == 0:
            return tokens, None  # certain of every token
        before_K = to_device([last, *tokens[:-1]], torch.long, laws.model_law.device)
        plain = seq.history.sampling.keeps_all and not seq.history.edits_logits
        if plain and self.draft_temperature == 1:
            return tokens, markov.pending(laws.law, before_K)
        return tokens, markov.law(laws.model_law[:k], before_K, temperature)

    async def _one_by_one(self, seq: Canvas, k: int) -> tuple[list[int], Tensor]:
        tokens: list[int] = []
        laws: list[Tensor] = []
        while len(tokens) < k and not (tokens and seq.ends(tokens[-1])):
            law_V = tempered(await self.model.next_law(seq, tokens), self.draft_temperature)
            tokens.append((await seq.draw(sample_token, law_V)).token)
            laws.append(law_V)
        return tokens, torch.stack(laws)


def names_drafter(draft: object) -> bool:
    """Does `draft=` name a drafter that looks into its target?"""
    if not isinstance(draft, str):
        return getattr(getattr(draft, "family", None), "name", None) == "features"
    # 'zoo:drafter' is a model of its own
    shipped = draft.endswith(SUFFIX) and not draft.startswith("zoo:")
    by_name = draft in (AUTO, "features") or shipped
    return by_name or is_checkpoint(Path(draft).expanduser())


def is_checkpoint(folder: Path) -> bool:
    """Is this folder a drafter that looks into its target?"""
    file = folder / "config.json"
    if not file.is_file():
        return False
    config = json.loads(file.read_text())
    return "dflash_config" in config or config.get("speculators_model_type") in KINDS
