"""A frozen target of the Llama shape, as training a drafter needs it: hidden states of whole texts,
and many texts written on at once.

B texts, L tokens of a text, C columns of the cache, N hidden states of a token side by side, G key
heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forerun.backbones import lean
from forerun.backbones.lean import Layer, LeanBackbone
from forerun.errors import NotAble

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FrozenTarget:
    """The weights of a target, and the two ways that training runs them."""

    def __init__(self, network: PreTrainedModel, context: int):
        if not lean.fits(network, context):
            raise NotAble(
                f"a drafter with features is trained for {', '.join(lean.SHAPES)}, "
                f"not yet for '{network.config.model_type}'."
            )
        self.weights = LeanBackbone(network, network.config.vocab_size, context, as_tensors=True)
        self.context = context

    def features(self, tokens_BL: Tensor, layers: Sequence[int]) -> Tensor:
        """The hidden states after these layers side by side, [B, L, N]. Later layers do not run."""
        x = F.embedding(tokens_BL, self.weights.embed)
        found = []
        for index, layer in enumerate(self.weights.stack[: max(layers) + 1]):
            x = self._layer(layer, x)
            if index in layers:
                found.append(x)
        return torch.cat(found, -1)

    def logits(self, tokens_BL: Tensor) -> Tensor:
        x = F.embedding(tokens_BL, self.weights.embed)
        for layer in self.weights.stack:
            x = self._layer(layer, x)
        return self.head(x)

    def head(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weights.norm) @ self.head_EV

    @property
    def head_EV(self) -> Tensor:
        assert isinstance(self.weights.head, Tensor), "weights that are trained on are not packed"
        return self.weights.head

    def _layer(self, layer: Layer, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        q, k, v = (part.transpose(1, 2) for part in self._qkv(layer, x, positions))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._rest(layer, x, seen.transpose(1, 2).flatten(2))

    def step(
        self, tokens_B: Tensor, positions_B: Tensor, cache: Cache, column: Tensor, seen_BC: Tensor
    ) -> Tensor:
        """Logits after one more token of every text, [B, V]. Its keys and values go to a column of
        the cache."""
        weights = self.weights
        x = F.embedding(tokens_B[:, None], weights.embed)
        group = weights.heads // weights.key_heads
        unseen = torch.zeros_like(seen_BC, dtype=weights.dtype).masked_fill_(~seen_BC, -torch.inf)
        mask = unseen[:, None, None].expand(-1, weights.key_heads, group, -1)
        for layer, keys, values in zip(weights.stack, cache.keys, cache.values):
            q, k, v = self._qkv(layer, x, positions_B[:, None])
            keys.index_copy_(2, column, k.transpose(1, 2))
            values.index_copy_(2, column, v.transpose(1, 2))
            # the heads of a group are rows that share keys
            q = q[:, 0].unflatten(1, (weights.key_heads, group))
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                seen = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = self._rest(layer, x, seen.flatten(1)[:, None])
        return self.head(x)[:, 0]

    def _qkv(self, layer: Layer, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L, heads, D] each, rotated."""
        weights = self.weights
        qkv = _times(self._norm(x, layer.norm_attn), layer.qkv, layer.qkv_bias)
        heads, key_heads = weights.heads, weights.key_heads
        q, k, v = qkv.unflatten(-1, (-1, weights.head_dim)).split([heads, key_heads, key_heads], -2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        cos = weights.cos_CD[positions][..., None, :]
        sin = weights.sin_CD[positions][..., None, :]
        half = weights.head_dim // 2
        return q * cos + q.roll(half, -1) * sin, k * cos + k.roll(half, -1) * sin, v

    def _rest(self, layer: Layer, x: Tensor, seen: Tensor) -> Tensor:
        x = x + _times(seen, layer.out, layer.out_bias)
        gate_up = _times(self._norm(x, layer.norm_mlp), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, -1)
        return x + _times(F.silu(gate) * up, layer.down, layer.down_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.weights.eps)


def _times(x: Tensor, matrix: object, bias: Tensor | None) -> Tensor:
    assert isinstance(matrix, Tensor), "weights that are trained on are not packed"
    product = x @ matrix
    return product if bias is None else product + bias


class Cache:
    """Keys and values of B texts in a ring of columns, [B, G, C, D] for every layer."""

    def __init__(self, target: FrozenTarget, texts: int, columns: int):
        weights = target.weights
        shape = (texts, weights.key_heads, columns, weights.head_dim)
        self.columns = columns
        self.keys = [weights.embed.new_zeros(shape) for _ in weights.stack]
        self.values = [weights.embed.new_zeros(shape) for _ in weights.stack]
