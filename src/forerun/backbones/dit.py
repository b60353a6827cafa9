"""The diffusion transformer of MDLM and SEDD: layers whose norms are shifted, scaled and gated by an embedding of the noise level.

No library has it. MDLM does not condition on time, yet the conditioning layers run, on level zero: what they say is the same for
every input, so it is computed once. SEDD does. No method of ours has a time, so the canvas says how late it is: noise of level
sigma masks each token with probability 1 - exp(-sigma), and the share of masks that a row sees is taken for that probability.

T rows, R rows read, U noise levels, E hidden size, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backbones.attention import attend
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch, Segment
from forerun.rows import TOKEN

FREQUENCIES = 256  # numbers that a noise level is embedded in before the first linear layer
EPS = 1e-5
BASE = 10000.0
LEAST_SHARE = 1e-3  # SEDD's training never masks less than this share, nor leaves less


class DiTBackbone:
    """Rows to logits with a checkpoint's own tensors, by their own names (MDLM's without the leading `backbone.`). The share of
    `mask_token` is the noise level; without one, the level is zero."""

    def __init__(self, weights: dict[str, Tensor], heads: int, vocab: int, context: int, mask_token: int | None = None):
        self.w, self.heads, self.vocab, self.context, self.mask_token = weights, heads, vocab, context, mask_token
        embed = weights["vocab_embed.embedding"]
        self.device, self.dtype = embed.device, embed.dtype
        self.head_dim = embed.shape[1] // heads
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        self.key_heads, self.fold = heads, 1
        self.capturable = mask_token is None  # else the noise level is counted on the host
        self.cost = float(sum(tensor.numel() for tensor in weights.values()))
        self.at_zero = self._modulations(torch.zeros(1))
        angle = torch.outer(torch.arange(context).double(), frequencies(self.head_dim // 2))
        self.cos_CD = torch.cat([angle.cos()] * 2, -1).to(self.device, self.dtype)
        self.sin_CD = torch.cat([-angle.sin(), angle.sin()], -1).to(self.device, self.dtype)

    def _modulations(self, sigma_U: Tensor) -> list[Tensor]:
        """What the conditioning layers say at some noise levels: for each block [U, 6E], for the output layer [U, 2E]."""
        angle = torch.outer(sigma_U.double(), frequencies(FREQUENCIES // 2))
        waves = torch.cat([angle.cos(), angle.sin()], -1).to(self.device, self.dtype)
        level = F.silu(self._linear(F.silu(self._linear(waves, "sigma_map.mlp.0")), "sigma_map.mlp.2"))
        layers = [*(f"blocks.{i}" for i in range(self.layers)), "output_layer"]
        return [self._linear(level, f"{layer}.adaLN_modulation") for layer in layers]

    def _conditioning(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """The modulations of all noise levels of this forward, and which level is each row's [T]."""
        if self.mask_token is None:
            return self.at_zero, torch.zeros_like(batch.tokens_T)
        sigma_U, level_T = noise_levels(batch.segments, self.mask_token)
        return self._modulations(torch.from_numpy(sigma_U)), torch.from_numpy(level_T).to(self.device)

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
        modulations, level_T = self._conditioning(batch)
        for i in range(self.layers):
            for_attn, for_mlp = modulations[i].chunk(2, -1)
            shift, scale, gate = _of_rows(for_attn, level_T).chunk(3, -1)
            h_TE = self._norm(x_TE, f"blocks.{i}.norm1", shift, scale)
            q, k, v = self._linear(h_TE, f"blocks.{i}.attn_qkv").unflatten(-1, (3, self.heads, self.head_dim)).unbind(1)
            q, k = (y * cos + y.roll(self.head_dim // 2, -1) * sin for y in (q, k))
            seen_TE = attend(i, q, k, v, batch, slots, 1 / math.sqrt(self.head_dim))
            x_TE = x_TE + gate * self._linear(seen_TE, f"blocks.{i}.attn_out")
            if i == self.layers - 1:
                x_TE, level_T = x_TE[batch.reads_R], level_T[batch.reads_R]
            shift, scale, gate = _of_rows(for_mlp, level_T).chunk(3, -1)
            h_TE = self._linear(self._norm(x_TE, f"blocks.{i}.norm2", shift, scale), f"blocks.{i}.mlp.0")
            x_TE = x_TE + gate * self._linear(F.gelu(h_TE, approximate="tanh"), f"blocks.{i}.mlp.2")
        shift, scale = _of_rows(modulations[-1], level_T).chunk(2, -1)
        # SEDD's log-scores at a mask are these less log(exp(sigma) - 1) and log(V - 1), which are the same for every token, with a
        # zero for the mask itself, which is never an outcome. The law of what stands there is the same without all that.
        return self._linear(self._norm(x_TE, "output_layer.norm_final", shift, scale), "output_layer.linear")[:, : self.vocab]


def frequencies(count: int) -> Tensor:
    """The angles per position, and per unit of noise: a geometric series down from 1."""
    return BASE ** (-torch.arange(count).double() / count)


def noise_levels(segments: list[Segment], mask_token: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct noise levels [U], and which is each row's [T]. All rows of a canvas see all of it, so they agree."""
    share_T = np.concatenate([_masked_share(segment, mask_token) for segment in segments])
    share_U, level_T = np.unique(share_T.clip(LEAST_SHARE, 1 - LEAST_SHARE), return_inverse=True)
    return -np.log1p(-share_U), level_T


def _masked_share(segment: Segment, mask_token: int) -> np.ndarray:
    """The share of masks among what each row sees, [rows]. Rows that are not run, because a cache holds them, count too."""
    before = np.concatenate([[0], np.cumsum(segment.plan.rows[TOKEN] == mask_token)])  # masks in the slots before each
    _, _, horizon, lo, hi = segment.run()
    lo = np.maximum(lo, horizon)  # what both intervals hold is seen once
    hi = np.maximum(hi, lo)
    return (before[horizon] + before[hi] - before[lo]) / (horizon + hi - lo)


def _of_rows(modulation_U: Tensor, level_T: Tensor) -> Tensor:
    """Each row's own modulation; where there is one level, it is broadcast and never copied."""
    return modulation_U if len(modulation_U) == 1 else modulation_U[level_T]


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
