"""Networks and tokenizers of named checkpoints, as training wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forerun import zoo
from forerun.checkpoints import diffusion, formats, gguf, hub, resolve, tokenizers
from forerun.checkpoints.adapters import add as add_adapters
from forerun.checkpoints.files import read_json
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
        network = _load_checkpoint(base)
    return add_adapters(network, adapters) if adapters else network


def _load_checkpoint(name: str) -> PreTrainedModel:
    source = resolve.find(name)
    raw = formats.read_raw_config(source)
    if source.gguf:
        with gguf.quick():
            return gguf.as_plain(hub.load_weights(source, torch.device("cpu"), torch.float32))
    if raw is None:
        return hub.load_weights(source, torch.device("cpu"), torch.float32)
    if raw["model_type"] in formats.OWN_NETWORKS:
        own: Any = diffusion.trainable_diffusion_transformer(source, raw)
        return own
    network, _ = diffusion.load(source, raw, torch.device("cpu"), torch.float32)
    return network


def family_settings(name: str) -> dict[str, Any]:
    """What a checkpoint says of its family: its mask token, and whether its rows are shifted. Empty
    for one that goes from left to right."""
    base, _ = resolve.split_adapters(name)
    if base.startswith("zoo:"):
        return zoo.family_settings(base.removeprefix("zoo:"))
    source = resolve.find(base)
    raw = formats.read_raw_config(source)
    if raw is None:
        return {} if source.gguf else dict(read_json(source, "config.json").get("forerun") or {})
    return dict(formats.family_settings(source.name, raw))


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A checkpoint's tokenizer, by the same names."""
    from transformers import PreTrainedTokenizerFast

    base, _ = resolve.split_adapters(name)
    if base.startswith("zoo:"):
        return zoo.tokenizer()
    tokenizer = tokenizers.load_tokenizer(resolve.find(base))
    if tokenizer is None:
        raise BadOption(
            f"{base!r} has no tokenizer in its folder: name another checkpoint's with tokenizer:."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise BadOption(
            f"{base!r} has a tokenizer in pure Python: training needs one of `tokenizers`, with a "
            f"file tokenizer.json."
        )
    if tokenizer.eos_token_id is None:
        raise BadOption(f"the tokenizer of {base!r} has no token that ends a text (eos_token).")
    return tokenizer


def move(network: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Move a network to a device, in place, its weights to another precision. Buffers keep theirs:
    rotary frequencies in half precision would turn far tokens by a radian."""
    nn.Module.to(network, device=device)
    for weight in network.parameters() if dtype is not None else ():
        weight.data = weight.data.to(dtype)


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
