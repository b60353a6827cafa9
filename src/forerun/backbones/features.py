"""A drafter over its target's hidden states, as a backbone: rows to logits.

The keys and values of context rows are made of what the target's forward left in its own slots, at
the same places. So a position is projected once, and a draft of many sequences is one forward.

T rows, R rows read, E hidden size, H heads, G key heads, D head size, V vocabulary, N tokens of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.backbones.attention import LayerAttention, attend
from forerun.backbones.dflash import DraftLayer, FeatureDrafter, Rotation
from forerun.backbones.lean import LeanBackbone
from forerun.engine.backbone import SlottedBackbone
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch, Tiles
from forerun.errors import BadCheckpoint


class FewTokens:
    """The target's head for the tokens that a drafter ever drafts; all others are impossible."""

    def __init__(self, target: LeanBackbone, tokens_N: Tensor):
        self.target = target
        self.tokens_N = tokens_N
        # A packed head has no columns that could be taken; an embedding that is the head does: a
        # draft need not be as precise. Rows lie as kernels read them.
        self.head_EN: Tensor | None = None
        if isinstance(target.head, Tensor):
            self.head_EN = target.head.t()[tokens_N].contiguous().t()
        elif target.tied:
            self.head_EN = target.embed[tokens_N].contiguous().t()

    def unembed(self, x_RE: Tensor) -> Tensor:
        if self.head_EN is None:
            return self.spread(self.target.unembed(x_RE)[:, self.tokens_N])
        return self.spread(x_RE @ self.head_EN)

    def spread(self, logits_RN: Tensor) -> Tensor:
        """Over all tokens."""
        logits_RV = logits_RN.new_full((len(logits_RN), self.target.vocab), -torch.inf)
        return logits_RV.index_copy_(1, self.tokens_N, logits_RN)


class KernelLayer(NamedTuple):
    """The weights of a draft layer as kernels take them: matrices [in, out], joined where they are
    multiplied by the same rows."""

    norm_attn: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: DraftLayer) -> KernelLayer:
        attn, mlp = layer.self_attn, layer.mlp
        return cls(
            norm_attn=layer.input_layernorm.weight,
            qkv=_joined([attn.q_proj, attn.k_proj, attn.v_proj]),
            q_norm=attn.q_norm.weight,
            k_norm=attn.k_norm.weight,
            out=attn.o_proj.weight.t(),
            norm_mlp=layer.post_attention_layernorm.weight,
            gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
            down=mlp.down_proj.weight.t(),
        )


def _joined(parts: Sequence[nn.Linear]) -> Tensor:
    """Matrices side by side; from now on they live in one memory."""
    joined = torch.cat([part.weight.detach() for part in parts])
    for part, rows in zip(parts, joined.split([len(part.weight) for part in parts])):
        part.weight.data = rows
    return joined.t()


class FeatureBackbone(SlottedBackbone):
    """Embedding and head are the target's. `source` is where the target keeps hidden states."""

    capturable = True
    has_fixed_kernels = True

    def __init__(self, drafter: FeatureDrafter, target: LeanBackbone, name: str = "drafter"):
        shape = drafter.shape
        if shape.hidden != target.embed.shape[1] or shape.vocab < target.vocab:
            raise BadCheckpoint(
                f"draft={name!r} was trained for another target: {shape.hidden} wide with "
                f"{shape.vocab} tokens, not {target.embed.shape[1]} with {target.vocab}."
            )
        if max(shape.target_layers) >= target.layers:
            raise BadCheckpoint(
                f"draft={name!r} reads layer {max(shape.target_layers)} of its target, which has "
                f"{target.layers}."
            )
        self.drafter = drafter
        self.target = target
        self.vocab = target.vocab
        self.context = target.context
        self.device = target.device
        self.dtype = target.dtype
        self.deterministic = target.deterministic
        self.layers = shape.layers
        self.heads = shape.heads
        self.key_heads = shape.key_heads
        self.head_dim = shape.head_dim
        self.cost = float(sum(p.numel() for p in drafter.parameters()))
        self.source: Slots | None = None
        self._kernel_layers = [KernelLayer.of(layer) for layer in drafter.stack]
        tokens = drafter.drafted_tokens
        self._few = None if tokens is None else FewTokens(target, tokens[tokens < target.vocab])

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        if batch.tiles is not None:
            return self._forward_by_kernels(batch, batch.tiles, slots)
        is_context_T = batch.tokens_T >= self.vocab
        tokens_T = torch.where(is_context_T, batch.tokens_T - self.vocab, batch.tokens_T)
        x_TE = F.embedding(tokens_T, self.target.embed)
        fused_TE = self.drafter.fuse(self._features(batch))
        rotary = Rotation.of(batch.positions_T, self.drafter.shape, x_TE.dtype)
        for index, layer in enumerate(self.drafter.stack):
            call = LayerAttention(index, batch, slots, self.head_dim**-0.5)
            x_TE = self._layer(layer, x_TE, fused_TE, rotary, call)
        x_RE = self.drafter.norm(x_TE[batch.reads_R])
        return self.target.unembed(x_RE) if self._few is None else self._few.unembed(x_RE)

    def _forward_by_kernels(self, batch: Batch, tiles: Tiles[Tensor], slots: Slots) -> Tensor:
        """The same in the target's kernels: fewer launches, and the same bits in any company."""
        from forerun.backbones.kernels.attention import attention
        from forerun.backbones.kernels.elementwise import RMSNorm, Rotary, norm, rotate_and_keep
        from forerun.backbones.kernels.matmul import product

        product = partial(product, fixed=self.deterministic)
        eps = self.drafter.shape.eps
        is_context_T1 = (batch.tokens_T >= self.vocab)[:, None]
        x_TE = F.embedding(batch.tokens_T % self.vocab, self.target.embed)
        fused_TE = product(self.drafter.normed(self._features(batch)), self.drafter.fc.weight.t())
        fused_TE = norm(fused_TE, self.drafter.hidden_norm.weight, eps)
        for index, layer in enumerate(self._kernel_layers):
            normed_TE = norm(x_TE, layer.norm_attn, eps)
            qkv_TN = product(torch.where(is_context_T1, fused_TE, normed_TE), layer.qkv)
            rotary = Rotary(*self._turns_CD, eps, layer.q_norm, layer.k_norm)
            q_THD = rotate_and_keep(index, qkv_TN, rotary, batch, slots)
            seen_TE = attention(index, q_THD, tiles, slots, self.head_dim**-0.5)
            x_TE = product(seen_TE, layer.out, onto=x_TE)
            norm_mlp = RMSNorm(layer.norm_mlp, eps)
            h_TI = product(x_TE, layer.gate_up, normed=norm_mlp, gated=True)
            x_TE = product(h_TI, layer.down, onto=x_TE)
        x_RE = norm(x_TE[batch.reads_R], self.drafter.norm.weight, eps)
        if self._few is not None and self._few.head_EN is not None:
            return self._few.spread(product(x_RE, self._few.head_EN))
        head: Any = self.target.head
        logits_RV = product(x_RE, head)
        return (
            logits_RV if self._few is None else self._few.spread(logits_RV[:, self._few.tokens_N])
        )

    @cached_property
    def _turns_CD(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, as kernels look them up."""
        shape = self.drafter.shape
        positions = torch.arange(self.context + shape.block, device=self.device)
        turns = Rotation.of(positions, shape, self.dtype)
        return turns.cos[:, 0].contiguous(), turns.sin[:, 0].contiguous()

    def _features(self, batch: Batch) -> Tensor:
        """The target's hidden states of context rows, side by side; zeros where there are none."""
        assert self.source is not None, "a drafter is bound to its target's slots"
        layers = self.drafter.shape.target_layers
        return torch.cat([self.source.features[layer][batch.sources_T] for layer in layers], -1)

    def _layer(
        self,
        layer: DraftLayer,
        x_TE: Tensor,
        fused_TE: Tensor,
        rotary: Rotation,
        call: LayerAttention,
    ) -> Tensor:
        normed_TE = layer.input_layernorm(x_TE)
        is_context_T1 = (call.batch.tokens_T >= self.vocab)[:, None]
        k, v = layer.self_attn.keys_values(torch.where(is_context_T1, fused_TE, normed_TE), rotary)
        q = layer.self_attn.queries(normed_TE, rotary)
        x_TE = x_TE + layer.self_attn.o_proj(attend(q, k, v, call))
        return x_TE + layer.mlp(layer.post_attention_layernorm(x_TE))
