"""The loss of block diffusion models (Arriola et al., 2025): every masked token of a block given
its block and all before it.

B sequences, L tokens, 2L rows: the clean text, then the same text with some tokens masked. A clean
row sees the clean blocks up to its own; a masked row's block sees itself and the clean blocks
before it. So one forward trains every block of a text. At time t each token of a block is masked
with probability t and counts 1/t. Blocks of one token, always masked, are left-to-right decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadOption
from forerun.options import check_between, check_flag, check_whole
from forerun.train.base import FamilySettings, TextObjective, without_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class BlockObjective(TextObjective):
    """Which blocks there are, how much of them is masked, and how the text before them is read."""

    mask_token: int = 1
    # block sizes, one per sequence; the largest is the model's own
    sizes: tuple[int, ...] = (4, 8, 16, 32)
    curriculum: int = 0  # steps over which the larger sizes join the smallest, one after the other
    rates: tuple[float, float] = (0.1, 1.0)  # of masking: uniform between the two for every block
    whole: float = 0.1  # share of blocks that are masked whole, as decoding meets them first
    ar: float = 0.1  # share of sequences in blocks of one token
    # share of sequences whose clean text is read token by token, with blocks that begin anywhere
    causal: float = 0.0
    shifted: bool = False  # does a row predict the token after its own?
    # share of sequences with wrong tokens among the visible ones; every visible token is then
    # predicted too
    edits: float = 0.0
    edited: float = 0.2  # share of visible tokens that are wrong there, at most
    # sequences come in pairs of the same blocks: what one of them masks, the other shows, so that
    # every token counts once (Fast-dLLM v2)
    complementary: bool = False

    def __post_init__(self) -> None:
        for name in ("sizes", "rates"):
            if not isinstance(getattr(self, name), list | tuple):
                raise BadOption(f"{name}={getattr(self, name)!r} must be a list.")
        object.__setattr__(self, "sizes", tuple(sorted(self.sizes)))
        object.__setattr__(self, "rates", tuple(self.rates))
        for size in self.sizes or (0,):
            check_whole("sizes", size)
        check_whole("curriculum", self.curriculum, least=0)
        for name in ("whole", "ar", "causal", "edits", "edited"):
            check_between(name, getattr(self, name))
        check_flag("shifted", self.shifted)
        check_flag("complementary", self.complementary)
        if self.complementary and (self.ar or self.edits):
            raise BadOption("complementary=True masks every token once: set ar=0 and edits=0.")
        if self.edits and self.shifted:
            raise BadOption(
                f"edits={self.edits:g} needs rows that predict their own tokens: shifted must be "
                "False."
            )
        if len(self.rates) != 2 or not 0 < self.rates[0] <= self.rates[1] <= 1:
            raise BadOption(
                f"rates={self.rates!r} must be two masking rates, 0 < low <= high <= 1."
            )

    @property
    def family_settings(self) -> FamilySettings:
        return {
            "family": "block",
            "mask_token": self.mask_token,
            "block": self.sizes[-1],
            "shifted": self.shifted,
        }

    def sizes_at(self, step: int) -> tuple[int, ...]:
        """The block sizes that have joined by a training step."""
        if step >= self.curriculum:
            return self.sizes
        return self.sizes[: 1 + step * len(self.sizes) // self.curriculum]

    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        size, length = tokens_BL.shape
        if length < self.sizes[-1]:
            raise BadOption(
                f"sizes={list(self.sizes)} has a block longer than context={length}: nothing would "
                "train it."
            )
        if self.complementary:
            return self._prepare_pairs(tokens_BL, rng, step)
        one_B = rng.random(size) < self.ar
        causal_B = one_B | (rng.random(size) < self.causal)
        size_B = np.where(one_B, 1, rng.choice(self.sizes_at(step), size))
        # a block may begin anywhere in causal text
        offset_B = np.where(causal_B, rng.integers(0, size_B), 0)
        block_BL = (np.arange(length) + offset_B[:, None]) // size_B[:, None]
        rate_BL = np.take_along_axis(self._rates(rng, size, length), block_BL, 1)
        rate_BL[one_B] = 1.0
        masked_BL = rng.random((size, length)) < rate_BL
        if self.shifted:
            masked_BL[:, 0] = False  # no row predicts the first token
        weight_BL = (masked_BL / rate_BL / length).astype(np.float32)
        seen_BL = np.where(masked_BL, self.mask_token, tokens_BL.numpy())
        if self.edits:
            seen_BL, weight_BL = self._edit(rng, tokens_BL.numpy(), masked_BL, seen_BL, weight_BL)
        drawn = (seen_BL, block_BL, causal_B, weight_BL)
        return (tokens_BL, *(torch.from_numpy(array) for array in drawn))

    def _prepare_pairs(
        self, tokens_BL: Tensor, rng: np.random.Generator, step: int
    ) -> tuple[Tensor, ...]:
        """Every second sequence is the one before it, with the other tokens masked."""
        if len(tokens_BL) % 2:
            raise BadOption(f"complementary=True needs an even batch, not {len(tokens_BL)}.")
        one = replace(self, complementary=False).prepare(tokens_BL[::2], rng, step)
        text_BL, seen_BL, block_BL, causal_B, weight_BL = (x.repeat_interleave(2, 0) for x in one)
        masked_BL = weight_BL > 0
        masked_BL[1::2] = ~masked_BL[1::2]
        if self.shifted:
            masked_BL[:, 0] = False
        seen_BL = torch.where(masked_BL, self.mask_token, text_BL)
        weight_BL = masked_BL.float() * (2 / text_BL.shape[1])
        return text_BL, seen_BL, block_BL, causal_B, weight_BL

    def _edit(
        self,
        rng: np.random.Generator,
        tokens_BL: np.ndarray,
        masked_BL: np.ndarray,
        seen_BL: np.ndarray,
        weight_BL: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """What is seen and what counts, with wrong tokens in some sequences. The wrong ones are
        other tokens of the batch."""
        size, length = tokens_BL.shape
        edited_B1 = rng.random((size, 1)) < self.edits
        visible_BL = edited_B1 & ~masked_BL
        wrong_BL = visible_BL & (rng.random((size, length)) < self.edited * rng.random((size, 1)))
        others_BL = rng.permuted(tokens_BL.ravel()).reshape(size, length)
        return (
            np.where(wrong_BL, others_BL, seen_BL),
            np.where(visible_BL, np.float32(1 / length), weight_BL),
        )

    def _rates(self, rng: np.random.Generator, size: int, length: int) -> np.ndarray:
        """A masking rate for every block a sequence may have, spread evenly over the batch."""
        low, high = self.rates
        even_BL = rng.permuted(
            (np.arange(size)[:, None] + rng.random((size, length + 1))) / size, axis=0
        )
        return np.where(
            rng.random((size, length + 1)) < self.whole, 1.0, low + (high - low) * even_BL
        )

    def loss(self, network: PreTrainedModel, *batch: Tensor) -> Tensor:
        tokens_BL, seen_BL, block_BL, causal_B, weight_BL = batch
        logits_BLV = self.logits(network, tokens_BL, seen_BL, block_BL, causal_B)
        loss_BL = F.cross_entropy(
            logits_BLV.flatten(0, 1), tokens_BL.flatten(), reduction="none"
        ).view_as(tokens_BL)
        return (loss_BL * weight_BL).sum() / len(tokens_BL)

    def logits(
        self,
        network: PreTrainedModel,
        tokens_BL: Tensor,
        seen_BL: Tensor,
        block_BL: Tensor,
        causal_B: Tensor,
    ) -> Tensor:
        """What the network predicts for every token, given its block as it is seen and the clean
        text before it."""
        length = tokens_BL.shape[1]
        position_L = torch.arange(length, device=tokens_BL.device)
        logits_BRV = network(
            input_ids=torch.cat([tokens_BL, seen_BL], 1),
            position_ids=position_L.repeat(2).expand(len(tokens_BL), -1),
            attention_mask=clean_and_masked(block_BL, causal_B)[:, None],
            logits_to_keep=0 if self.shifted else length,
            use_cache=False,
        ).logits
        logits_BLV = from_row_before(logits_BRV, block_BL) if self.shifted else logits_BRV
        return without_token(logits_BLV, self.mask_token)

    def held_out(self) -> BlockObjective:
        """The bound in blocks of the largest size, at the recipe's masking rates."""
        return replace(
            self,
            sizes=self.sizes[-1:],
            curriculum=0,
            ar=0.0,
            causal=0.0,
            whole=0.0,
            edits=0.0,
            complementary=False,
        )


def clean_and_masked(block_BL: Tensor, causal_B: Tensor) -> Tensor:
    """[B, 2L, 2L]: which rows see which.

    Clean rows see the clean rows up to the end of their block, or in causal text up to themselves.
    Masked rows see the clean blocks before theirs, and their own block as it is masked.
    """
    length = block_BL.shape[1]
    mine = block_BL[:, :, None]
    theirs = block_BL[:, None, :]
    up_to_itself = torch.ones(length, length, dtype=torch.bool, device=block_BL.device).tril()
    clean = torch.where(causal_B[:, None, None], up_to_itself, theirs <= mine)
    nothing = torch.zeros_like(clean)
    clean_rows = torch.cat([clean, nothing], 2)
    masked_rows = torch.cat([theirs < mine, theirs == mine], 2)
    return torch.cat([clean_rows, masked_rows], 1)


def from_row_before(logits_BRV: Tensor, block_BL: Tensor) -> Tensor:
    """What the row before each token predicts: the masked row of the same block, or for a block's
    first token the clean row."""
    clean_BLV, masked_BLV = logits_BRV.chunk(2, 1)
    first_B1 = torch.ones_like(block_BL[:, :1], dtype=torch.bool)
    begins_BL = torch.cat([first_B1, block_BL[:, 1:] != block_BL[:, :-1]], 1)
    return torch.where(begins_BL[..., None], clean_BLV.roll(1, 1), masked_BLV.roll(1, 1))
