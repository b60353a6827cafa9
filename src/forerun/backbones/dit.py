"""The diffusion transformer of MDLM and SEDD: layers whose norms are shifted, scaled and gated by
an embedding of the noise level.

No library has it. MDLM does not condition on time, yet the conditioning layers run, on level zero.
Their output is then the same for every input, so it is computed once. SEDD does condition on time.
No method of ours has a time, so the canvas gives it: noise of level sigma masks each token with
probability 1 - exp(-sigma), and the share of masks that a row sees is taken for that probability.

T rows, R rows read, U noise levels, E hidden size, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backbones.attention import LayerAttention, attend
from forerun.engine.backbone import SlottedBackbone
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch, Segment
from forerun.sequence.rows import TOKEN

FREQUENCIES = 256  # numbers that a noise level is embedded in before the first linear layer
EPS = 1e-5
BASE = 10000.0
LEAST_SHARE = 1e-3  # SEDD's training never masks less than this share, nor leaves less


@dataclass(frozen=True)
class DiTShape:
    """The sizes of a diffusion transformer."""

    vocab: int
    hidden: int
    conditioning: int  # size of the embedded noise level
    layers: int
    heads: int
    context: int


class DiTBackbone(SlottedBackbone):
    """Rows to logits with a checkpoint's own tensors, by their own names (MDLM's without the
    leading `backbone.`). The share of `mask_token` is the noise level; without one, the level is
    zero."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        heads: int,
        vocab: int,
        context: int,
        mask_token: int | None = None,
    ):
        self.weights = weights
        self.vocab = vocab
        self.context = context
        self.mask_token = mask_token
        embed = weights["vocab_embed.embedding"]
        self.device = embed.device
        self.dtype = embed.dtype
        self.layers = 1 + max(
            int(name.split(".")[1]) for name in weights if name.startswith("blocks.")
        )
        self.heads = heads
        self.key_heads = heads
        self.head_dim = embed.shape[1] // heads
        self.capturable = mask_token is None  # else the noise level is counted on the host
        self.cost = float(sum(tensor.numel() for tensor in weights.values()))
        self.at_zero = self._modulations(torch.zeros(1))
        angle = torch.outer(torch.arange(context).double(), frequencies(self.head_dim // 2))
        self.cos_CD = torch.cat([angle.cos()] * 2, -1).to(self.device, self.dtype)
        self.sin_CD = torch.cat([-angle.sin(), angle.sin()], -1).to(self.device, self.dtype)

    def _modulations(self, sigma_U: Tensor) -> list[Tensor]:
        """The output of the conditioning layers at some noise levels: for each block [U, 6E], for
        the output layer [U, 2E]."""
        angle = torch.outer(sigma_U.double(), frequencies(FREQUENCIES // 2))
        waves = torch.cat([angle.cos(), angle.sin()], -1).to(self.device, self.dtype)
        hidden = F.silu(self._linear(waves, "sigma_map.mlp.0"))
        level = F.silu(self._linear(hidden, "sigma_map.mlp.2"))
        layers = [*(f"blocks.{i}" for i in range(self.layers)), "output_layer"]
        return [self._linear(level, f"{layer}.adaLN_modulation") for layer in layers]

    def _conditioning(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """The modulations of all noise levels of this forward, and the level of each row [T]."""
        if self.mask_token is None:
            return self.at_zero, torch.zeros_like(batch.tokens_T)
        sigma_U, level_T = noise_levels(batch.segments, self.mask_token)
        modulations = self._modulations(torch.from_numpy(sigma_U))
        return modulations, torch.from_numpy(level_T).to(self.device)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str, shift: Tensor, scale: Tensor) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:], eps=EPS)
        return normed * self.weights[f"{name}.weight"] * (1 + scale) + shift

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        x_TE = self.weights["vocab_embed.embedding"][batch.tokens_T]
        cos_T1D = self.cos_CD[batch.positions_T][:, None]
        sin_T1D = self.sin_CD[batch.positions_T][:, None]
        modulations, level_T = self._conditioning(batch)
        for i in range(self.layers):
            call = LayerAttention(i, batch, slots, 1 / math.sqrt(self.head_dim))
            for_attn, for_mlp = modulations[i].chunk(2, -1)
            shift, scale, gate = _of_rows(for_attn, level_T).chunk(3, -1)
            h_TE = self._norm(x_TE, f"blocks.{i}.norm1", shift, scale)
            x_TE = x_TE + gate * self._attention(h_TE, cos_T1D, sin_T1D, call)
            if i == self.layers - 1:
                x_TE = x_TE[batch.reads_R]
                level_T = level_T[batch.reads_R]
            shift, scale, gate = _of_rows(for_mlp, level_T).chunk(3, -1)
            h_TE = self._norm(x_TE, f"blocks.{i}.norm2", shift, scale)
            h_TE = F.gelu(self._linear(h_TE, f"blocks.{i}.mlp.0"), approximate="tanh")
            x_TE = x_TE + gate * self._linear(h_TE, f"blocks.{i}.mlp.2")
        shift, scale = _of_rows(modulations[-1], level_T).chunk(2, -1)
        # SEDD's log-scores at a mask are these less log(exp(sigma) - 1) and log(V - 1), with a zero
        # for the mask itself. Both are the same for every token, and the mask is never an outcome,
        # so the law is the same without them.
        h_TE = self._norm(x_TE, "output_layer.norm_final", shift, scale)
        return self._linear(h_TE, "output_layer.linear")[:, : self.vocab]

    def _attention(
        self, h_TE: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, call: LayerAttention
    ) -> Tensor:
        qkv = self._linear(h_TE, f"blocks.{call.layer}.attn_qkv")
        q, k, v = qkv.unflatten(-1, (3, self.heads, self.head_dim)).unbind(1)
        q, k = (x * cos_T1D + x.roll(self.head_dim // 2, -1) * sin_T1D for x in (q, k))
        return self._linear(attend(q, k, v, call), f"blocks.{call.layer}.attn_out")


def frequencies(count: int) -> Tensor:
    """Angles per position, or per unit of noise: a geometric series down from 1."""
    return BASE ** (-torch.arange(count).double() / count)


def noise_levels(segments: Sequence[Segment], mask_token: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct noise levels [U], and which is each row's [T]. All rows of a canvas see all of
    it, so they agree."""
    share_T = np.concatenate([_masked_share(segment, mask_token) for segment in segments])
    share_U, level_T = np.unique(share_T.clip(LEAST_SHARE, 1 - LEAST_SHARE), return_inverse=True)
    return -np.log1p(-share_U), level_T


def _masked_share(segment: Segment, mask_token: int) -> np.ndarray:
    """The share of masks among what each row sees, [rows]. Rows that the cache holds, and that are
    not run, count too."""
    # masks in the slots before each
    before = np.concatenate([[0], np.cumsum(segment.plan.rows[TOKEN] == mask_token)])
    _, _, horizon, lo, hi = segment.rows_to_run()
    lo = np.maximum(lo, horizon)  # what both intervals hold is seen once
    hi = np.maximum(hi, lo)
    return (before[horizon] + before[hi] - before[lo]) / (horizon + hi - lo)


def _of_rows(modulation_U: Tensor, level_T: Tensor) -> Tensor:
    """Each row's own modulation; where there is one level, it is broadcast and never copied."""
    return modulation_U if len(modulation_U) == 1 else modulation_U[level_T]


def tensor_shapes(shape: DiTShape) -> dict[str, tuple[int, ...]]:
    """The names and shapes of every tensor of such a checkpoint."""
    e = shape.hidden
    c = shape.conditioning
    shapes: dict[str, tuple[int, ...]] = {"vocab_embed.embedding": (shape.vocab, e)}
    shapes |= _linear_shapes("sigma_map.mlp.0", c, FREQUENCIES)
    shapes |= _linear_shapes("sigma_map.mlp.2", c, c)
    for i in range(shape.layers):
        block = f"blocks.{i}"
        shapes |= {f"{block}.norm1.weight": (e,), f"{block}.norm2.weight": (e,)}
        shapes |= {f"{block}.attn_qkv.weight": (3 * e, e), f"{block}.attn_out.weight": (e, e)}
        shapes |= _linear_shapes(f"{block}.mlp.0", 4 * e, e)
        shapes |= _linear_shapes(f"{block}.mlp.2", e, 4 * e)
        shapes |= _linear_shapes(f"{block}.adaLN_modulation", 6 * e, c)
    shapes |= {"output_layer.norm_final.weight": (e,)}
    shapes |= _linear_shapes("output_layer.linear", shape.vocab, e)
    shapes |= _linear_shapes("output_layer.adaLN_modulation", 2 * e, c)
    return shapes


def _linear_shapes(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
