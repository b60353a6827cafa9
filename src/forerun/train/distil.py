"""Distilling: a model that fills blanks learns what a left-to-right target says, on text that the target wrote itself.

A draft is a prefix and then masks alone, so a token of it has the target's law averaged over what may stand between. Of a batch,
a share are such drafts: of real text and of the target's own samples, judged by the target's logits. The rest is plain training,
so that the model keeps filling blanks anywhere. A block model is taught to go from left to right as well, in blocks of one token.

B sequences, L tokens, M masked tokens of all drafts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadOption
from forerun.parameters import check_between, check_whole
from forerun.train.base import network_of
from forerun.train.block import Block
from forerun.train.data import Corpus, Mixed
from forerun.train.masked import Masked
from forerun.train.samples import write_samples


@dataclass(frozen=True)
class Taught:
    """Whose law is taught, and how much text it writes for that."""

    teacher: str = "zoo:ar"  # the target: a left-to-right checkpoint with the same tokens
    discount: float = 0.9  # every token of a draft weighs so much of the one before: nothing behind a rejected token counts
    samples: int = 16384  # sequences that the teacher writes before training begins
    sampled: float = 0.6  # share of every batch that is taken from them
    temperatures: tuple[float, ...] = (0.0, 1.0)  # at which it writes, in equal parts

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", tuple(self.temperatures))
        for name in ("sampled", "discount"):
            check_between(name, getattr(self, name))
        check_whole("samples", self.samples, least=0)
        if self.sampled and (not self.samples or not self.temperatures or min(self.temperatures) < 0):
            raise BadOption(f"sampled={self.sampled} needs samples above 0 and temperatures of 0 or more.")

    def gather(self, corpus: Corpus, network: Any, context: int, seed: int, out: Path) -> Corpus | Mixed:
        """The corpus with what the teacher writes after prefixes of it."""
        if not self.sampled:
            return corpus
        file = write_samples(teacher(self.teacher), corpus, self.samples, context, self.temperatures, seed, out / "samples")
        return Mixed(corpus, np.load(file)["tokens"], self.sampled)

    @torch.no_grad()
    def target_laws(self, tokens_BL: Tensor, taught_BL: Tensor, vocab: int, mask_token: int) -> Tensor:
        """What the teacher says of some tokens, given all before them: the row before a token speaks of it. A student that was
        given a mask has a token more than its teacher."""
        device = tokens_BL.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits_BLV = teacher(self.teacher).to(device)(tokens_BL, use_cache=False).logits
        logits_MV = logits_BLV[:, :-1][taught_BL[:, 1:]].float()
        logits_MV = F.pad(logits_MV, (0, max(0, vocab - logits_MV.shape[-1])), value=-1e9)[:, :vocab]
        return logits_MV.index_fill(-1, torch.tensor([mask_token], device=device), -1e9).softmax(-1)


@dataclass(frozen=True)
class DistilDrafter(Taught, Masked):
    """What of a batch is a draft of a masked model."""

    drafts: float = 0.6  # share of sequences that are drafts
    draft_longest: int = 16  # tokens of a draft, at most

    def __post_init__(self) -> None:
        Masked.__post_init__(self)
        Taught.__post_init__(self)
        check_between("drafts", self.drafts)
        check_whole("draft_longest", self.draft_longest)

    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        size, length = tokens_BL.shape
        tokens_BL, masked_BL, weight_BL, end_B = Masked.prepare(self, tokens_BL, rng, step)
        draft_B = torch.from_numpy(rng.random(size) < self.drafts)
        longest = min(self.draft_longest, length - 1)
        start_B = torch.from_numpy(rng.integers(1, length - longest + 1, size))
        ahead_BL = torch.arange(length) - start_B[:, None]  # 0 is a draft's first token
        here_BL = (ahead_BL >= 0) & (ahead_BL < longest)
        taught_BL = here_BL * self.discount ** ahead_BL.clamp(min=0)
        taught_BL = taught_BL / taught_BL.sum(1, keepdim=True)
        masked_BL = torch.where(draft_B[:, None], here_BL, masked_BL)
        weight_BL = torch.where(draft_B[:, None], taught_BL, weight_BL).float()
        return tokens_BL, masked_BL, weight_BL, torch.where(draft_B, start_B + longest, end_B), draft_B

    def loss(self, network: Any, *batch: Tensor) -> Tensor:
        tokens_BL, masked_BL, weight_BL, end_B, draft_B = batch
        logits_BLV = self.logits(network, tokens_BL, masked_BL, end_B)
        plain_BL, taught_BL = masked_BL & ~draft_B[:, None], masked_BL & draft_B[:, None]
        total = (F.cross_entropy(logits_BLV[plain_BL], tokens_BL[plain_BL], reduction="none") * weight_BL[plain_BL]).sum()
        if draft_B.any():
            p_MV = self.target_laws(tokens_BL[draft_B], masked_BL[draft_B], logits_BLV.shape[-1], self.mask_token)
            nats_M = F.cross_entropy(logits_BLV[taught_BL], p_MV, reduction="none")
            total = total + (nats_M * weight_BL[taught_BL]).sum()
        return total / len(tokens_BL)

    def held_out(self) -> Masked:
        """The bound on whole sequences, as for any masked model."""
        plain = {name: getattr(self, name) for name in Masked.__dataclass_fields__}
        return replace(Masked(**plain), suffix=0.0)


@dataclass(frozen=True)
class DistilBlock(Taught, Block):
    """What of a batch a block model is taught: to go from left to right, and to draft a block after text that it read that way."""

    taught: float = 0.5  # share of sequences whose targets are the teacher's laws
    drafts: float = 0.5  # share of those that are drafts of blocks, masked whole; the others go from left to right

    def __post_init__(self) -> None:
        Block.__post_init__(self)
        Taught.__post_init__(self)
        for name in ("taught", "drafts"):
            check_between(name, getattr(self, name))

    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        size, length = tokens_BL.shape
        tokens_BL, seen_BL, block_BL, causal_B, weight_BL = Block.prepare(self, tokens_BL, rng, step)
        taught_B = rng.random(size) < self.taught
        size_B = np.where(rng.random(size) < self.drafts, rng.choice(self.sizes_at(step), size), 1)
        offset_B = rng.integers(0, size_B)
        place_BL = np.arange(length) + offset_B[:, None]
        share_BL = self.discount ** (place_BL % size_B[:, None])
        share_BL[:, 0] = 0  # the teacher says nothing of the first token
        share_BL /= share_BL.sum(1, keepdims=True)
        own = torch.from_numpy(taught_B)
        seen_BL = torch.where(own[:, None], self.mask_token, seen_BL)
        block_BL = torch.where(own[:, None], torch.from_numpy(place_BL // size_B[:, None]), block_BL)
        weight_BL = torch.where(own[:, None], torch.from_numpy(share_BL), weight_BL).float()
        return tokens_BL, seen_BL, block_BL, causal_B | own, weight_BL, own

    def loss(self, network: Any, *batch: Tensor) -> Tensor:
        tokens_BL, seen_BL, block_BL, causal_B, weight_BL, taught_B = batch
        logits_BLV = self.logits(network, tokens_BL, seen_BL, block_BL, causal_B)
        asked_BL = weight_BL > 0
        plain_BL, taught_BL = asked_BL & ~taught_B[:, None], asked_BL & taught_B[:, None]
        total = (F.cross_entropy(logits_BLV[plain_BL], tokens_BL[plain_BL], reduction="none") * weight_BL[plain_BL]).sum()
        if taught_B.any():
            p_MV = self.target_laws(tokens_BL[taught_B], taught_BL[taught_B], logits_BLV.shape[-1], self.mask_token)
            total = total + (F.cross_entropy(logits_BLV[taught_BL], p_MV, reduction="none") * weight_BL[taught_BL]).sum()
        return total / len(tokens_BL)

    def held_out(self) -> Block:
        """The bound in blocks of the largest size, as for any block model."""
        return Block(**{name: getattr(self, name) for name in Block.__dataclass_fields__}).held_out()


@lru_cache(maxsize=1)
def teacher(name: str) -> Any:
    """The target's network, frozen."""
    return network_of(name).eval().requires_grad_(False)
