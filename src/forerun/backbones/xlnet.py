"""XLNet with slots: two-stream relative attention whose keys and values are kept (Guo & Ermon, appendix F.4).

A row that does not see its own slot is a query: it starts from the learnt mask vector and writes nothing. The library's `mems`
cannot serve here: they hold hidden states of what came before a segment, at consecutive positions. We keep the content stream's
keys and values, and gather position scores by how far apart two rows stand.

T rows, S slots, E hidden size, H heads, D head size, P distances from -(context - 1) to context - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.engine.cache import Slots
from forerun.engine.pack import Batch, Segment, visible
from forerun.errors import NotAble
from forerun.rows import HI, HORIZON, LO, POSITION


@dataclass
class Layer:
    qkv: Tensor  # [3HD, E]
    out: Tensor  # [E, HD]
    content_bias: Tensor  # [H, D]
    position_bias: Tensor  # [H, D]
    position_keys: Tensor  # [P, H, D]
    norm: Any
    feed_forward: Any


class XLNetBackbone:
    """Rows to logits with an XLNet checkpoint's weights."""

    def __init__(self, model: Any, vocab: int, context: int):
        config, base = model.config, model.transformer
        if config.attn_type != "bi" or config.bi_data:
            raise NotAble(f"an XLNet with attn_type={config.attn_type!r}, bi_data={config.bi_data} is not an any-subset model.")
        self.vocab, self.context, self.device, self.dtype = vocab, context, model.device, model.dtype
        self.cost = float(sum(p.numel() for p in model.parameters()))
        self.heads, self.head_dim, self.layers = config.n_head, config.d_head, config.n_layer
        self.embed, self.query_E = base.word_embedding.weight.detach(), base.mask_emb.detach().flatten()
        self.head, self.head_bias = model.lm_loss.weight.detach()[:vocab], model.lm_loss.bias.detach()[:vocab]
        waves_PE = _waves(context, config.d_model, config.clamp_len).to(self.device, self.dtype)
        model.eval()
        self.stack = [_take_layer(layer, waves_PE) for layer in base.layer]

    def bytes_per_lane(self, context: int) -> int:
        return 2 * self.layers * context * self.heads * self.head_dim * self.dtype.itemsize

    def make_slots(self, lanes: int, context: int) -> Slots:
        return Slots(self.layers, lanes, context, self.heads, self.head_dim, self.dtype, self.device)

    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        query_T = torch.from_numpy(np.concatenate([queries(s) for s in batch.segments])).to(self.device)
        content = (~query_T).nonzero().squeeze(-1)
        sights = [Sight(s, self.context, self.device) for s in batch.segments]
        x_TE = torch.where(query_T[:, None], self.query_E, self.embed[batch.tokens_T])
        for index, layer in enumerate(self.stack):
            q, k, v = F.linear(x_TE, layer.qkv).unflatten(-1, (3, self.heads, self.head_dim)).unbind(1)
            slots.write(index, batch.slots_T[content], k[content], v[content])
            seen = [self._attend(s, sight, layer, q, slots, index) for s, sight in zip(batch.segments, sights)]
            x_TE = layer.norm(x_TE + F.linear(torch.cat(seen), layer.out))
            if index == self.layers - 1:
                x_TE = x_TE[batch.reads_R]
            x_TE = layer.feed_forward(x_TE)
        return F.linear(x_TE, self.head, self.head_bias)

    def _attend(self, segment: Segment, sight: Sight, layer: Layer, q_all: Tensor, slots: Slots, index: int) -> Tensor:
        q_THD = q_all[segment.offset : segment.offset + segment.rows]
        keys_SHD, values_SHD = slots.keys[index][segment.lane, : segment.end], slots.values[index][segment.lane, : segment.end]
        by_content = torch.einsum("thd,shd->hts", q_THD + layer.content_bias, keys_SHD)
        by_distance = torch.einsum("thd,phd->htp", q_THD + layer.position_bias, layer.position_keys[sight.distances])
        scores = (by_content + by_distance.gather(-1, sight.which_TS.expand(self.heads, -1, -1))) * self.head_dim**-0.5
        law_HTS = scores.masked_fill(~sight.mask_TS, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", law_HTS, values_SHD).flatten(1)


class Sight:
    """What the rows of one segment see: which slots, and how far away each of them stands."""

    def __init__(self, segment: Segment, context: int, device: torch.device):
        position = segment.plan.rows[POSITION].astype(np.int64)
        apart_TS = segment.run()[POSITION, :, None].astype(np.int64) - position
        nearest, furthest = int(apart_TS.min()), int(apart_TS.max())
        self.distances = slice(nearest + context - 1, furthest + context)  # the part of the table that is needed
        self.which_TS = torch.from_numpy(apart_TS - nearest).to(device)
        self.mask_TS = torch.from_numpy(visible(segment)).to(device)


def queries(segment: Segment) -> np.ndarray:
    """Which rows do not see themselves."""
    own, rows = np.arange(segment.start, segment.end), segment.run()
    return (rows[HORIZON] <= own) & ~((rows[LO] <= own) & (own < rows[HI]))


def _waves(context: int, size: int, clamp: int) -> Tensor:
    """Sines and cosines of every distance, as XLNet makes them."""
    distance = torch.arange(-(context - 1), context, dtype=torch.float32)
    if clamp > 0:
        distance = distance.clamp(-clamp, clamp)
    angle = torch.outer(distance, 1 / torch.pow(10000, torch.arange(0, size, 2.0) / size))
    return torch.cat([angle.sin(), angle.cos()], -1)


def _take_layer(layer: Any, waves_PE: Tensor) -> Layer:
    attn = layer.rel_attn
    q, k, v, o, r = (getattr(attn, name).detach() for name in "qkvor")  # each [E, H, D]
    return Layer(
        qkv=torch.cat([w.flatten(1).T for w in (q, k, v)]),
        out=o.flatten(1),
        content_bias=attn.r_w_bias.detach(),
        position_bias=attn.r_r_bias.detach(),
        position_keys=torch.einsum("pe,ehd->phd", waves_PE, r),
        norm=attn.layer_norm,
        feed_forward=layer.ff,
    )
