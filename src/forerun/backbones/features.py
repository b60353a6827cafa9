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
from torch import Tensor

from forerun.backbones.attention import LayerAttention, attend
from forerun.backbones.dflash import DraftLayer, FeatureDrafter, Rotation
from forerun.backbones.lean import LeanBackbone, in_pairs, quantised_product
from forerun.backbones.native import (
    NativeForward,
    NativeLayer,
    NativeProduct,
    NativeShape,
    native_product,
    runs_floats,
)
from forerun.backbones.native.looking import BlockDrafts, NativeDrafter
from forerun.backbones.native.rounds import Runner
from forerun.backbones.products import GROUP, Matrix, joined, times
from forerun.backbones.threads import ThreadChoice
from forerun.engine.backbone import Forwards, RoundsAsked, SlottedBackbone
from forerun.engine.cache import Slots, SlotShape
from forerun.engine.pack import Batch, Tiles
from forerun.engine.pages import PageShape
from forerun.errors import BadCheckpoint


class Taker(NamedTuple):
    """Takes matrices over in the kind of product that is fastest where the target runs."""

    target: LeanBackbone
    bits: str | None
    paired: int | None = None  # interleave the halves of query and key heads of so many numbers

    def matrix(self, weights: Sequence[Tensor]) -> Matrix:
        """Matrices that are multiplied by the same rows, as one."""
        joined_OI = joined([weight.detach() for weight in weights])
        if self.target.capturable:  # by kernels, which take tensors
            return joined_OI.t()
        if self.bits:
            return quantised_product(joined_OI, None, self.bits)[1]
        return native_product(joined_OI, None, None) or joined_OI.t()

    def heads(self, weight: Tensor) -> Tensor:
        """Of queries or keys, or their norm."""
        return in_pairs(weight.detach(), self.paired)


class FewTokens:
    """The target's head for the tokens that a drafter ever drafts; all others are impossible."""

    def __init__(self, take: Taker, tokens_N: Tensor):
        target = take.target
        self.target = target
        self.tokens_N = tokens_N
        # A packed head has no columns that could be taken; an embedding that is the head does.
        self.head: Matrix | None = None
        if isinstance(target.head, Tensor):
            self.head = take.matrix([target.head.t()[tokens_N]])
        elif target.tied:
            self.head = take.matrix([target.embed[tokens_N]])

    def unembed(self, x_RE: Tensor) -> Tensor:
        if self.head is None:
            return self.spread(self.target.unembed(x_RE)[:, self.tokens_N])
        return self.spread(times(x_RE, self.head, None))

    def places(self, token: int) -> list[int]:
        """Where a token is among them, if it is."""
        return (self.tokens_N == token).nonzero().flatten().tolist()

    def spread(self, logits_RN: Tensor) -> Tensor:
        """Over all tokens."""
        logits_RV = logits_RN.new_full((len(logits_RN), self.target.vocab), -torch.inf)
        return logits_RV.index_copy_(1, self.tokens_N, logits_RN)


class TakenLayer(NamedTuple):
    """The weights of a draft layer as they are multiplied."""

    norm_attn: Tensor
    qkv: Matrix
    q_norm: Tensor
    k_norm: Tensor
    out: Matrix
    norm_mlp: Tensor
    gate_up: Matrix
    down: Matrix
    kv: Matrix | None = None  # keys and values alone, for rows of context

    @classmethod
    def of(cls, layer: DraftLayer, take: Taker) -> TakenLayer:
        attn, mlp = layer.self_attn, layer.mlp
        kv = [take.heads(attn.k_proj.weight), attn.v_proj.weight]
        return cls(
            norm_attn=layer.input_layernorm.weight.detach(),
            qkv=take.matrix([take.heads(attn.q_proj.weight), *kv]),
            q_norm=take.heads(attn.q_norm.weight),
            k_norm=take.heads(attn.k_norm.weight),
            out=take.matrix([attn.o_proj.weight]),
            norm_mlp=layer.post_attention_layernorm.weight.detach(),
            gate_up=take.matrix([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=take.matrix([mlp.down_proj.weight]),
            kv=None if take.paired is None else take.matrix(kv),
        )


class FeatureBackbone(SlottedBackbone):
    """Embedding and head are the target's. `source` is where the target keeps hidden states."""

    def __init__(
        self,
        drafter: FeatureDrafter,
        target: LeanBackbone,
        name: str = "drafter",
        bits: str | None = None,  # of its matrices, where no kernels run it
    ):
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
        # Embeddings may be more than tokens: a mask may be one that no text has.
        self.embedded = len(target.embed)
        if shape.mask_token >= self.embedded and not shape.autoregressive:
            raise BadCheckpoint(
                f"draft={name!r} has its masks written as token {shape.mask_token}, and its target "
                f"has embeddings of {self.embedded}: it was trained for another one."
            )
        self.drafter = drafter
        self.target = target
        self.vocab = target.vocab
        self.context = target.context
        self.device = target.device
        self.dtype = target.dtype
        self.capturable = target.capturable
        self.has_fixed_kernels = target.has_fixed_kernels
        self.deterministic = target.deterministic
        self.layers = shape.layers
        self.heads = shape.heads
        self.key_heads = shape.key_heads
        self.head_dim = shape.head_dim
        self.cost = float(sum(p.numel() for p in drafter.parameters()))
        self.source: Slots | None = None
        # Its products are small: waiting for each other may take threads longer than multiplying.
        self._threads = ThreadChoice() if self.device.type == "cpu" else None
        tokens = drafter.drafted_tokens
        take = Taker(target, bits)
        self._few = None if tokens is None else FewTokens(take, tokens[tokens < target.vocab])
        if self._runs_natively:
            take = take._replace(paired=self.head_dim)
        self._stack = [TakenLayer.of(layer, take) for layer in drafter.stack]
        self._fusing = take.matrix([drafter.fc.weight])
        for weight in (*drafter.layers.parameters(), drafter.fc.weight):
            weight.data = weight.new_empty(0)  # taken over
        self._native = self._made_native() if self._runs_natively else None

    @property
    def in_cpp(self) -> bool:
        """Does all of it run in C++?"""
        return self._native is not None

    @property
    def drafts_in_rounds(self) -> bool:
        """May it draft on behind a verdict without being asked?"""
        return self.in_cpp and self._block_drafts is not None

    def drafting_runner(self, slots: Slots, asked: RoundsAsked, target: Runner) -> Runner:
        """As it takes part in rounds of its target's."""
        assert self._native is not None and self._threads is not None and self.source is not None
        rows = sum(text.rows for text in asked.texts)
        never = asked.never_drafted
        if self._few is not None and self._few.head is not None:
            never = [place for token in never for place in self._few.places(token)]
        places = slots, self.source
        return self._native.runner(places, asked, target, self._threads.by_rows(rows), never)

    def note_forwards(self, forwards: Forwards) -> None:
        """They were run elsewhere."""
        assert self._threads is not None
        self._threads.note(forwards.by_rows, forwards.seconds)

    @cached_property
    def markov_after(self) -> NativeProduct | None:
        """What the rows of the tokens before are multiplied by, where it is C++."""
        head = self.drafter.markov_head
        if head is None or not self._runs_natively:
            return None
        after_NR = head.markov_w2.weight.detach()
        tokens = self.drafter.drafted_tokens
        kept = after_NR[: self.vocab] if tokens is None else after_NR[tokens < self.vocab]
        return native_product(kept, None, None)

    @property
    def _block_drafts(self) -> BlockDrafts | None:
        """What it drafts from a block, where all of that is C++."""
        shape, head = self.drafter.shape, self.drafter.markov_head
        if shape.autoregressive or (head is not None and self.markov_after is None):
            return None
        few = self._few
        tokens = None if few is None else few.tokens_N.contiguous()
        gathers = few is not None and few.head is None
        before = None if head is None else head.markov_w1.weight.detach().contiguous()
        return BlockDrafts(shape.mask_token, tokens, gathers, before, self.markov_after)

    @property
    def _runs_natively(self) -> bool:
        """Can all of it be C++?"""
        shape, head = self.drafter.shape, self._head
        inputs = (shape.hidden, shape.inner, shape.heads * shape.head_dim)
        here = self.device.type == "cpu" and runs_floats(self.dtype)
        fits = all(size % GROUP == 0 for size in inputs) and self._native_shape.fits
        return here and fits and isinstance(head, NativeProduct)

    @property
    def _native_shape(self) -> NativeShape:
        return NativeShape(self.heads, self.key_heads, self.head_dim, self.drafter.shape.eps)

    @property
    def _head(self) -> Matrix | None:
        """What the last rows are multiplied by."""
        own = None if self._few is None else self._few.head
        return self.target.head if own is None else own

    def _made_native(self) -> NativeDrafter:
        """The same weights as C++ takes them."""
        layers: list[Any] = [
            NativeLayer(*(getattr(layer, name) for name in NativeLayer._fields))
            for layer in self._stack
        ]
        shape = self.drafter.shape
        positions = torch.arange(self.context + shape.block)
        turns = Rotation.of(positions, shape, torch.float32)
        half = self.head_dim // 2
        turns_CD = torch.complex(turns.cos[:, 0, :half], turns.sin[:, 0, half:])
        head: Any = self._head
        ends = (self.target.embed, self.drafter.norm.weight.detach(), head)
        forward = NativeForward(layers, ends, turns_CD.contiguous(), self._native_shape)
        fusing: Any = self._fusing
        kept: list[Any] = [layer.kv for layer in self._stack]
        of_states: Any = self.drafter.fc_norms
        norms = None if of_states is None else torch.cat([norm.weight for norm in of_states])
        of_fused = self.drafter.hidden_norm.weight.detach()
        return NativeDrafter(
            forward, fusing, kept, (of_fused, norms), shape.target_layers, self._block_drafts
        )

    def make_slots(self, lanes: int, context: int, pages: PageShape | None = None) -> Slots:
        heads = (self.key_heads, self.head_dim)
        joined = self._native is not None
        shape = SlotShape(self.layers, lanes, context, *heads, pages=pages, joined=joined)
        return Slots(shape, self.dtype, self.device)

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        if batch.tiles is not None:
            return self._forward_by_kernels(batch, batch.tiles, slots)
        if self._threads is None:
            return self._forward_plain(batch, slots)
        run = self._forward_plain if self._native is None else self._forward_natively
        return self._threads.run(len(batch.slots), partial(run, batch, slots))

    def _forward_natively(self, batch: Batch, slots: Slots) -> Tensor:
        assert self._native is not None and self.source is not None
        logits_RN = self._native(batch, slots, self.source, self.embedded)
        if self._few is None:
            return logits_RN
        has_own = self._few.head is not None
        return self._few.spread(logits_RN if has_own else logits_RN[:, self._few.tokens_N])

    def _forward_plain(self, batch: Batch, slots: Slots) -> Tensor:
        x_TE = F.embedding(batch.tokens_T % self.embedded, self.target.embed)
        fused_TE = times(self.drafter.normed(self._features(batch)), self._fusing, None)
        fused_TE = self.drafter.hidden_norm(fused_TE)
        rotary = Rotation.of(batch.positions_T, self.drafter.shape, x_TE.dtype)
        for index, layer in enumerate(self._stack):
            call = LayerAttention(index, batch, slots, self.head_dim**-0.5)
            x_TE = self._layer(layer, x_TE, fused_TE, rotary, call)
        x_RE = self.drafter.norm(x_TE[batch.reads_R])
        return self.target.unembed(x_RE) if self._few is None else self._few.unembed(x_RE)

    def _forward_by_kernels(self, batch: Batch, tiles: Tiles[Tensor], slots: Slots) -> Tensor:
        """The same in the target's kernels: fewer launches, and the same bits in any company."""
        from forerun.backbones.kernels.attention import attention
        from forerun.backbones.kernels.elementwise import (
            Given,
            RMSNorm,
            Rotary,
            norm,
            rotate_and_keep,
        )
        from forerun.backbones.kernels.matmul import product

        product = partial(product, fixed=self.deterministic)
        eps = self.drafter.shape.eps
        x_TE = F.embedding(batch.tokens_T % self.embedded, self.target.embed)
        fusing: Any = self._fusing  # tensors all: where there are tiles, nothing else is taken
        stack: list[Any] = self._stack
        fused_TE = product(self.drafter.normed(self._features(batch)), fusing)
        fused_TE = norm(fused_TE, self.drafter.hidden_norm.weight, eps)
        context = Given(fused_TE, batch.tokens_T, self.embedded)
        for index, layer in enumerate(stack):
            qkv_TN = product(norm(x_TE, layer.norm_attn, eps, context), layer.qkv)
            rotary = Rotary(*self._turns_CD, eps, layer.q_norm, layer.k_norm)
            q_THD = rotate_and_keep(index, qkv_TN, rotary, batch, slots)
            seen_TE = attention(index, q_THD, tiles, slots, self.head_dim**-0.5)
            x_TE = product(seen_TE, layer.out, onto=x_TE)
            norm_mlp = RMSNorm(layer.norm_mlp, eps)
            h_TI = product(x_TE, layer.gate_up, normed=norm_mlp, gated=True)
            x_TE = product(h_TI, layer.down, onto=x_TE)
        x_RE = norm(x_TE[batch.reads_R], self.drafter.norm.weight, eps)
        few = self._few
        of_few = None if few is None else few.head
        head: Any = self.target.head if of_few is None else of_few
        logits_RN = product(x_RE, head)
        if few is None:
            return logits_RN
        return few.spread(logits_RN[:, few.tokens_N] if of_few is None else logits_RN)

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
        return self.source.features_at(self.drafter.shape.target_layers, batch.sources_T)

    def _layer(
        self,
        layer: TakenLayer,
        x_TE: Tensor,
        fused_TE: Tensor,
        rotary: Rotation,
        call: LayerAttention,
    ) -> Tensor:
        is_context_T1 = (call.batch.tokens_T >= self.embedded)[:, None]
        rows_TE = torch.where(is_context_T1, fused_TE, self._norm(x_TE, layer.norm_attn))
        qkv = times(rows_TE, layer.qkv, None).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.heads, self.key_heads, self.key_heads], 1)
        q, k = rotary(self._norm(q, layer.q_norm)), rotary(self._norm(k, layer.k_norm))
        x_TE = x_TE + times(attend(q, k, v, call), layer.out, None)
        gate_up = times(self._norm(x_TE, layer.norm_mlp), layer.gate_up, None)
        gate, up = gate_up.chunk(2, -1)
        return x_TE + times(F.silu(gate) * up, layer.down, None)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.drafter.shape.eps)
