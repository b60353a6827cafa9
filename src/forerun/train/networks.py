"""Networks and tokenizers of named checkpoints, as training wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from forerun import zoo
from forerun.checkpoints import hub, resolve
from forerun.errors import BadOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def load_network(name: str) -> PreTrainedModel:
    """A checkpoint's network in float32. The name is a directory, a hub id, 'smollm' or zoo:NAME,
    each also with '+FOLDER' of adapters."""
    base, adapters = resolve.split_adapters(name)
    if base.startswith("zoo:"):
        network, _ = zoo.load(base.removeprefix("zoo:"), torch.float32, torch.device("cpu"))
    else:
        network = hub.load_weights(resolve.find(base), torch.device("cpu"), torch.float32)
    return hub.with_adapters(network, adapters) if adapters else network


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A checkpoint's tokenizer, by the same names."""
    from transformers import PreTrainedTokenizerFast

    base, _ = resolve.split_adapters(name)
    if base.startswith("zoo:"):
        return zoo.tokenizer()
    tokenizer = hub.load_tokenizer(resolve.find(base))
    if tokenizer is None:
        raise BadOption(f"{base!r} has no tokenizer in its folder.")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise BadOption(
            f"{base!r} has a tokenizer in pure Python: training needs one of `tokenizers`, with a "
            f"file tokenizer.json."
        )
    return tokenizer


def move(network: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Move a network to a device, in place. (As annotated, transformers' own `to` is no method.)"""
    nn.Module.to(network, device=device, dtype=dtype)


def check_checkpoint(name: str) -> None:
    """Refuse a name that leads to no checkpoint, before anything is loaded."""
    base, _ = resolve.split_adapters(name)
    if base.startswith("zoo:"):
        zoo.recipe(base.removeprefix("zoo:"))
    else:
        resolve.find(base)


def check_context(network: PreTrainedModel, context: int) -> None:
    """Refuse a context that is longer than the network."""
    positions = getattr(network.config, "max_position_embeddings", None) or 0
    if 0 < positions < context:
        raise BadOption(
            f"context={context} is more than the {positions} positions that the network has."
        )
