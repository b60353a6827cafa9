"""The loss of masked diffusion models: the continuous-time bound of Sahoo et al. (2024), every masked token given all that is not.

B sequences, L tokens. Of every sequence a region [start, end) is being generated: before it all is given, behind it nothing is.
At time t each token of the region is masked with probability t, and counts 1/t: the negative bound on its log-likelihood under the
linear schedule (SUBS: given tokens are given, and a mask is never predicted).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadOption
from forerun.train.base import Objective


@dataclass(frozen=True)
class Masked(Objective):
    """Which tokens are masked, and what they may look at."""

    mask_token: int = 1
    suffix: float = 0.5  # share of sequences that are a given prefix and a region after it, as drafts and completions are
    longest: int = 64  # tokens of such a region at most
    whole: float = 0.0  # share of those regions that are masked whole (t = 1), as a one-step draft meets them
    least: float = 0.02  # of t: below it the weight 1/t is mostly noise

    def __post_init__(self) -> None:
        for name in ("suffix", "whole"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadOption(f"{name}={getattr(self, name)!r} must lie between 0 and 1.")
        if not 0 < self.least < 1:
            raise BadOption(f"least={self.least!r} must lie between 0 and 1.")

    @property
    def marks(self) -> dict[str, Any]:
        return {"family": "masked", "mask_token": self.mask_token}

    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        size, length = tokens_BL.shape
        start_B, end_B = self._regions(rng, size, length)
        # One draw from each of B equal parts of the range, so that every batch covers it evenly.
        t_B = self.least + (1 - self.least) * rng.permutation((np.arange(size) + rng.random(size)) / size)
        t_B[(start_B > 0) & (rng.random(size) < self.whole)] = 1.0
        index_L = np.arange(length)
        region_BL = (index_L >= start_B[:, None]) & (index_L < end_B[:, None])
        masked_BL = region_BL & (rng.random((size, length)) < t_B[:, None])
        # Nats per token of the region, a sequence as good as any other.
        weight_BL = masked_BL / t_B[:, None] / (end_B - start_B)[:, None]
        return tokens_BL, torch.from_numpy(masked_BL), torch.from_numpy(weight_BL.astype(np.float32)), torch.from_numpy(end_B)

    def _regions(self, rng: np.random.Generator, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        start_B, end_B = np.zeros(size, np.int64), np.full(size, length)
        for b in np.flatnonzero(rng.random(size) < self.suffix):
            region = int(rng.integers(1, min(self.longest, length - 1) + 1))
            start_B[b] = int(rng.integers(1, length - region + 1))
            end_B[b] = start_B[b] + region
        return start_B, end_B

    def loss(self, network: Any, *batch: Tensor) -> Tensor:
        tokens_BL, masked_BL, weight_BL, end_B = batch
        logits_BLV = self.logits(network, tokens_BL, masked_BL, end_B)
        loss_BL = F.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL.flatten(), reduction="none").view_as(tokens_BL)
        return (loss_BL * weight_BL).sum() / len(tokens_BL)

    def logits(self, network: Any, tokens_BL: Tensor, masked_BL: Tensor, end_B: Tensor) -> Tensor:
        """What the network says of every token: it sees all that is not masked, up to the end."""
        seen_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device) < end_B[:, None]
        logits_BLV = network(
            input_ids=torch.where(masked_BL, self.mask_token, tokens_BL),
            attention_mask=seen_BL[:, None, None].expand(-1, 1, tokens_BL.shape[1], -1),
            use_cache=False,
        ).logits
        return logits_BLV.float().index_fill(-1, torch.tensor([self.mask_token], device=logits_BLV.device), -1e9)

    def held_out(self) -> Masked:
        """The bound on whole sequences."""
        return replace(self, suffix=0.0)
