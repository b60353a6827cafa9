"""What is minimised. An objective has two pure steps: `prepare` draws everything random for a whole batch from the generator it is
given, so that a resumed run and several processes see the same; `loss` is a function of a network and a share of that batch.

B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadOption, unknown
from forerun.train.any_subset import AnySubset
from forerun.train.masked import Masked


class Objective(Protocol):
    @property
    def marks(self) -> dict[str, Any]:
        """What the trained network's config must say, so that loading it finds its family."""

    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        """Everything that `loss` needs, batch first."""

    def loss(self, network: Any, *batch: Tensor) -> Tensor:
        """Nats per predicted token; the mean over equal shares of a batch is the loss of the whole."""

    def held_out(self) -> Objective:
        """The objective as it is measured on held-out text: without what serves training only."""


@dataclass(frozen=True)
class Autoregressive:
    """Every token given those before it."""

    marks: ClassVar[dict[str, Any]] = {}

    def prepare(self, tokens_BL: Tensor, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        return (tokens_BL,)

    def loss(self, network: Any, *batch: Tensor) -> Tensor:
        [tokens_BL] = batch
        logits_BLV = network(tokens_BL[:, :-1]).logits
        return F.cross_entropy(logits_BLV.flatten(0, 1).float(), tokens_BL[:, 1:].flatten())

    def held_out(self) -> Objective:
        return self


OBJECTIVES: dict[str, Any] = {"ar": Autoregressive, "any-subset": AnySubset, "masked": Masked}


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
