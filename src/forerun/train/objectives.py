"""The objectives by name. B sequences, L tokens, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadOption, unknown
from forerun.train.any_subset import AnySubset
from forerun.train.base import Objective
from forerun.train.block import Block
from forerun.train.consistency import Consistency
from forerun.train.distil import DistilBlock, DistilDrafter
from forerun.train.masked import Masked


@dataclass(frozen=True)
class Autoregressive(Objective):
    """Every token given those before it."""

    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        return (tokens_BL,)

    def loss(self, network: Any, *batch: Tensor) -> Tensor:
        [tokens_BL] = batch
        logits_BLV = network(tokens_BL[:, :-1]).logits
        return F.cross_entropy(logits_BLV.flatten(0, 1).float(), tokens_BL[:, 1:].flatten())


OBJECTIVES: dict[str, Any] = {
    "ar": Autoregressive,
    "any-subset": AnySubset,
    "masked": Masked,
    "distil-drafter": DistilDrafter,
    "consistency": Consistency,
    "block": Block,
    "distil-block": DistilBlock,
}


def make(name: str, options: dict[str, Any]) -> Objective:
    """The objective that a recipe names, with its options; an unknown one is refused."""
    if name not in OBJECTIVES:
        raise unknown("objective", name, OBJECTIVES)
    kind = OBJECTIVES[name]
    for key in options:
        if key not in {f.name for f in fields(kind)}:
            raise unknown(f"option of objective {name!r}", key, [f.name for f in fields(kind)])
    try:
        return kind(**options)
    except TypeError as error:
        raise BadOption(f"options of objective {name!r}: {error}") from error
