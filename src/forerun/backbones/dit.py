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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class DiTLayers:
    """A checkpoint's own tensors, by their own names (MDLM's without the leading `backbone.`), and
    what is computed with them."""

    weights: Mapping[str, Tensor]
    heads: int

    @property
    def depth(self) -> int:
        return 1 + max(
            int(name.split(".")[1]) for name in self.weights if name.startswith("blocks.")
        )

    def modulations(self, sigma_U: Tensor) -> list[Tensor]:
        """The output of the conditioning layers at some noise levels: for each block [U, 6E], for
        the output layer [U, 2E]."""
        embed = self.weights["vocab_embed.embedding"]
        angle = torch.outer(sigma_U.double(), frequencies(FREQUENCIES // 2).to(sigma_U.device))
        waves = torch.cat([angle.cos(), angle.sin()], -1).to(embed.device, embed.dtype)
        hidden = F.silu(self.linear(waves, "sigma_map.mlp.0"))
        level = F.silu(self.linear(hidden, "sigma_map.mlp.2"))
        layers = [*(f"blocks.{i}" for i in range(self.depth)), "output_layer"]
        return [self.linear(level, f"{layer}.adaLN_modulation") for layer in layers]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str, shift: Tensor, scale: Tensor) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:], eps=EPS)
        return normed * self.weights[f"{name}.weight"] * (1 + scale) + shift

    def heads_of(self, h: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of some rows, each [..., H, D]."""
        qkv = self.linear(h, f"blocks.{layer}.attn_qkv").unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(-3)
        return q, k, v

    def mlp(self, x: Tensor, layer: int, modulation: Tensor) -> Tensor:
        shift, scale, gate = modulation.chunk(3, -1)
        h = self.norm(x, f"blocks.{layer}.norm2", shift, scale)
        h = F.gelu(self.linear(h, f"blocks.{layer}.mlp.0"), approximate="tanh")
        return x + gate * self.linear(h, f"blocks.{layer}.mlp.2")

    def logits(self, x: Tensor, modulation: Tensor) -> Tensor:
        shift, scale = modulation.chunk(2, -1)
        h = self.norm(x, "output_layer.norm_final", shift, scale)
        return self.linear(h, "output_layer.linear")


class DiTBackbone(DiTLayers, SlottedBackbone):
    """Rows to logits. The share of `mask_token` is the noise level; without one, the level is
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
        self.layers = self.depth
        self.heads = heads
        self.key_heads = heads
        self.head_dim = embed.shape[1] // heads
        self.capturable = mask_token is None  # else the noise level is counted on the host
        self.cost = float(sum(tensor.numel() for tensor in weights.values()))
        self.at_zero = self.modulations(torch.zeros(1))
        self.cos_CD, self.sin_CD = rotations(context, self.head_dim, embed)

    def _conditioning(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """The modulations of all noise levels of this forward, and the level of each row [T]."""
        if self.mask_token is None:
            return self.at_zero, torch.zeros_like(batch.tokens_T)
        sigma_U, level_T = noise_levels(batch.segments, self.mask_token)
        modulations = self.modulations(torch.from_numpy(sigma_U))
        return modulations, torch.from_numpy(level_T).to(self.device)

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        x_TE = self.weights["vocab_embed.embedding"][batch.tokens_T]
        cos_T1D = self.cos_CD[batch.positions_T][:, None]
        sin_T1D = self.sin_CD[batch.positions_T][:, None]
        modulations, level_T = self._conditioning(batch)
        for i in range(self.layers):
            call = LayerAttention(i, batch, slots, 1 / math.sqrt(self.head_dim))
            for_attn, for_mlp = modulations[i].chunk(2, -1)
            shift, scale, gate = _of_rows(for_attn, level_T).chunk(3, -1)
            q, k, v = self.heads_of(self.norm(x_TE, f"blocks.{i}.norm1", shift, scale), i)
            q, k = (rotated(x, cos_T1D, sin_T1D) for x in (q, k))
            x_TE = x_TE + gate * self.linear(attend(q, k, v, call), f"blocks.{i}.attn_out")
            if i == self.layers - 1:
                x_TE = x_TE[batch.reads_R]
                level_T = level_T[batch.reads_R]
            x_TE = self.mlp(x_TE, i, _of_rows(for_mlp, level_T))
        # SEDD's log-scores at a mask are these less log(exp(sigma) - 1) and log(V - 1), with a zero
        # for the mask itself. Both are the same for every token, and the mask is never an outcome,
        # so the law is the same without them.
        return self.logits(x_TE, _of_rows(modulations[-1], level_T))[:, : self.vocab]


class DiTNetwork(DiTLayers, nn.Module):
    """The same network for training: whole sequences [B, L], a mask of what each row sees, and
    gradients. It is called as the library's networks are."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        config: Any,
        save: Callable[[Path, Any, dict[str, Tensor]], None],
    ):
        """`save` writes tensors and config under a folder, in the layout that they came in."""
        super().__init__()
        self.config = config
        self.heads = config.heads
        self._save = save
        for name, tensor in weights.items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(tensor.clone()))

    @property
    def weights(self) -> dict[str, Tensor]:  # type: ignore[override]
        named: Any = self._parameters.items()
        return {name.replace("/", "."): tensor for name, tensor in named}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        """`attention_mask` is [B, 1, L, L], True where a row sees another."""
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)[None]
        x = self.weights["vocab_embed.embedding"][input_ids]
        cos, sin = rotations(int(position_ids.max()) + 1, x.shape[-1] // self.heads, x)
        tables = (cos[position_ids][:, :, None], sin[position_ids][:, :, None])
        modulations = [m[:, None] for m in self.modulations(self._sigma(input_ids, attention_mask))]
        for i, modulation in enumerate(modulations[:-1]):
            for_attn, for_mlp = modulation.chunk(2, -1)
            shift, scale, gate = for_attn.chunk(3, -1)
            q, k, v = self.heads_of(self.norm(x, f"blocks.{i}.norm1", shift, scale), i)
            q, k = (rotated(part, *tables) for part in (q, k))
            q, k, v = (part.transpose(1, 2).to(v.dtype) for part in (q, k, v))
            seen = F.scaled_dot_product_attention(q, k, v, attention_mask)
            out = self.linear(seen.transpose(1, 2).flatten(2), f"blocks.{i}.attn_out")
            x = self.mlp(x + gate * out, i, for_mlp)
        logits = self.logits(x[:, -logits_to_keep:], modulations[-1])
        return SimpleNamespace(logits=logits[..., : self.config.vocab_size])

    def _sigma(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The noise level of every sequence, from the share of masks among what its first row
        sees."""
        if self.config.noise_token is None:
            return torch.zeros(1, device=input_ids.device)
        seen_BL = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            seen_BL = attention_mask[:, 0, 0]
        masked_B = ((input_ids == self.config.noise_token) & seen_BL).sum(1)
        share_B = (masked_B / seen_BL.sum(1)).clamp(LEAST_SHARE, 1 - LEAST_SHARE)
        return -torch.log1p(-share_B)

    def get_input_embeddings(self) -> SimpleNamespace:
        return SimpleNamespace(weight=self.weights["vocab_embed.embedding"])

    def save_pretrained(self, folder: Path) -> None:
        """The checkpoint in the layout that it came in."""
        tensors = {name: tensor.detach().cpu() for name, tensor in self.weights.items()}
        self._save(Path(folder), self.config, tensors)


def rotations(context: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of every position, each [C, D]."""
    angle = torch.outer(torch.arange(context).double(), frequencies(head_dim // 2))
    cos_CD = torch.cat([angle.cos()] * 2, -1).to(like.device, like.dtype)
    sin_CD = torch.cat([-angle.sin(), angle.sin()], -1).to(like.device, like.dtype)
    return cos_CD, sin_CD


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


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
