"""A drafter that looks into its target (DFlash): a few layers whose keys and values are the
target's own hidden states.

The hidden states of some target layers are fused by one matrix. In every draft layer the fused
states before the last token are keys and values, and so is the block itself: the last token, then
masks. One forward fills all masks. Embedding and head are the target's. Names of weights are those
of the published checkpoints.

B texts, L tokens of context, A blocks of a text, S slots of a block, E hidden size, N hidden states
of a token side by side, H heads, G key heads, D head size, R rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DrafterShape:
    """What a drafter's checkpoint says of it."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    target_layers: tuple[int, ...]  # hidden states are read after these, counted from 0
    block: int  # slots: the last token and the masks after it
    mask_token: int
    eps: float = 1e-6
    rope_theta: float = 10000.0
    markov_rank: int = 0  # above 0: logits are corrected by the token before (DSpark)
    autoregressive: bool = False  # slots see the tokens before them, not masks (EAGLE)
    feature_norms: bool = False  # a norm for every hidden state before they are fused (EAGLE-3.1)
    draft_vocab: int = 0  # above 0: only so many of the target's tokens are ever drafted

    @property
    def drafted(self) -> int:
        """The most tokens that one forward drafts."""
        return self.block - 1


def spread_layers(target_layers: int, count: int) -> tuple[int, ...]:
    """The target layers that a drafter reads: evenly from the second to the last but two."""
    if count == 1:
        return (max(0, target_layers - 3),)
    last = max(1, target_layers - 3)
    return tuple(sorted({round(1 + i * (last - 1) / (count - 1)) for i in range(count)}))


class Norm(nn.Module):
    """RMS norm in the precision of what it norms."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _Attention(nn.Module):
    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        keys = shape.key_heads * shape.head_dim
        queries = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.eps)
        self.k_norm = Norm(shape.head_dim, shape.eps)

    def keys_values(self, x: Tensor, rotary: Rotation) -> tuple[Tensor, Tensor]:
        """[..., G, D] each. Context and block go through the same matrices."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim)))
        v = self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        return rotary(k), v

    def queries(self, x: Tensor, rotary: Rotation) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim)))
        return rotary(q)


class _Mlp(nn.Module):
    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Rotation:
    """Rotary embeddings of some positions, made once for all layers."""

    cos: Tensor  # [..., 1, D]
    sin: Tensor  # the same, its first half negated

    @classmethod
    def of(cls, positions: Tensor, shape: DrafterShape, dtype: torch.dtype) -> Rotation:
        steps = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32)
        frequencies = shape.rope_theta ** (-steps / shape.head_dim)
        angles = positions[..., None, None].float() * frequencies
        cos = torch.cat([angles.cos(), angles.cos()], -1)
        sin = torch.cat([-angles.sin(), angles.sin()], -1)
        return cls(cos.to(dtype), sin.to(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.cos + x.roll(self.cos.shape[-1] // 2, -1) * self.sin


class DraftLayer(nn.Module):
    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)

    def forward(
        self, x: Tensor, context: tuple[Tensor, Tensor], rotary: Rotation, hidden: Tensor
    ) -> Tensor:
        """Blocks x [B, A, S, E] over context keys and values [B, L, G, D]; `hidden` [B, A, L] says
        which of them a block must not see."""
        normed = self.input_layernorm(x)
        own = self.self_attn.keys_values(normed, rotary)
        q = self.self_attn.queries(normed, rotary)
        seen = attend(q, context, own, hidden, self.shape.autoregressive)
        x = x + self.self_attn.o_proj(seen)
        return x + self.mlp(self.post_attention_layernorm(x))


def attend(
    q_BASHD: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    hidden_BAL: Tensor,
    causal: bool,
) -> Tensor:
    """Attention of blocks to the context before them and to themselves, [B, A, S, HD].

    Contexts are short, so scores are simply made: two products and one softmax over both.
    """
    B, A, S, H, D = q_BASHD.shape
    keys, values = context
    own_keys, own_values = own
    G, L = keys.shape[2], keys.shape[1]
    # [B, G, A, S * group, D]: the heads of a group are rows that share keys
    q = q_BASHD.unflatten(3, (G, H // G)).permute(0, 3, 1, 2, 4, 5).flatten(3, 4) * D**-0.5
    rows = q.shape[3]
    before = q.flatten(2, 3) @ keys.permute(0, 2, 3, 1)
    before = before.view(B, G, A, rows, L).masked_fill(hidden_BAL[:, None, :, None], -torch.inf)
    inside = q @ own_keys.permute(0, 3, 1, 4, 2)  # [B, G, A, rows, S]
    if causal:
        slots = torch.arange(S, device=q.device)
        later = slots > slots.repeat_interleave(H // G)[:, None]
        inside = inside.masked_fill(later, -torch.inf)
    weights = torch.cat([before, inside], -1).softmax(-1)
    seen = weights[..., :L].reshape(B, G, A * rows, L) @ values.permute(0, 2, 1, 3)
    seen = seen.view(B, G, A, rows, D) + weights[..., L:] @ own_values.permute(0, 3, 1, 2, 4)
    return seen.unflatten(3, (S, H // G)).permute(0, 2, 3, 1, 4, 5).reshape(B, A, S, H * D)


class _Markov(nn.Module):
    """How the token before moves the logits of a slot: one matrix of low rank."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab, shape.markov_rank)
        drafted = shape.draft_vocab or shape.vocab
        self.markov_w2 = nn.Linear(shape.markov_rank, drafted, bias=False)

    def forward(self, before: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(before))


class FeatureDrafter(nn.Module):
    """The trained part of a drafter. What it shares with its target is given to its methods."""

    d2t: Tensor | None  # of every token that may be drafted: its number, less its place here

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        states = len(shape.target_layers)
        self.fc = nn.Linear(states * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList([DraftLayer(shape) for _ in range(shape.layers)])
        self.norm = Norm(shape.hidden, shape.eps)
        self.markov_head = _Markov(shape) if shape.markov_rank else None
        few = torch.zeros(shape.draft_vocab, dtype=torch.long) if shape.draft_vocab else None
        self.register_buffer("d2t", few)
        self.fc_norms = None
        if shape.feature_norms:
            norms = [Norm(shape.hidden, shape.eps) for _ in range(states)]
            self.fc_norms = nn.ModuleList(norms)

    @property
    def drafted_tokens(self) -> Tensor | None:
        """The tokens that it may draft, in the order of its logits; None: all of the target's."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def draft_only(self, tokens: Tensor) -> None:
        """Say which tokens it may draft."""
        assert self.d2t is not None, "a drafter of all tokens"
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states side by side [..., N] as one context vector each [..., E]."""
        return self.hidden_norm(self.fc(self.normed(features)))

    def normed(self, features: Tensor) -> Tensor:
        """Hidden states side by side, each normed if it has a norm."""
        if self.fc_norms is None:
            return features
        states = features.unflatten(-1, (len(self.fc_norms), -1)).unbind(-2)
        return torch.cat([norm(x) for norm, x in zip(self.fc_norms, states)], -1)

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer for the context, [..., G, D] each. A token's are made
        once and then kept."""
        fused = self.fuse(features)
        rotary = Rotation.of(positions, self.shape, fused.dtype)
        return [layer.self_attn.keys_values(fused, rotary) for layer in self.stack]

    @property
    def stack(self) -> Sequence[DraftLayer]:
        return self.layers  # type: ignore[return-value]

    def forward(
        self, features: Tensor, positions: Tensor, embedded: Tensor, anchors: Tensor
    ) -> Tensor:
        """Hidden states of blocks from the features of their whole texts: training."""
        return self.blocks(embedded, self.context(features, positions), anchors)

    def blocks(
        self,
        embedded: Tensor,
        context: list[tuple[Tensor, Tensor]],
        anchors: Tensor,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Blocks [B, A, S, E] as embedded tokens and masks; the positions of their first tokens
        [B, A]. Hidden states before the head, [B, A, S, E].

        A block sees the context before its first token, or what `hidden` [B, A, L] leaves of it.
        """
        slots = torch.arange(embedded.shape[2], device=embedded.device)
        rotary = Rotation.of(anchors[..., None] + slots, self.shape, embedded.dtype)
        if hidden is None:
            places = torch.arange(context[0][0].shape[1], device=embedded.device)
            hidden = places >= anchors[..., None]
        x = embedded
        for layer, keys_values in zip(self.stack, context):
            x = layer(x, keys_values, rotary, hidden)
        return self.norm(x)
