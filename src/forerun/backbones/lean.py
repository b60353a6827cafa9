"""One decoder for the Llama shape (Llama, Mistral, Qwen2, Qwen3): the library's weights and logits, in far fewer small steps.

Queries, keys and values are one matrix product, gate and up another; rotations are looked up, not computed; logits are made
only for rows that are read. In float32 its logits equal the library's (tested); it is here because it is measurably faster
(`make bench`).

T rows, R rows read, E hidden size, H heads, G key heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backbones.attention import attend
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch, Tiles

SHAPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass
class Layer:
    norm_attn: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm_mlp: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class LeanBackbone:
    """Rows to logits. Takes the weights over from a `transformers` model, which is not needed afterwards."""

    capturable = True

    def __init__(self, model: Any, vocab: int, context: int):
        config = model.config
        self.vocab, self.context, self.device, self.dtype = vocab, context, model.device, model.dtype
        self.cost = float(sum(p.numel() for p in model.parameters()))
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.fold = self.heads // self.key_heads
        self.eps, self.layers = config.rms_norm_eps, config.num_hidden_layers
        base = model.model
        self.embed, self.norm = base.embed_tokens.weight.detach(), base.norm.weight.detach()
        self.head = _sideways(model.lm_head.weight.detach()[:vocab])
        self.stack = [_take_layer(layer) for layer in base.layers]
        positions = torch.arange(context, device=self.device)[None]
        cos, sin = base.rotary_emb(self.embed.new_zeros(1), positions)
        half = self.head_dim // 2
        # rotate_half(x) * sin == roll(x) * (sin with its first half negated): no negation and no cat in every layer.
        self.cos_CD, self.sin_CD = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)

    def bytes_per_lane(self, context: int) -> int:
        return 2 * self.layers * context * self.key_heads * self.head_dim * self.dtype.itemsize

    def make_slots(self, lanes: int, context: int) -> Slots:
        return Slots(self.layers, lanes, context, self.key_heads, self.head_dim, self.dtype, self.device)

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        if batch.tiles is not None:
            return self._by_kernels(batch, batch.tiles, slots)
        x_TE = F.embedding(batch.tokens_T, self.embed)
        cos_T1D, sin_T1D = self.cos_CD[batch.positions_T][:, None], self.sin_CD[batch.positions_T][:, None]
        for index, layer in enumerate(self.stack):
            x_TE = x_TE + self._attention(index, layer, self._norm(x_TE, layer.norm_attn), cos_T1D, sin_T1D, batch, slots)
            if index == self.layers - 1:
                x_TE = x_TE[batch.reads_R]  # past the last keys and values only the rows that are read matter
            gate, up = _times(self._norm(x_TE, layer.norm_mlp), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x_TE = x_TE + _times(F.silu(gate) * up, layer.down, layer.down_bias)
        return self._norm(x_TE, self.norm) @ self.head

    def _by_kernels(self, batch: Batch, tiles: Tiles, slots: Slots) -> Tensor:
        """The same in kernels of ours, which need Triton: fewer launches, and none that depends on what a batch holds."""
        from forerun.backbones.kernels import attention, product, rotate_and_keep

        x_TE = F.embedding(batch.tokens_T, self.embed)
        for index, layer in enumerate(self.stack):
            qkv_TN = product(x_TE, layer.qkv, layer.qkv_bias, normed=(layer.norm_attn, self.eps))
            norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
            q_THD = rotate_and_keep(
                index, qkv_TN, norms, self.cos_CD, self.sin_CD, batch.positions_T, batch.slots_T, slots, self.eps
            )
            seen_TE = attention(index, q_THD, tiles, slots, self.head_dim**-0.5)
            x_TE = product(seen_TE, layer.out, layer.out_bias, onto=x_TE)
            if index == self.layers - 1:
                x_TE = x_TE[batch.reads_R]
            h_TI = product(x_TE, layer.gate_up, layer.gate_up_bias, normed=(layer.norm_mlp, self.eps), gated=True)
            x_TE = product(h_TI, layer.down, layer.down_bias, onto=x_TE)
        return product(x_TE, self.head, normed=(self.norm, self.eps))

    def _attention(self, index: int, layer: Layer, x_TE: Tensor, cos: Tensor, sin: Tensor, batch: Batch, slots: Slots) -> Tensor:
        qkv = _times(x_TE, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv.split([self.heads + self.key_heads, self.key_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([self.heads, self.key_heads], 1)
            qk = torch.cat([self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)], 1)
        qk = qk * cos + qk.roll(self.head_dim // 2, -1) * sin
        q, k = qk.split([self.heads, self.key_heads], 1)
        return _times(attend(index, q, k, v, batch, slots, self.head_dim**-0.5), layer.out, layer.out_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda or x.dtype.itemsize < 4:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        # On a CPU the library's norm is seven small operations; these are five.
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1])
        return (x * mean.add_(self.eps).rsqrt_()).mul_(weight)


def _sideways(weight: Tensor) -> Tensor:
    """A matrix [out, in] as [in, out]. On a CPU it is laid out anew: products with a few rows are then up to twice as fast."""
    return weight.t().contiguous() if weight.device.type == "cpu" else weight.t()


def _times(x_TI: Tensor, weight_IO: Tensor, bias: Tensor | None) -> Tensor:
    return x_TI @ weight_IO if bias is None else torch.addmm(bias, x_TI, weight_IO)


def _take_layer(layer: Any) -> Layer:
    attn, mlp = layer.self_attn, layer.mlp
    projections, gates = [attn.q_proj, attn.k_proj, attn.v_proj], [mlp.gate_proj, mlp.up_proj]

    def weight(*parts: Any) -> Tensor:
        return _sideways(torch.cat([p.weight.detach() for p in parts]))

    def bias(*parts: Any) -> Tensor | None:
        return torch.cat([p.bias.detach() for p in parts]) if parts[0].bias is not None else None

    def norm(owner: object, name: str) -> Tensor | None:
        return getattr(owner, name).weight.detach() if hasattr(owner, name) else None

    return Layer(
        norm_attn=layer.input_layernorm.weight.detach(),
        norm_mlp=layer.post_attention_layernorm.weight.detach(),
        qkv=weight(*projections),
        qkv_bias=bias(*projections),
        q_norm=norm(attn, "q_norm"),
        k_norm=norm(attn, "k_norm"),
        out=weight(attn.o_proj),
        out_bias=bias(attn.o_proj),
        gate_up=weight(*gates),
        gate_up_bias=bias(*gates),
        down=weight(mlp.down_proj),
        down_bias=bias(mlp.down_proj),
    )
