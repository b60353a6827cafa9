"""Models of a given shape with random weights: timing does not depend on the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forerun.api import Model, from_network
from forerun.engine.cache import available_bytes
from forerun.errors import NoRoom, unknown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_CONTEXT = 16384


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama shape."""

    model_type: str
    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    vocab: int
    head_dim: int | None = None
    tied: bool = False  # is the output's matrix the embedding?

    def config_arguments(self) -> dict[str, Any]:
        """The shape as `transformers` names it."""
        arguments = dict(
            model_type=self.model_type,
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            vocab_size=self.vocab,
            max_position_embeddings=MAX_CONTEXT,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        if self.head_dim is not None:
            arguments["head_dim"] = self.head_dim
        return arguments


SHAPES = {
    "zoo": Shape("llama", 6, 256, 768, 8, 4, 4096, tied=True),
    "smollm2-135m": Shape("llama", 30, 576, 1536, 9, 3, 49152, tied=True),
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 4864, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 8960, 12, 2, 151936, tied=True),
    "qwen2.5-7b": Shape("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "sdar-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
    "llada-8b": Shape("llama", 32, 4096, 12288, 32, 32, 126464),
}


def random_model(
    shape: str,
    device: torch.device,
    dtype: torch.dtype,
    lanes: int,
    context: int,
    deterministic: bool | None = None,
) -> Model:
    """A model of a shape with random weights."""
    network = random_network(shape, device, dtype)
    return from_network(
        network,
        None,
        name=shape,
        lanes=lanes,
        max_context=min(context, MAX_CONTEXT),
        deterministic=deterministic,
    )


def random_network(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A `transformers` model of a shape with random weights, made where they are used."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    config = AutoConfig.for_model(**SHAPES[shape].config_arguments())
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config)
    _check_fits(shape, network, device, dtype)
    # The table of rotations is computed, not drawn: it is made apart from the weights.
    rotary = type(network.model.rotary_emb)(config)
    network.model.rotary_emb = torch.nn.Identity()
    network = network.to(dtype).to_empty(device=device)
    _draw_weights(network)
    network.tie_weights()
    network.model.rotary_emb = rotary.to(device)
    return network.eval()


def _check_fits(
    shape: str, network: torch.nn.Module, device: torch.device, dtype: torch.dtype
) -> None:
    size = sum(weight.numel() for weight in network.parameters()) * dtype.itemsize
    free = available_bytes(device)
    if size > 0.9 * free:
        raise NoRoom(
            f"shape={shape!r} needs {size / 2**30:.1f} GiB on {device}, where {free / 2**30:.1f} "
            f"are free: use a smaller shape, or a smaller dtype."
        )


@torch.no_grad()
def _draw_weights(network: torch.nn.Module) -> None:
    for name, weight in network.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.02)
        else:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
