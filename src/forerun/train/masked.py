"""The loss of masked diffusion models: the continuous-time bound of Sahoo et al. (2024), every
masked token given all tokens that are not masked.

B sequences, L tokens. In every sequence a region [start, end) is generated: all before it is given,
nothing behind it is. At time t each token of the region is masked with probability t, and counts
1/t: the negative bound on its log-likelihood under the linear schedule (SUBS: given tokens stay as
they are, and a mask is never predicted).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadOption
from forerun.options import check_flag
from forerun.train.base import FamilySettings, TextObjective, without_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MaskedObjective(TextObjective):
    """Which tokens are masked, and what they may look at."""

    mask_token: int = 1
    # share of sequences that are a given prefix and a region after it, like drafts and completions
    suffix: float = 0.5
    longest: int = 64  # tokens of such a region at most
    # share of those regions that are masked whole (t = 1), as a one-step draft meets them
    whole: float = 0.0
    least: float = 0.02  # of t: below it the weight 1/t is mostly noise
    shifted: bool = False  # does a row predict the token after its own, as in Dream?

    def __post_init__(self) -> None:
        for name in ("suffix", "whole"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadOption(f"{name}={getattr(self, name)!r} must lie between 0 and 1.")
        check_flag("shifted", self.shifted)
        if not 0 < self.least < 1:
            raise BadOption(f"least={self.least!r} must lie between 0 and 1.")

    @property
    def family_settings(self) -> FamilySettings:
        settings: FamilySettings = {"family": "masked", "mask_token": self.mask_token}
        return {**settings, "shifted": True} if self.shifted else settings

    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        size, length = tokens_BL.shape
        start_B, end_B = self._regions(rng, size, length)
        # One draw from each of B equal parts of the range, so that every batch covers it evenly.
        even_B = rng.permutation((np.arange(size) + rng.random(size)) / size)
        t_B = self.least + (1 - self.least) * even_B
        t_B[(start_B > 0) & (rng.random(size) < self.whole)] = 1.0
        index_L = np.arange(length)
        region_BL = (index_L >= start_B[:, None]) & (index_L < end_B[:, None])
        masked_BL = region_BL & (rng.random((size, length)) < t_B[:, None])
        if self.shifted:
            masked_BL[:, 0] = False  # no row predicts the first token
        # Nats per token of the region: every sequence counts the same.
        weight_BL = masked_BL / t_B[:, None] / (end_B - start_B)[:, None]
        return (
            tokens_BL,
            torch.from_numpy(masked_BL),
            torch.from_numpy(weight_BL.astype(np.float32)),
            torch.from_numpy(end_B),
        )

    def _regions(
        self, rng: np.random.Generator, size: int, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where the region of each sequence starts and ends."""
        start_B = np.zeros(size, np.int64)
        end_B = np.full(size, length)
        for b in np.flatnonzero(rng.random(size) < self.suffix):
            region = int(rng.integers(1, min(self.longest, length - 1) + 1))
            start_B[b] = int(rng.integers(1, length - region + 1))
            end_B[b] = start_B[b] + region
        return start_B, end_B

    def loss(self, network: PreTrainedModel, *batch: Tensor) -> Tensor:
        tokens_BL, masked_BL, weight_BL, end_B = batch
        logits_BLV = self.logits(network, tokens_BL, masked_BL, end_B)
        loss_BL = F.cross_entropy(
            logits_BLV.flatten(0, 1), tokens_BL.flatten(), reduction="none"
        ).view_as(tokens_BL)
        return (loss_BL * weight_BL).sum() / len(tokens_BL)

    def logits(
        self, network: PreTrainedModel, tokens_BL: Tensor, masked_BL: Tensor, end_B: Tensor
    ) -> Tensor:
        """What the network predicts for every token. It sees all that is not masked, up to the
        end."""
        seen_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device) < end_B[:, None]
        logits_BLV = network(
            input_ids=torch.where(masked_BL, self.mask_token, tokens_BL),
            attention_mask=seen_BL[:, None, None].expand(-1, 1, tokens_BL.shape[1], -1),
            use_cache=False,
        ).logits
        if self.shifted:
            logits_BLV = logits_BLV.roll(1, 1)
        return without_token(logits_BLV, self.mask_token)

    def held_out(self) -> MaskedObjective:
        """The bound on whole sequences."""
        return replace(self, suffix=0.0)
