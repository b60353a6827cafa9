"""Attention of packed rows over slots, in plain PyTorch. Query heads that share a key head are
folded into rows, so keys are never copied.

B sequences, T rows, H heads, G key heads (H/G query heads each), D head size, S slots. Values may
have another head size than keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.engine.cache import Slots
from forerun.engine.pack import Batch


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention in one forward: where its keys live and which slots each row sees."""

    layer: int
    batch: Batch
    slots: Slots
    scale: float
    window: int | None = None  # how many positions a row looks back; None: all
    softcap: float | None = None  # scores are bent so that none exceeds it
    sinks_H: Tensor | None = None  # a score of each head that takes weight from all slots


def attend(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, call: LayerAttention) -> Tensor:
    """Write keys and values to their slots, then attend: [T, H * D]."""
    batch = call.batch
    call.slots.write(call.layer, batch.slots_T, k_TGD, v_TGD)
    if batch.tiles is not None:
        # needs Triton, which only forwards on a GPU need
        from forerun.backbones.kernels.attention import attention

        return attention(call.layer, q_THD.contiguous(), batch.tiles, call.slots, call.scale)
    if batch.device.type == "cuda":
        return _side_by_side(q_THD, call)
    return _one_by_one(q_THD, call)


def _one_by_one(q_THD: Tensor, call: LayerAttention) -> Tensor:
    """Each sequence against its own slots: no padding, and no mask where every row sees all."""
    outputs = []
    keys, values = call.slots.flat(call.layer)
    for i, s in enumerate(call.batch.segments):
        q_BTHD = q_THD[None, s.offset : s.offset + s.rows]
        span = call.batch.span(i)
        bias = call.batch.attention_bias(i, call.window, q_THD.dtype)
        outputs.append(_product(q_BTHD, keys[span][None], values[span][None], bias, call)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _side_by_side(q_THD: Tensor, call: LayerAttention) -> Tensor:
    """All sequences in one call, padded to the longest, with a mask from the five integers."""
    padded = call.batch.padded(call.window)
    keys, values = call.slots.flat(call.layer)
    unseen_BS11 = padded.unseen_BS[:, :, None, None]  # what others left there may be no number
    out_BTE = _product(
        q_THD[padded.gather_BT],
        keys[padded.places_BS].masked_fill(unseen_BS11, 0),
        values[padded.places_BS].masked_fill(unseen_BS11, 0),
        padded.mask_BTS[:, None, None],
        call,
    )
    return out_BTE.flatten(0, 1)[padded.scatter_T]


def _product(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask: Tensor | None, call: LayerAttention
) -> Tensor:
    """Attention of rows to slots: [B, T, H * D]."""
    if call.softcap is None and call.sinks_H is None:
        return _grouped(q_BTHD, k_BSGD, v_BSGD, mask, call.scale)
    return _explicit(q_BTHD, k_BSGD, v_BSGD, mask, call)


def _explicit(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask: Tensor | None, call: LayerAttention
) -> Tensor:
    """The same in plain steps, for scores that torch's attention does not know."""
    groups = k_BSGD.shape[2]
    q_BTGFD = q_BTHD.unflatten(2, (groups, -1))
    scores_BGFTS = torch.einsum("btgfd,bsgd->bgfts", q_BTGFD, k_BSGD) * call.scale
    if call.softcap is not None:
        scores_BGFTS = call.softcap * torch.tanh(scores_BGFTS / call.softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores_BGFTS = scores_BGFTS.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores_BGFTS = scores_BGFTS + mask
    slots = scores_BGFTS.shape[-1]
    if call.sinks_H is not None:
        sinks = call.sinks_H.view(groups, -1, 1, 1).expand(*scores_BGFTS.shape[:-1], 1)
        scores_BGFTS = torch.cat([scores_BGFTS, sinks.to(scores_BGFTS.dtype)], -1)
    exact = torch.promote_types(scores_BGFTS.dtype, torch.float32)
    weights = scores_BGFTS.softmax(-1, dtype=exact).to(v_BSGD.dtype)[..., :slots]
    return torch.einsum("bgfts,bsgd->btgfd", weights, v_BSGD).flatten(2)


def _grouped(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Scaled dot-product attention with H/G query heads per key head folded into the row axis: [B,
    T, H * D]."""
    b, t, h, d = q_BTHD.shape
    g = k_BSGD.shape[2]
    # One row that sees everything: its heads are the folded rows already.
    if t == 1:
        q = q_BTHD.reshape(b, g, h // g, d)
        if mask is not None:
            mask = mask.view(-1, 1, 1, mask.shape[-1]).expand(b, 1, h // g, -1)
        return F.scaled_dot_product_attention(
            q, k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2), attn_mask=mask, scale=scale
        ).reshape(b, 1, -1)
    q = q_BTHD.reshape(b, t, g, h // g, d).permute(0, 2, 3, 1, 4).reshape(b, g, h // g * t, d)
    if mask is not None and h > g:
        mask = mask.expand(b, 1, h // g, t, mask.shape[-1]).reshape(b, 1, h // g * t, -1)
    elif mask is not None:
        mask = mask.view(-1, 1, t, mask.shape[-1])
    out = F.scaled_dot_product_attention(
        q, k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return out.view(b, g, h // g, t, -1).permute(0, 3, 1, 2, 4).reshape(b, t, -1)
