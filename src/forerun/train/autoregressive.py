"""The loss of left-to-right models: every token given those before it.

B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from forerun.train.base import TextObjective

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class AutoregressiveObjective(TextObjective):
    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        return (tokens_BL,)

    def loss(self, network: PreTrainedModel, *batch: Tensor) -> Tensor:
        [tokens_BL] = batch
        logits_BLV = network(tokens_BL[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits_BLV.flatten(0, 1).float(), tokens_BL[:, 1:].flatten())
