"""Distilling: a model that fills blanks learns the laws of a left-to-right target, on text that the
target wrote itself.

A draft is a prefix followed by masks alone. Each token of it has the target's law, averaged over
the tokens that may stand between. A share of every batch are such drafts, of real text and of the
target's own samples, and the target's logits are their labels. The rest is plain training, so that
the model keeps filling blanks anywhere. A block model also learns to go from left to right, in
blocks of one token.

B sequences, L tokens, M masked tokens of all drafts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadOption
from forerun.options import check_between, check_whole
from forerun.train.base import TextObjective, without_token
from forerun.train.block import BlockObjective
from forerun.train.data import Corpus, MixedCorpus, TokenSource
from forerun.train.masked import MaskedObjective
from forerun.train.networks import load_network, move
from forerun.train.samples import SamplePlan, write_samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PlainT = TypeVar("PlainT", bound=TextObjective)


@dataclass(frozen=True)
class Distillation:
    """Who teaches, and how much text it writes for that."""

    teacher: str = "zoo:ar"  # the target: a left-to-right checkpoint with the same tokens
    # each token of a draft weighs this much of the one before: after a rejected token none counts
    discount: float = 0.9
    samples: int = 16384  # sequences that the teacher writes before training begins
    sampled: float = 0.6  # share of every batch that is taken from them
    temperatures: tuple[float, ...] = (0.0, 1.0)  # at which it writes, in equal parts

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", tuple(self.temperatures))
        for name in ("sampled", "discount"):
            check_between(name, getattr(self, name))
        check_whole("samples", self.samples, least=0)
        writes = self.samples and self.temperatures and min(self.temperatures) >= 0
        if self.sampled and not writes:
            raise BadOption(
                f"sampled={self.sampled} needs samples above 0 and temperatures of 0 or more."
            )

    def gather(
        self, corpus: Corpus, network: PreTrainedModel, context: int, seed: int, out: Path
    ) -> TokenSource[Tensor]:
        """The corpus with what the teacher writes after prefixes of it."""
        if not self.sampled:
            return corpus
        plan = SamplePlan(self.samples, context, self.temperatures, seed)
        written_NL = write_samples(load_teacher(self.teacher), corpus, plan, out / "samples")
        return MixedCorpus(corpus, written_NL, self.sampled)

    @torch.no_grad()
    def target_laws(
        self, tokens_BL: Tensor, taught_BL: Tensor, vocab: int, mask_token: int
    ) -> Tensor:
        """[M, V]: the teacher's law of each taught token, given all tokens before it. A student
        that was given a mask token has one token more than its teacher."""
        device = tokens_BL.device
        teacher = load_teacher(self.teacher)
        move(teacher, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits_BLV = teacher(tokens_BL, use_cache=False).logits
        logits_MV = logits_BLV[:, :-1][taught_BL[:, 1:]].float()
        missing = max(0, vocab - logits_MV.shape[-1])
        logits_MV = F.pad(logits_MV, (0, missing), value=-1e9)[:, :vocab]
        return without_token(logits_MV, mask_token).softmax(-1)

    def distilled_loss(
        self,
        logits_BLV: Tensor,
        tokens_BL: Tensor,
        weight_BL: Tensor,
        asked_BL: Tensor,
        taught_B: Tensor,
        mask_token: int,
    ) -> Tensor:
        """Asked tokens of taught sequences are drawn to the teacher's laws, those of the others to
        the text."""
        plain_BL = asked_BL & ~taught_B[:, None]
        taught_BL = asked_BL & taught_B[:, None]
        nats = F.cross_entropy(logits_BLV[plain_BL], tokens_BL[plain_BL], reduction="none")
        total = (nats * weight_BL[plain_BL]).sum()
        if taught_B.any():
            p_MV = self.target_laws(
                tokens_BL[taught_B], taught_BL[taught_B], logits_BLV.shape[-1], mask_token
            )
            nats_M = F.cross_entropy(logits_BLV[taught_BL], p_MV, reduction="none")
            total = total + (nats_M * weight_BL[taught_BL]).sum()
        return total / len(tokens_BL)


@dataclass(frozen=True)
class DistilDrafterObjective(Distillation, MaskedObjective):
    """Which part of a batch is drafts of a masked model."""

    drafts: float = 0.6  # share of sequences that are drafts
    draft_longest: int = 16  # tokens of a draft, at most

    def __post_init__(self) -> None:
        MaskedObjective.__post_init__(self)
        Distillation.__post_init__(self)
        check_between("drafts", self.drafts)
        check_whole("draft_longest", self.draft_longest)

    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        size, length = tokens_BL.shape
        plain = MaskedObjective.prepare(self, tokens_BL, rng, step)
        tokens_BL, masked_BL, weight_BL, end_B = plain
        draft_B = torch.from_numpy(rng.random(size) < self.drafts)
        longest = min(self.draft_longest, length - 1)
        start_B = torch.from_numpy(rng.integers(1, length - longest + 1, size))
        ahead_BL = torch.arange(length) - start_B[:, None]  # 0 is a draft's first token
        in_draft_BL = (ahead_BL >= 0) & (ahead_BL < longest)
        share_BL = in_draft_BL * self.discount ** ahead_BL.clamp(min=0)
        share_BL = share_BL / share_BL.sum(1, keepdim=True)
        masked_BL = torch.where(draft_B[:, None], in_draft_BL, masked_BL)
        weight_BL = torch.where(draft_B[:, None], share_BL, weight_BL).float()
        end_B = torch.where(draft_B, start_B + longest, end_B)
        return tokens_BL, masked_BL, weight_BL, end_B, draft_B

    def loss(self, network: PreTrainedModel, *batch: Tensor) -> Tensor:
        tokens_BL, masked_BL, weight_BL, end_B, draft_B = batch
        logits_BLV = self.logits(network, tokens_BL, masked_BL, end_B)
        return self.distilled_loss(
            logits_BLV, tokens_BL, weight_BL, masked_BL, draft_B, self.mask_token
        )

    def held_out(self) -> MaskedObjective:
        """The bound on whole sequences, as for any masked model."""
        return _undistilled(self, MaskedObjective).held_out()


@dataclass(frozen=True)
class DistilBlockObjective(Distillation, BlockObjective):
    """Which part of a batch is taught to a block model: to go from left to right, and to draft a
    block after text that it read from left to right."""

    taught: float = 0.5  # share of sequences whose labels are the teacher's laws
    # share of those that are drafts of blocks, masked whole; the others go from left to right
    drafts: float = 0.5

    def __post_init__(self) -> None:
        BlockObjective.__post_init__(self)
        Distillation.__post_init__(self)
        for name in ("taught", "drafts"):
            check_between(name, getattr(self, name))

    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        size, length = tokens_BL.shape
        plain = BlockObjective.prepare(self, tokens_BL, rng, step)
        tokens_BL, seen_BL, block_BL, causal_B, weight_BL = plain
        taught_B = torch.from_numpy(rng.random(size) < self.taught)
        size_B = np.where(rng.random(size) < self.drafts, rng.choice(self.sizes_at(step), size), 1)
        offset_B = rng.integers(0, size_B)
        place_BL = np.arange(length) + offset_B[:, None]
        share_BL = self.discount ** (place_BL % size_B[:, None])
        share_BL[:, 0] = 0  # the teacher has no law of the first token
        share_BL /= share_BL.sum(1, keepdims=True)
        taught_block_BL = torch.from_numpy(place_BL // size_B[:, None])
        seen_BL = torch.where(taught_B[:, None], self.mask_token, seen_BL)
        block_BL = torch.where(taught_B[:, None], taught_block_BL, block_BL)
        weight_BL = torch.where(taught_B[:, None], torch.from_numpy(share_BL), weight_BL).float()
        return tokens_BL, seen_BL, block_BL, causal_B | taught_B, weight_BL, taught_B

    def loss(self, network: PreTrainedModel, *batch: Tensor) -> Tensor:
        tokens_BL, seen_BL, block_BL, causal_B, weight_BL, taught_B = batch
        logits_BLV = self.logits(network, tokens_BL, seen_BL, block_BL, causal_B)
        return self.distilled_loss(
            logits_BLV, tokens_BL, weight_BL, weight_BL > 0, taught_B, self.mask_token
        )

    def held_out(self) -> BlockObjective:
        """The bound in blocks of the largest size, as for any block model."""
        return _undistilled(self, BlockObjective).held_out()


def _undistilled(objective: PlainT, plain: type[PlainT]) -> PlainT:
    """The objective without its teacher: the same options in the class that it distils."""
    return plain(**{field.name: getattr(objective, field.name) for field in fields(plain)})


@lru_cache(maxsize=1)
def load_teacher(name: str) -> PreTrainedModel:
    """The target's network, frozen."""
    return load_network(name).eval().requires_grad_(False)
