"""The diffusion transformer of MDLM: layers whose norms are shifted, scaled and gated by an embedding of the noise level.

No library has it. Its checkpoints do not condition on time, yet the conditioning layers run, on level zero: what they say is the
same for every input, so it is computed once. T rows, R rows read, E hidden size, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backbones.attention import attend
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch

FREQUENCIES = 256  # numbers that a noise level is embedded in before the first linear layer
EPS = 1e-5
BASE = 10000.0


class DiTBackbone:
    """Rows to logits with an MDLM checkpoint's own tensors, by their own names without the leading `backbone.`."""

    def __init__(self, weights: dict[str, Tensor], heads: int, vocab: int, context: int):
        self.w, self.heads, self.vocab, self.context = weights, heads, vocab, context
        embed = weights["vocab_embed.embedding"]
        self.device, self.dtype = embed.device, embed.dtype
        self.head_dim = embed.shape[1] // heads
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        self.cost = float(sum(tensor.numel() for tensor in weights.values()))
        level = F.silu(self._level_zero())
        self.shifts = [self._linear(level, f"blocks.{i}.adaLN_modulation").chunk(6, -1) for i in range(self.layers)]
        self.last = self._linear(level, "output_layer.adaLN_modulation").chunk(2, -1)
        half = self.head_dim // 2
        angle = torch.outer(torch.arange(context).double(), BASE ** (-torch.arange(half).double() / half))
        self.cos_CD = torch.cat([angle.cos()] * 2, -1).to(self.device, self.dtype)
        self.sin_CD = torch.cat([-angle.sin(), angle.sin()], -1).to(self.device, self.dtype)

    def _level_zero(self) -> Tensor:
        """The embedding of noise level 0: cosines of zero are one and sines zero, through two linear layers."""
        half = FREQUENCIES // 2
        waves = torch.cat([torch.ones(half), torch.zeros(half)]).to(self.device, self.dtype)
        return self._linear(F.silu(self._linear(waves, "sigma_map.mlp.0")), "sigma_map.mlp.2")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str, shift: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=EPS) * self.w[f"{name}.weight"] * (1 + scale) + shift

    def bytes_per_lane(self, context: int) -> int:
        return 2 * self.layers * context * self.heads * self.head_dim * self.dtype.itemsize

    def make_slots(self, lanes: int, context: int) -> Slots:
        return Slots(self.layers, lanes, context, self.heads, self.head_dim, self.dtype, self.device)

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        x_TE = self.w["vocab_embed.embedding"][batch.tokens_T]
        cos, sin = self.cos_CD[batch.positions_T][:, None], self.sin_CD[batch.positions_T][:, None]
        for i in range(self.layers):
            shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = self.shifts[i]
            h_TE = self._norm(x_TE, f"blocks.{i}.norm1", shift_attn, scale_attn)
            q, k, v = self._linear(h_TE, f"blocks.{i}.attn_qkv").unflatten(-1, (3, self.heads, self.head_dim)).unbind(1)
            q, k = (y * cos + y.roll(self.head_dim // 2, -1) * sin for y in (q, k))
            seen_TE = attend(i, q, k, v, batch, slots, 1 / math.sqrt(self.head_dim))
            x_TE = x_TE + gate_attn * self._linear(seen_TE, f"blocks.{i}.attn_out")
            if i == self.layers - 1:
                x_TE = x_TE[batch.reads_R]
            h_TE = self._linear(self._norm(x_TE, f"blocks.{i}.norm2", shift_mlp, scale_mlp), f"blocks.{i}.mlp.0")
            x_TE = x_TE + gate_mlp * self._linear(F.gelu(h_TE, approximate="tanh"), f"blocks.{i}.mlp.2")
        return self._linear(self._norm(x_TE, "output_layer.norm_final", *self.last), "output_layer.linear")[:, : self.vocab]


def wanted(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of every tensor of such a checkpoint."""
    e, c, v = config["hidden_dim"], config["cond_dim"], config["vocab_size"]

    def linear(name: str, out: int, into: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (out, into), **({f"{name}.bias": (out,)} if bias else {})}

    shapes: dict[str, tuple[int, ...]] = {"vocab_embed.embedding": (v, e)}
    shapes |= linear("sigma_map.mlp.0", c, FREQUENCIES) | linear("sigma_map.mlp.2", c, c)
    for i in range(config["n_blocks"]):
        own = f"blocks.{i}"
        shapes |= {f"{own}.norm1.weight": (e,), f"{own}.norm2.weight": (e,)}
        shapes |= linear(f"{own}.attn_qkv", 3 * e, e, bias=False) | linear(f"{own}.attn_out", e, e, bias=False)
        shapes |= linear(f"{own}.mlp.0", 4 * e, e) | linear(f"{own}.mlp.2", e, 4 * e)
        shapes |= linear(f"{own}.adaLN_modulation", 6 * e, c)
    shapes |= {"output_layer.norm_final.weight": (e,)}
    return shapes | linear("output_layer.linear", v, e) | linear("output_layer.adaLN_modulation", 2 * e, c)
