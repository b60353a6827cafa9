"""What an objective is. It has two pure steps: `prepare` draws everything random for a whole batch from the generator it is given,
so that a resumed run and several processes see the same; `loss` is a function of a network and a share of that batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor


class Objective(ABC):
    @property
    def marks(self) -> dict[str, Any]:
        """What the trained network's config must say, so that loading it finds its family."""
        return {}

    def gather(self, corpus: Any, network: Any, context: int, seed: int, out: Path) -> Any:
        """The text to train on, made from the corpus before training begins, where it takes what a model wrote: this network as it
        is then, or another. Kept in files under `out`, so that a resumed run finds it."""
        return corpus

    @abstractmethod
    def prepare(self, tokens_BL: Any, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        """Everything that `loss` needs, batch first."""

    @abstractmethod
    def loss(self, network: Any, *batch: Tensor) -> Tensor:
        """Nats per predicted token; the mean over equal shares of a batch is the loss of the whole."""

    def held_out(self) -> Objective:
        """The objective as it is measured on held-out text: without what serves training only."""
        return self


def network_of(name: str) -> Any:
    """A checkpoint's network in float32: a directory, a hub id, 'smollm' or zoo:NAME, each also with '+FOLDER' of adapters."""
    import torch

    from forerun import zoo
    from forerun.checkpoints import causal

    base, adapters = causal.split_adapters(name)
    if base.startswith("zoo:"):
        network = zoo.load(base.removeprefix("zoo:"), torch.float32, "cpu")[0]
    else:
        network = causal.load_weights(causal.find(base), torch.device("cpu"), torch.float32)
    return causal.with_adapters(network, adapters) if adapters else network
