"""The joint loss of any-subset models (Guo & Ermon, equation 7): every blank given the prompt and
the blanks before it.

B sequences, L tokens, R = 2L rows: L content rows in decoding order, prompt first, then L query
rows (mask tokens), one per content row. A row's position is where its token stands in the text. The
attention mask is the one that the family's rows have at decoding time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.errors import BadOption
from forerun.train.base import FamilySettings, TextObjective, without_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class AnySubsetObjective(TextObjective):
    """Which tokens are given, and how the blanks are ordered and asked for."""

    mask_token: int = 1
    # share of a sequence that is blank: uniform between the two
    masked: tuple[float, float] = (0.01, 0.99)
    masked_start: float | None = None  # with a warm-up: the share that training begins at
    # steps over which both ends of the range move from there to `masked`
    masked_warmup: int = 0
    # share of sequences whose blanks are one to three runs; in the others they are scattered
    spans: float = 0.5
    # share of queries asked before their turn, as a draft asks: they do not know the blanks just
    # before them
    ahead: float = 0.0
    ahead_most: int = 8  # how many blanks such a query skips at most
    # the N! ablation: blanks in random order instead of left to right
    any_permutation: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "masked", tuple(self.masked))
        low, high = self.masked
        if not 0 <= low <= high <= 1 or high == 0:
            raise BadOption(f"masked={self.masked!r} must be two shares, 0 <= low <= high <= 1.")
        for name in ("spans", "ahead"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadOption(f"{name}={getattr(self, name)!r} must lie between 0 and 1.")
        if self.masked_warmup and self.masked_start is None:
            raise BadOption(
                f"masked_warmup={self.masked_warmup} needs masked_start, the share to begin at."
            )

    @property
    def family_settings(self) -> FamilySettings:
        return {"family": "any-subset", "mask_token": self.mask_token}

    def masked_range(self, step: int) -> tuple[float, float]:
        """Both ends of the masked share at a training step."""
        if self.masked_start is None or step >= self.masked_warmup:
            return self.masked
        low, high = (
            self.masked_start + (end - self.masked_start) * step / self.masked_warmup
            for end in self.masked
        )
        return low, high

    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        size, length = tokens_BL.shape
        known_B = prompt_lengths(rng, size, length, *self.masked_range(step))
        order_BL = np.stack([self._order(rng, int(known), length) for known in known_B])
        rank_L = np.arange(length)
        skipped_BL = rng.integers(1, self.ahead_most + 1, (size, length))
        skipped_BL *= rng.random((size, length)) < self.ahead
        horizon_BL = np.maximum(rank_L - skipped_BL, known_B[:, None])
        blanks_B = np.full(size, (length - known_B).mean(), np.float32)
        drawn = (order_BL, known_B, horizon_BL, blanks_B)
        return (tokens_BL, *(torch.from_numpy(array) for array in drawn))

    def _order(self, rng: np.random.Generator, known: int, length: int) -> np.ndarray:
        """Positions in the order in which they are decided: the prompt, then the blanks from left
        to right (equation 4)."""
        if rng.random() < self.spans:
            blank = runs(rng, length - known, length)
        else:
            blank = np.ones(length, bool)
            blank[rng.choice(length, known, replace=False)] = False
        order = np.argsort(blank, kind="stable")
        if self.any_permutation:
            rng.shuffle(order[known:])
        return order

    def loss(self, network: PreTrainedModel, *batch: Tensor) -> Tensor:
        tokens_BL, order_BL, known_B, horizon_BL, blanks_B = batch
        if is_xlnet(network):
            return self._xlnet_loss(network, tokens_BL, order_BL, known_B, blanks_B)
        length = tokens_BL.shape[1]
        content_BL = tokens_BL.gather(1, order_BL)
        logits_BLV = network(
            input_ids=torch.cat([content_BL, torch.full_like(content_BL, self.mask_token)], 1),
            position_ids=torch.cat([order_BL, order_BL], 1),
            attention_mask=two_streams(known_B, horizon_BL)[:, None],
            logits_to_keep=length,
            use_cache=False,
        ).logits
        loss_BL = F.cross_entropy(
            logits_BLV.flatten(0, 1).float(), content_BL.flatten(), reduction="none"
        ).view_as(content_BL)
        blank_BL = torch.arange(length, device=tokens_BL.device) >= known_B[:, None]
        return (loss_BL * blank_BL).sum() / blanks_B.sum()

    def _xlnet_loss(
        self,
        network: PreTrainedModel,
        tokens_BL: Tensor,
        order_BL: Tensor,
        known_B: Tensor,
        blanks_B: Tensor,
    ) -> Tensor:
        """The same by XLNet's own two streams, at the positions of the text. A query that would
        see nothing counts nothing: under the library's mask it would look at everything."""
        if self.ahead:
            raise BadOption(f"ahead={self.ahead:g}: XLNet's queries see what its content sees.")
        length = tokens_BL.shape[1]
        rank_BL = order_BL.argsort(1)
        given_BL = rank_BL < known_B[:, None]
        sees_BLL = rank_BL[:, None] < rank_BL[:, :, None]
        sees_BLL = sees_BLL | (given_BL[:, None] & given_BL[:, :, None])
        every_LL = torch.eye(length, device=tokens_BL.device)
        logits_BLV = network(
            input_ids=tokens_BL,
            perm_mask=(~sees_BLL).float(),
            target_mapping=every_LL.expand(len(tokens_BL), -1, -1),
            use_mems=False,
        ).logits
        loss_BL = F.cross_entropy(
            without_token(logits_BLV, self.mask_token).flatten(0, 1),
            tokens_BL.flatten(),
            reduction="none",
        ).view_as(tokens_BL)
        return (loss_BL * (~given_BL & (rank_BL > 0))).sum() / blanks_B.sum()

    def held_out(self) -> AnySubsetObjective:
        return replace(self, ahead=0.0)


def is_xlnet(network: nn.Module) -> bool:
    """Is it an XLNet, whatever wraps it?"""
    while isinstance(inner := getattr(network, "module", None), nn.Module):
        network = inner
    return getattr(getattr(network, "config", None), "model_type", None) == "xlnet"


def prompt_lengths(
    rng: np.random.Generator, size: int, length: int, low: float, high: float
) -> np.ndarray:
    """How many tokens of each sequence are given. One draw from each of `size` equal parts of the
    range lets every batch cover it evenly (appendix E.1). At least one token is left to predict."""
    shares = low + (high - low) * rng.permutation((np.arange(size) + rng.random(size)) / size)
    return np.clip(length - np.round(shares * length).astype(np.int64), 0, length - 1)


def runs(rng: np.random.Generator, blanks: int, length: int) -> np.ndarray:
    """Blanks in one to three runs at random places. Runs may touch the ends or each other."""
    count = int(rng.integers(1, 4))
    cuts = np.sort(rng.integers(0, blanks + 1, count - 1))
    sizes = np.diff([0, *cuts, blanks])
    gaps = np.diff([0, *np.sort(rng.integers(0, length - blanks + 1, count))])
    blank = np.zeros(length, bool)
    start = 0
    for gap, run in zip(gaps, sizes, strict=True):
        start += gap
        blank[start : start + run] = True
        start += run
    return blank


def two_streams(known_B: Tensor, horizon_BL: Tensor) -> Tensor:
    """[B, 2L, 2L]: which rows see which.

    Content rows see the whole prompt, all rows before them, and themselves. A query sees the
    content rows below its horizon, and itself. No other row sees a query.
    """
    size, length = horizon_BL.shape
    index_L = torch.arange(length, device=horizon_BL.device)
    content_BL = torch.maximum(index_L + 1, known_B[:, None])
    horizon_BR = torch.cat([content_BL, horizon_BL], 1)
    sees_content = index_L < horizon_BR[..., None]
    itself = torch.eye(length, dtype=torch.bool, device=horizon_BL.device)
    sees_query = torch.cat([torch.zeros_like(itself), itself]).expand(size, -1, -1)
    return torch.cat([sees_content, sees_query], -1)
