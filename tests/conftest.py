"""Shared pieces of the tests: models that need no weights, loaded once per process."""

from __future__ import annotations

import os
import signal
from functools import cache

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # our kernels run without a GPU too; Triton reads this when it is first imported

import forerun
from forerun.api import Model
from forerun.checkpoints import tiny

torch.set_num_threads(1)

ARCHITECTURES = tiny.ARCHITECTURES
PROMPTS = [[10, 20, 30, 10, 20], [7], list(range(40, 70)), [5, 5, 5, 9, 5, 5], [100, 3, 100, 3, 100]]


@cache
def network(arch: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A tiny random `transformers` model, as the library made it."""
    return tiny.build(arch, seed, dtype)


@cache
def model(arch: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, lanes: int = 8) -> Model:
    """The same weights behind our engine."""
    return forerun.from_network(
        tiny.build(arch, seed, dtype), tiny.tokenizer(), name=f"tiny:{arch}:{seed}", lanes=lanes, max_context=160
    )


def fresh(arch: str = "llama", dtype: torch.dtype = torch.float32, lanes: int = 8, seed: int = 0, **changes) -> Model:
    """A model with an engine of its own, for tests that disturb it."""
    return forerun.from_network(
        tiny.build(arch, seed, dtype, **changes), tiny.tokenizer(), name="fresh", lanes=lanes, max_context=160
    )


def hears_ctrl_c() -> None:
    """For `preexec_fn`: a process that was started in the background hears no interrupt, and neither do those it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def tiny_model() -> Model:
    return model()
