"""The lean decoder's forward on a CPU, in as few operations as there can be.

At one row a small operation costs a tenth of a product of 4-bit weights, whatever it does, and a
layer has dozens. So rows are written to where the product wants them, residuals are added in place,
what is the same in all layers is made once, and sequences of equally many rows attend in one call.

The hidden state of a row lies beside a constant, sqrt(E eps), so that the length of both is what
its norm divides by: x / sqrt(mean(x^2) + eps) = x sqrt(E) / |(x, sqrt(E eps))|.

T rows, B sequences of N rows each, S slots, E hidden size, H heads, G key heads of F heads each, D
head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backbones.products import Inputs, Layout, Product
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch, additive_mask
from forerun.sequence.rows import HORIZON


@cache
def fewest_together(size: int) -> int:
    """From so many rows of queries on, attention over heads of a size gives a row the same bits
    however many they are: 2 on ARM, 4 on x86 with AVX2, 8 where neither does."""
    drawn = torch.Generator().manual_seed(0)
    q_BGRD, k_BGSD, v_BGSD = torch.randn(3, 1, 1, 64, size, generator=drawn)
    attend = partial(F.scaled_dot_product_attention, key=k_BGSD, value=v_BGSD)
    all_BGRD = attend(q_BGRD)
    same = (
        rows for rows in (2, 4) if torch.equal(attend(q_BGRD[:, :, :rows]), all_BGRD[:, :, :rows])
    )
    return next(same, 8)


@dataclass(frozen=True)
class CpuLayer:
    """The weights of one layer, as this forward takes them. Norms are times sqrt(size)."""

    norm_attn: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Product
    norm_mlp: Tensor
    gate_up: Product
    down: Product


@dataclass(frozen=True)
class CpuShape:
    """The sizes of a decoder."""

    heads: int
    key_heads: int
    head_dim: int
    eps: float
    slots_at_once: int  # rows look at a multiple of so many slots, masked


class Look(NamedTuple):
    """Attention of B sequences of N rows each, in one call."""

    offset: int  # of the first row
    sequences: int
    rows: int
    first: int  # place of the first slot of the first sequence
    step: int  # places from one sequence to the next
    slots: int
    places_S: Tensor | None  # of the slots, where they are in pieces
    mask: Tensor | None  # [B or 1, 1, F N, S]


def looks(batch: Batch, shape: CpuShape, dtype: torch.dtype) -> list[Look]:
    """The calls that all layers of a forward make."""
    fold = shape.heads // shape.key_heads
    found = _side_by_side(batch, shape, dtype)
    if found is not None:
        return [found]
    calls = []
    for index, segment in enumerate(batch.segments):
        end = _rounded(segment.end, shape.slots_at_once)  # never behind its last page
        span = batch.span(index, end)
        mask = batch.attention_bias(index, None, dtype, end)
        if mask is not None:
            mask = mask.expand(1, 1, fold, *mask.shape).reshape(1, 1, -1, end)
        first, places = (span.start, None) if isinstance(span, slice) else (0, span)
        calls.append(Look(segment.offset, 1, segment.rows, first, 0, end, places, mask))
    return calls


def _rounded(slots: int, at_once: int) -> int:
    return -(-slots // at_once) * at_once


def _side_by_side(batch: Batch, shape: CpuShape, dtype: torch.dtype) -> Look | None:
    """One call for all sequences, where they are text, have equally many rows, are equally long and
    live equally far apart. Shorter ones would look at slots of others, masked, where what is left
    may be no number."""
    segments = batch.segments
    rows = segments[0].rows
    ends = [segment.end for segment in segments]
    same = len(segments) > 1 and all(segment.rows == rows for segment in segments)
    lengths = {_rounded(end, shape.slots_at_once) for end in ends}
    if not same or not batch.is_plain_text or len(lengths) > 1:
        return None
    spans = [batch.span(index) for index in range(len(segments))]
    firsts = [span.start for span in spans if isinstance(span, slice)]
    steps = {int(step) for step in np.diff(firsts)}
    slots = lengths.pop()
    if len(firsts) < len(segments) or len(steps) > 1 or min(steps) <= 0:
        return None
    if firsts[-1] + slots > batch.table.scratch_slot:
        return None
    fold = shape.heads // shape.key_heads
    horizons_BN = batch.rows_5T[HORIZON].reshape(len(segments), rows)
    mask_BNS = additive_mask(np.arange(slots) < horizons_BN[..., None], dtype)
    mask = mask_BNS[:, None, None].expand(-1, 1, fold, -1, -1).reshape(len(ends), 1, -1, slots)
    return Look(0, len(segments), rows, firsts[0], steps.pop(), slots, None, mask)


class Rotation(NamedTuple):
    """By how much queries and keys are turned, of every row."""

    cos_T1D: Tensor
    sin_T1D: Tensor  # its first half negated

    def turned(self, x_THD: Tensor) -> Tensor:
        rolled = x_THD.roll(x_THD.shape[-1] // 2, -1)
        return (x_THD * self.cos_T1D).addcmul_(rolled, self.sin_T1D)


class PairRotation(NamedTuple):
    """The same in place, for heads whose two halves are interleaved: a pair is a complex number."""

    turns_T1C: Tensor

    def turn(self, x_THD: Tensor) -> None:
        t, h, d = x_THD.shape
        pairs = x_THD.as_strided((t, h, d // 2, 2), (x_THD.stride(0), d, 2, 1))
        torch.view_as_complex(pairs).mul_(self.turns_T1C)


class CpuForward:
    """Layers, run."""

    def __init__(self, layers: Sequence[CpuLayer], norm: Tensor, head: Product, shape: CpuShape):
        self._layers = layers
        self._norm = norm
        self._head = head
        self._shape = shape
        self._least = (norm.shape[0] * shape.eps) ** 0.5
        self._least_of_head = norm.new_tensor((shape.head_dim * shape.eps) ** 0.5)

    def __call__(
        self, x_TE: Tensor, turns: Rotation | PairRotation, batch: Batch, slots: Slots
    ) -> Tensor:
        """Logits of the rows that are read, from all rows' embeddings."""
        hidden = Hidden(F.pad(x_TE, (0, 1), value=self._least))
        calls = looks(batch, self._shape, x_TE.dtype)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv_TN = hidden.times(layer.qkv, layer.norm_attn)
            q_THD = self._written(index, layer, qkv_TN, turns, batch, slots)
            attended = hidden.memory(layer.out)
            for call in calls:
                self._attend(q_THD, slots.flat(index), call, attended.x_TI)
            hidden.x_TE.add_(layer.out.multiply(attended.finished()))
            if index == last and index not in slots.features:
                hidden = hidden.read(batch)
            self._feed_forward(layer, hidden)
            if slots.features:
                slots.keep_features(index, batch.slots_T, hidden.x_TE)
        if last in slots.features:
            hidden = hidden.read(batch)
        return hidden.times(self._head, self._norm)

    def _feed_forward(self, layer: CpuLayer, hidden: Hidden) -> None:
        inner = hidden.memory(layer.down)
        size = layer.down.layout.inputs
        gate_up_TN = hidden.times(layer.gate_up, layer.norm_mlp)
        gate = F.silu(gate_up_TN.narrow(1, 0, size))
        torch.mul(gate, gate_up_TN.narrow(1, size, size), out=inner.x_TI)
        hidden.x_TE.add_(layer.down.multiply(inner.finished()))

    def _written(
        self,
        index: int,
        layer: CpuLayer,
        qkv_TN: Tensor,
        turns: Rotation | PairRotation,
        batch: Batch,
        slots: Slots,
    ) -> Tensor:
        """Write the rows' keys and values to their slots; their queries, and perhaps more heads."""
        heads, key_heads, size = self._shape.heads, self._shape.key_heads, self._shape.head_dim
        rows, width = qkv_TN.shape
        turned = heads + key_heads
        qk_THD = qkv_TN.as_strided((rows, turned, size), (width, size, 1))
        if layer.q_norm is not None and layer.k_norm is not None:
            q_THD = self._head_norm(qk_THD[:, :heads], layer.q_norm)
            k_THD = self._head_norm(qk_THD[:, heads:], layer.k_norm)
            qk_THD.copy_(torch.cat([q_THD, k_THD], 1))
        if isinstance(turns, PairRotation):
            turns.turn(qk_THD)
            kv_TN = qkv_TN.narrow(1, heads * size, 2 * key_heads * size)
            slots.write_joined(index, batch.slots_T, kv_TN)
            return qk_THD
        qk_THD = turns.turned(qk_THD)
        values_TGD = qkv_TN.narrow(1, turned * size, key_heads * size)
        keys_TGD = qk_THD.narrow(1, heads, key_heads)
        slots.write(index, batch.slots_T, keys_TGD, values_TGD.view(keys_TGD.shape))
        return qk_THD

    def _head_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self._least_of_head)).mul_(weight)

    def _attend(
        self, q_THD: Tensor, kept: tuple[Tensor, Tensor], call: Look, into_TE: Tensor
    ) -> None:
        """Attention of the rows of a call, written to where the next product wants it."""
        b, n, g, d = call.sequences, call.rows, self._shape.key_heads, self._shape.head_dim
        fold = self._shape.heads // g
        k_BGSD, v_BGSD = (_seen(part, call) for part in kept)
        row = q_THD.stride(0)
        q = q_THD.as_strided(
            (b, g, fold, n, d), (n * row, fold * d, d, row, 1), call.offset * row
        ).reshape(b, g, fold * n, d)
        mask = call.mask
        # fewer rows would be multiplied in another way than more
        times = -(-fewest_together(d) // (fold * n)) if self._shape.slots_at_once > 1 else 1
        if times > 1:
            q = q.repeat(1, 1, times, 1)
            mask = None if mask is None else mask.repeat(1, 1, times, 1)
        seen_BGRD = F.scaled_dot_product_attention(q, k_BGSD, v_BGSD, attn_mask=mask, scale=d**-0.5)
        row = into_TE.stride(0)
        into = into_TE.as_strided(
            (b, g, fold, n, d), (n * row, fold * d, d, row, 1), call.offset * row
        )
        if times > 1:
            seen_BGRD = seen_BGRD[:, :, : fold * n].contiguous()
        into.copy_(seen_BGRD.view(into.shape))


def _seen(kept: Tensor, call: Look) -> Tensor:
    """Keys or values of the slots that a call looks at, [B, G, S, D]."""
    if call.places_S is not None:
        kept = kept[call.places_S]
    _, heads, size = kept.shape
    row = kept.stride(0)
    first = kept.storage_offset() + call.first * row
    return kept.as_strided(
        (call.sequences, heads, call.slots, size), (call.step * row, size, row, 1), first
    )


class Hidden:
    """The hidden states of some rows, and the memory that products of them need."""

    def __init__(self, all_TN: Tensor):
        self._all_TN = all_TN  # each beside the constant
        self.x_TE = all_TN[:, :-1]
        self._memory: dict[Layout, Inputs] = {}

    def memory(self, product: Product) -> Inputs:
        found = self._memory.get(product.layout)
        if found is None:
            found = Inputs(len(self.x_TE), product.layout, self.x_TE.dtype)
            self._memory[product.layout] = found
        return found

    def times(self, product: Product, norm: Tensor) -> Tensor:
        """The product of the rows, normed."""
        inputs = self.memory(product)
        length_T1 = torch.linalg.vector_norm(self._all_TN, dim=-1, keepdim=True)
        torch.div(self.x_TE, length_T1, out=inputs.x_TI)
        inputs.x_TI.mul_(norm)
        return product.multiply(inputs.finished())

    def read(self, batch: Batch) -> Hidden:
        """The rows that are read."""
        reads = batch.reads
        if len(reads) == len(self.x_TE) and (reads == np.arange(len(reads))).all():
            return self
        return Hidden(self._all_TN[batch.reads_R])
