"""What an objective is.

It has two pure steps. `prepare` draws everything random for a whole batch from the generator it
gets, so a resumed run and several processes see the same batch. `loss` is a function of a network
and a share of that batch.

B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun.train.data import Corpus, TokenSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKPOINT = "checkpoint.pt"  # what a run resumes from, in its folder
SHARDS = "checkpoint"  # the same for a network that is spread over processes: a folder


def was_begun(out: Path) -> bool:
    """Is there something to resume from? Its network is no longer the one it began with."""
    return (out / CHECKPOINT).exists() or (out / SHARDS / "latest.json").exists()


BatchT = TypeVar("BatchT")


class FamilySettings(TypedDict, total=False):
    """What a checkpoint's config says under `forerun`, so that loading finds the family."""

    family: str
    mask_token: int
    block: int  # the largest block size of a block model
    shifted: bool  # does a row of a block model predict the token after its own?


@dataclass(frozen=True)
class Objective(ABC, Generic[BatchT]):
    """Trains on batches of the type `BatchT`. Its fields are the options that a recipe may set."""

    @property
    def family_settings(self) -> FamilySettings:
        """Empty for a left-to-right model: it loads without them."""
        return {}

    @abstractmethod
    def gather(
        self, corpus: Corpus, network: PreTrainedModel, context: int, seed: int, out: Path
    ) -> TokenSource[BatchT]:
        """The text to train on, made before training begins. Text that a model writes for it is
        kept in files under `out`, where a resumed run finds it."""

    @abstractmethod
    def prepare(self, batch: BatchT, rng: np.random.Generator, step: int) -> tuple[Tensor, ...]:
        """Everything that `loss` needs, batch first."""

    @abstractmethod
    def loss(self, network: PreTrainedModel, *batch: Tensor) -> Tensor:
        """Nats per predicted token. The mean over equal shares of a batch is the loss of the whole
        batch."""

    @abstractmethod
    def held_out(self) -> TextObjective:
        """The objective that is measured on held-out text, without what serves training only."""


class TextObjective(Objective[Tensor]):
    """Trains on windows of text: [B, L] tokens."""

    def gather(
        self, corpus: Corpus, network: PreTrainedModel, context: int, seed: int, out: Path
    ) -> TokenSource[Tensor]:
        return corpus

    def held_out(self) -> TextObjective:
        return self


def without_token(logits: Tensor, token: int) -> Tensor:
    """Logits [..., V] in float32 that never predict this token."""
    return logits.float().index_fill(-1, torch.tensor([token], device=logits.device), -1e9)
