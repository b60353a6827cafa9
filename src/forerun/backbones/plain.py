"""Weights of the Llama shape under the library's names, and nothing else: no forward, and no code
of the library's, whose classes for models take longer to import than a small model to load.

`LeanBackbone` takes it as it takes a network of the library's; whoever trains needs the latter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from forerun.backbones.blocks import Blocks

Weight = Tensor | Blocks
KINDS = ("llama", "qwen2", "qwen3")


class PlainConfig(SimpleNamespace):
    """A config of the Llama shape with every field named, as the library's has them."""

    def get_text_config(self) -> PlainConfig:
        return self


class PlainNetwork(nn.Module):
    """The weights, in modules of the library's names; those in blocks are no parameters, but
    among `weights()`. A ValueError names one that is missing, has another shape or no place."""

    def __init__(self, config: PlainConfig, weights: Mapping[str, Weight]):
        super().__init__()
        self.config = config
        if config.num_hidden_layers > len(weights):
            raise ValueError(f"{len(weights)} weights are not {config.num_hidden_layers} layers")
        expected = shapes(config)
        for name in sorted(expected.keys() | weights.keys()):
            found = tuple(weights[name].shape) if name in weights else None
            if found != expected.get(name):
                raise ValueError(f"{name} is {found} and should be {expected.get(name)}")
        self.model: Any = nn.Module()
        for name in expected:
            self._put(name, weights[name])
        self.model.rotary_emb = Rotary(config)
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens

    def _put(self, name: str, weight: Weight) -> None:
        *path, last, kind = name.split(".")
        node: Any = self
        for step in path:
            if not hasattr(node, step):
                node.add_module(step, nn.ModuleList() if step == "layers" else nn.Module())
            node = getattr(node, step)
        if not hasattr(node, last):
            node.add_module(last, Part())
        kept = nn.Parameter(weight, requires_grad=False) if isinstance(weight, Tensor) else weight
        setattr(getattr(node, last), kind, kept)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """All of them, by name."""
        yield from self.named_parameters()
        for name, part in self.named_modules():
            if isinstance(part, Part) and isinstance(part.weight, Blocks):
                yield f"{name}.weight", part.weight

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype


class Part(nn.Module):
    """A matrix, a norm or an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter | Blocks | None = None
        self.bias: nn.Parameter | None = None


def shapes(config: PlainConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by name."""
    size, inner = config.hidden_size, config.intermediate_size
    wide = config.num_attention_heads * config.head_dim
    narrow = config.num_key_value_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
        "self_attn.q_proj.weight": (wide, size),
        "self_attn.k_proj.weight": (narrow, size),
        "self_attn.v_proj.weight": (narrow, size),
        "self_attn.o_proj.weight": (size, wide),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
    }
    if config.model_type == "qwen2":
        layer |= {
            f"self_attn.{name}_proj.bias": (rows,)
            for name, rows in zip("qkv", (wide, narrow, narrow))
        }
    if config.model_type == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, size)}
    for index in range(config.num_hidden_layers):
        found |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (size,)
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, size)
    return found


class Rotary(nn.Module):
    """Rotations of positions, by the library's arithmetic: the same bits."""

    rope_type = "default"

    def __init__(self, config: PlainConfig):
        super().__init__()
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        self._frequencies = 1.0 / config.rope_parameters["rope_theta"] ** steps

    def forward(self, x: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        turns = positions_BT[..., None].float() * self._frequencies.to(x.device)
        turns_BTD = torch.cat([turns, turns], -1)
        return turns_BTD.cos().to(x.dtype), turns_BTD.sin().to(x.dtype)
