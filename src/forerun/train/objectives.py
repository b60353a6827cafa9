"""What is minimised: pure functions of a network and a batch of tokens. B sequences, L tokens, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor


def autoregressive(network: Any, tokens_BL: Tensor) -> Tensor:
    """Mean negative log-likelihood of every token given those before it."""
    logits_BLV = network(tokens_BL[:, :-1]).logits
    return F.cross_entropy(logits_BLV.flatten(0, 1).float(), tokens_BL[:, 1:].flatten())


OBJECTIVES = {"ar": autoregressive}
