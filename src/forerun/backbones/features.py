"""A drafter over its target's hidden states, as a backbone: rows to logits.

The keys and values of context rows are made of what the target's forward left in its own slots, at
the same places. So a position is projected once, and a draft of many sequences is one forward.

T rows, R rows read, E hidden size, H heads, G key heads, D head size, V vocabulary, N tokens of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backbones.attention import LayerAttention, attend
from forerun.backbones.dflash import DraftLayer, FeatureDrafter, Rotation
from forerun.backbones.lean import LeanBackbone
from forerun.engine.backbone import SlottedBackbone
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch
from forerun.errors import BadCheckpoint


class FewTokens:
    """The target's head for the tokens that a drafter ever drafts; all others are impossible."""

    def __init__(self, target: LeanBackbone, tokens_N: Tensor):
        self.target = target
        self.tokens_N = tokens_N
        head = target.head
        self.head_EN = head[:, tokens_N].contiguous() if isinstance(head, Tensor) else None

    def unembed(self, x_RE: Tensor) -> Tensor:
        if self.head_EN is None:  # packed: its columns cannot be had one by one
            few_RN = self.target.unembed(x_RE)[:, self.tokens_N]
        else:
            few_RN = x_RE @ self.head_EN
        logits_RV = few_RN.new_full((len(few_RN), self.target.vocab), -torch.inf)
        return logits_RV.index_copy_(1, self.tokens_N, few_RN)


class FeatureBackbone(SlottedBackbone):
    """Embedding and head are the target's. `source` is where the target keeps hidden states."""

    capturable = True

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
        self.layers = shape.layers
        self.heads = shape.heads
        self.key_heads = shape.key_heads
        self.head_dim = shape.head_dim
        self.cost = float(sum(p.numel() for p in drafter.parameters()))
        self.source: Slots | None = None
        tokens = drafter.drafted_tokens
        self._few = None if tokens is None else FewTokens(target, tokens[tokens < target.vocab])

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
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
