"""One decoder for the Llama shape (Llama, Mistral, Qwen2, Qwen3): the library's weights and logits,
in far fewer small steps.

Queries, keys and values are one matrix product, gate and up another. Rotations are looked up, not
computed. Logits are made only for rows that are read. In float32 its logits equal the library's
(tested); it exists because it is measurably faster (`make bench`).

T rows, R rows read, E hidden size, H heads, G key heads, D head size, I inner size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.backbones.attention import LayerAttention, attend
from forerun.backbones.rotary import rotations
from forerun.engine.backbone import SlottedBackbone
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch, Tiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; matrices are [in, out]."""

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


def fits(model: PreTrainedModel, context: int) -> bool:
    """Is this a network of the Llama shape, with plain weights, and full attention within so many
    positions?"""
    config: Any = model.config
    if config.model_type not in SHAPES or getattr(config, "hidden_act", None) != "silu":
        return False
    # Quantised weights are packed, in layers of a class of their own.
    base: Any = model.model
    parts = [part for layer in base.layers for part in (*_projections(layer), *_gates(layer))]
    parts += [end for layer in base.layers for end in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    if _names_quantisation(config) or not all(type(part) is nn.Linear for part in parts):
        return False
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None) if "sliding_attention" in types else None
    return window is None or window >= context


def _names_quantisation(config: Any) -> bool:
    """Does a config say that weights are packed? Those of a .gguf file are not, once they are read,
    though the config still says what they were."""
    named: Any = getattr(config, "quantization_config", None)
    if named is None:
        return False
    method = named.get("quant_method") if isinstance(named, dict) else named.quant_method
    return str(getattr(method, "value", method)) != "gguf"


class LeanBackbone(SlottedBackbone):
    """Rows to logits. It takes the weights over from a `transformers` model, which is not needed
    afterwards."""

    capturable = True
    has_fixed_kernels = True
    gives_features = True

    def __init__(self, model: PreTrainedModel, vocab: int, context: int):
        config: Any = model.config
        self.vocab = vocab
        self.context = context
        self.device = model.device
        self.dtype = model.dtype
        self.cost = float(sum(p.numel() for p in model.parameters()))
        self.layers = config.num_hidden_layers
        self.heads = config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.hidden_size = config.hidden_size
        self.eps = config.rms_norm_eps
        base: Any = model.model
        head: Any = model.lm_head
        self.embed: Tensor = base.embed_tokens.weight.detach()
        self.norm: Tensor = base.norm.weight.detach()
        self.head = _transposed(head.weight.detach()[:vocab])
        self.stack = [_take_layer(layer) for layer in base.layers]
        cos, sin = (
            part.to(self.dtype) for part in rotations(base.rotary_emb, context, self.device)
        )
        half = self.head_dim // 2
        # rotate_half(x) * sin == roll(x) * (sin with its first half negated): no negation and no
        # cat in every layer.
        self.cos_CD = cos[0]
        self.sin_CD = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        if batch.tiles is not None:
            return self._forward_by_kernels(batch, batch.tiles, slots)
        x_TE = F.embedding(batch.tokens_T, self.embed)
        cos_T1D = self.cos_CD[batch.positions_T][:, None]
        sin_T1D = self.sin_CD[batch.positions_T][:, None]
        for index, layer in enumerate(self.stack):
            call = LayerAttention(index, batch, slots, self.head_dim**-0.5)
            x_TE = x_TE + self._attention(layer, x_TE, cos_T1D, sin_T1D, call)
            if index == self.layers - 1 and index not in slots.features:
                # past the last keys and values only the rows that are read matter
                x_TE = x_TE[batch.reads_R]
            gate_up = _times(self._norm(x_TE, layer.norm_mlp), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, -1)
            x_TE = x_TE + _times(F.silu(gate) * up, layer.down, layer.down_bias)
            slots.keep_features(index, batch.slots_T, x_TE)
        if self.layers - 1 in slots.features:
            x_TE = x_TE[batch.reads_R]
        return self._norm(x_TE, self.norm) @ self.head

    def _forward_by_kernels(self, batch: Batch, tiles: Tiles[Tensor], slots: Slots) -> Tensor:
        """The same in our own kernels, which need Triton: fewer launches, and none that depends on
        what a batch holds."""
        from forerun.backbones.kernels.attention import attention
        from forerun.backbones.kernels.elementwise import RMSNorm, Rotary, rotate_and_keep
        from forerun.backbones.kernels.matmul import product

        product = partial(product, fixed=self.deterministic)
        x_TE = F.embedding(batch.tokens_T, self.embed)
        for index, layer in enumerate(self.stack):
            norm_attn = RMSNorm(layer.norm_attn, self.eps)
            norm_mlp = RMSNorm(layer.norm_mlp, self.eps)
            rotary = Rotary(self.cos_CD, self.sin_CD, self.eps, layer.q_norm, layer.k_norm)
            qkv_TN = product(x_TE, layer.qkv, layer.qkv_bias, normed=norm_attn)
            q_THD = rotate_and_keep(index, qkv_TN, rotary, batch, slots)
            seen_TE = attention(index, q_THD, tiles, slots, self.head_dim**-0.5)
            x_TE = product(seen_TE, layer.out, layer.out_bias, onto=x_TE)
            if index == self.layers - 1 and index not in slots.features:
                x_TE = x_TE[batch.reads_R]
            h_TI = product(x_TE, layer.gate_up, layer.gate_up_bias, normed=norm_mlp, gated=True)
            x_TE = product(h_TI, layer.down, layer.down_bias, onto=x_TE)
            slots.keep_features(index, batch.slots_T, x_TE)
        if self.layers - 1 in slots.features:
            x_TE = x_TE[batch.reads_R]
        return product(x_TE, self.head, normed=RMSNorm(self.norm, self.eps))

    def unembed(self, x_RE: Tensor) -> Tensor:
        """Logits of hidden states that are normed already, for a drafter that shares the head."""
        return x_RE @ self.head

    def _attention(
        self, layer: Layer, x_TE: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, call: LayerAttention
    ) -> Tensor:
        qkv = _times(self._norm(x_TE, layer.norm_attn), layer.qkv, layer.qkv_bias)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        qk, v = qkv.split([self.heads + self.key_heads, self.key_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([self.heads, self.key_heads], 1)
            qk = torch.cat([self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)], 1)
        qk = qk * cos_T1D + qk.roll(self.head_dim // 2, -1) * sin_T1D
        q, k = qk.split([self.heads, self.key_heads], 1)
        return _times(attend(q, k, v, call), layer.out, layer.out_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda or x.dtype.itemsize < 4:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        # On a CPU the library's norm is seven small operations; these are five.
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1])
        return (x * mean.add_(self.eps).rsqrt_()).mul_(weight)


def _transposed(weight: Tensor) -> Tensor:
    """A matrix [out, in] as [in, out]. On a CPU it is copied in that order: products with a few
    rows are then up to twice as fast."""
    return weight.t().contiguous() if weight.device.type == "cpu" else weight.t()


def _times(x_TI: Tensor, weight_IO: Tensor, bias: Tensor | None) -> Tensor:
    return x_TI @ weight_IO if bias is None else torch.addmm(bias, x_TI, weight_IO)


def _projections(layer: Any) -> list[nn.Linear]:
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def _gates(layer: Any) -> list[nn.Linear]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj]


def _take_layer(layer: nn.Module) -> Layer:
    attn: Any = layer.self_attn
    mlp: Any = layer.mlp
    norm_attn: Any = layer.input_layernorm
    norm_mlp: Any = layer.post_attention_layernorm
    projections = _projections(layer)
    gates = _gates(layer)
    return Layer(
        norm_attn=norm_attn.weight.detach(),
        norm_mlp=norm_mlp.weight.detach(),
        qkv=_joined_weight(*projections),
        qkv_bias=_joined_bias(*projections),
        q_norm=attn.q_norm.weight.detach() if hasattr(attn, "q_norm") else None,
        k_norm=attn.k_norm.weight.detach() if hasattr(attn, "k_norm") else None,
        out=_joined_weight(attn.o_proj),
        out_bias=_joined_bias(attn.o_proj),
        gate_up=_joined_weight(*gates),
        gate_up_bias=_joined_bias(*gates),
        down=_joined_weight(mlp.down_proj),
        down_bias=_joined_bias(mlp.down_proj),
    )


def _joined_weight(*parts: nn.Linear) -> Tensor:
    return _transposed(torch.cat([p.weight.detach() for p in parts]))


def _joined_bias(*parts: nn.Linear) -> Tensor | None:
    if parts[0].bias is None:
        return None
    return torch.cat([p.bias.detach() for p in parts])
