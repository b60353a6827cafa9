"""XLNet with slots: two-stream relative attention whose keys and values are kept (Guo & Ermon,
appendix F.4).

A row that does not see its own slot is a query: it starts from the learnt mask vector and writes
nothing. The library's `mems` cannot serve here, because they hold hidden states of what came before
a segment, at consecutive positions. We keep the content stream's keys and values, and gather
position scores by the distance between two rows.

T rows, S slots, E hidden size, H heads, D head size, P distances from -(context - 1) to context -
1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.engine.backbone import SlottedBackbone
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch, Segment, visible
from forerun.errors import NotAble
from forerun.sequence.rows import HI, HORIZON, LO, POSITION

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    qkv: Tensor  # [3HD, E]
    out: Tensor  # [E, HD]
    content_bias: Tensor  # [H, D]
    position_bias: Tensor  # [H, D]
    position_keys: Tensor  # [P, H, D]
    norm: nn.Module
    feed_forward: nn.Module


class XLNetBackbone(SlottedBackbone):
    """Rows to logits with an XLNet checkpoint's weights."""

    def __init__(self, model: PreTrainedModel, vocab: int, context: int):
        config: Any = model.config
        base: Any = model.transformer
        head: Any = model.lm_loss
        if config.attn_type != "bi" or config.bi_data:
            raise NotAble(
                f"an XLNet with attn_type={config.attn_type!r}, bi_data={config.bi_data} is not an "
                "any-subset model."
            )
        self.vocab = vocab
        self.context = context
        self.device = model.device
        self.dtype = model.dtype
        self.cost = float(sum(p.numel() for p in model.parameters()))
        self.layers = config.n_layer
        self.heads = config.n_head
        self.key_heads = config.n_head
        self.head_dim = config.d_head
        self.embed: Tensor = base.word_embedding.weight.detach()
        self.query_E = base.mask_emb.detach().flatten()
        self.head: Tensor = head.weight.detach()[:vocab]
        self.head_bias: Tensor = head.bias.detach()[:vocab]
        waves_PE = _waves(context, config.d_model, config.clamp_len).to(self.device, self.dtype)
        model.eval()
        self.stack = [_take_layer(layer, waves_PE) for layer in base.layer]

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        is_query = np.concatenate([queries(s) for s in batch.segments])
        query_T = torch.from_numpy(is_query).to(self.device)
        content = (~query_T).nonzero().squeeze(-1)
        views = [SegmentView(s, self.context, batch, i) for i, s in enumerate(batch.segments)]
        x_TE = torch.where(query_T[:, None], self.query_E, self.embed[batch.tokens_T])
        for index, layer in enumerate(self.stack):
            qkv = F.linear(x_TE, layer.qkv).unflatten(-1, (3, self.heads, self.head_dim))
            q, k, v = qkv.unbind(1)
            slots.write(index, batch.slots_T[content], k[content], v[content])
            keys, values = slots.flat(index)
            seen = [self._attend(layer, q, keys, values, view) for view in views]
            x_TE = layer.norm(x_TE + F.linear(torch.cat(seen), layer.out))
            if index == self.layers - 1:
                x_TE = x_TE[batch.reads_R]
            x_TE = layer.feed_forward(x_TE)
        return F.linear(x_TE, self.head, self.head_bias)

    def _attend(
        self, layer: Layer, q_all: Tensor, keys: Tensor, values: Tensor, view: SegmentView
    ) -> Tensor:
        segment = view.segment
        q_THD = q_all[segment.offset : segment.offset + segment.rows]
        keys_SHD = keys[view.span]
        values_SHD = values[view.span]
        if view.unseen_S is not None:  # whatever an earlier request left there, times zero
            values_SHD = values_SHD.masked_fill(view.unseen_S[:, None, None], 0)
        by_content = torch.einsum("thd,shd->hts", q_THD + layer.content_bias, keys_SHD)
        by_distance = torch.einsum(
            "thd,phd->htp", q_THD + layer.position_bias, layer.position_keys[view.distances]
        )
        by_position = by_distance.gather(-1, view.distance_TS.expand(self.heads, -1, -1))
        scores = (by_content + by_position) * self.head_dim**-0.5
        law_HTS = scores.masked_fill(~view.mask_TS, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", law_HTS, values_SHD).flatten(1)


class SegmentView:
    """What the rows of one segment see: which slots, and at which distance."""

    def __init__(self, segment: Segment, context: int, batch: Batch, index: int):
        self.segment = segment
        self.span = batch.span(index)
        device = batch.device
        position = segment.plan.rows[POSITION].astype(np.int64)
        distance_TS = segment.rows_to_run()[POSITION, :, None].astype(np.int64) - position
        nearest = int(distance_TS.min())
        furthest = int(distance_TS.max())
        # the part of the table of distances that is needed, and each slot's place in it
        self.distances = slice(nearest + context - 1, furthest + context)
        self.distance_TS = torch.from_numpy(distance_TS - nearest).to(device)
        mask_TS = visible(segment)
        self.mask_TS = torch.from_numpy(mask_TS).to(device)
        unseen_S = ~mask_TS.any(0)
        self.unseen_S = torch.from_numpy(unseen_S).to(device) if unseen_S.any() else None


def queries(segment: Segment) -> np.ndarray:
    """Which rows do not see themselves."""
    slot = np.arange(segment.start, segment.end)
    rows = segment.rows_to_run()
    return (rows[HORIZON] <= slot) & ~((rows[LO] <= slot) & (slot < rows[HI]))


def _waves(context: int, size: int, clamp: int) -> Tensor:
    """Sines and cosines of every distance, as XLNet makes them."""
    distance = torch.arange(-(context - 1), context, dtype=torch.float32)
    if clamp > 0:
        distance = distance.clamp(-clamp, clamp)
    angle = torch.outer(distance, 1 / torch.pow(10000, torch.arange(0, size, 2.0) / size))
    return torch.cat([angle.sin(), angle.cos()], -1)


def _take_layer(layer: nn.Module, waves_PE: Tensor) -> Layer:
    attn: Any = layer.rel_attn
    qkv = [attn.q.detach(), attn.k.detach(), attn.v.detach()]  # each [E, H, D]
    return Layer(
        qkv=torch.cat([w.flatten(1).T for w in qkv]),
        out=attn.o.detach().flatten(1),
        content_bias=attn.r_w_bias.detach(),
        position_bias=attn.r_r_bias.detach(),
        position_keys=torch.einsum("pe,ehd->phd", waves_PE, attn.r.detach()),
        norm=attn.layer_norm,
        feed_forward=cast("nn.Module", layer.ff),
    )
