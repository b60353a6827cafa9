"""Attention of packed rows over slots. Heads that share keys are folded into rows, so keys are never copied.

T rows, H heads, G key heads (H/G query heads each), D head size, S slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.engine.cache import Slots
from forerun.engine.pack import Batch


def attend(
    layer: int,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    batch: Batch,
    slots: Slots,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Write this layer's keys and values to their slots, then attend: [T, H * D]."""
    slots.write(layer, batch.slots_T, k_TGD, v_TGD)
    if batch.tiles is not None:
        from forerun.backbones.kernels import attention  # needs Triton, which only a GPU's forwards need

        return attention(layer, q_THD.contiguous(), batch.tiles, slots, scale)
    over = _side_by_side if batch.device.type == "cuda" else _one_by_one
    return over(q_THD, slots.keys[layer], slots.values[layer], batch, scale, window)


def _one_by_one(q_THD: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
    """Each sequence against its own slots: no padding, and no mask where every row sees everything."""
    outputs = []
    for i, s in enumerate(batch.segments):
        q_BTHD = q_THD[None, s.offset : s.offset + s.rows]
        mask = batch.sight(i, window, q_THD.dtype)
        outputs.append(_grouped(q_BTHD, keys[s.lane, None, : s.end], values[s.lane, None, : s.end], mask, scale)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _side_by_side(q_THD: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
    """All sequences in one call, padded to the longest, with the mask that the five integers say."""
    pad = batch.padded(window)
    out_BTE = _grouped(
        q_THD[pad.gather_BT],
        keys[pad.lanes, : pad.slots],
        values[pad.lanes, : pad.slots],
        pad.mask_BTS[:, None, None],
        scale,
    )
    return out_BTE.flatten(0, 1)[pad.scatter_T]


def _grouped(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Scaled dot-product attention with H/G query heads per key head folded into the row axis: [B, T, H * D]."""
    b, t, h, d = q_BTHD.shape
    g = k_BSGD.shape[2]
    if t == 1 and mask is None:  # one row that sees everything: its heads are the folded rows already
        q = q_BTHD.reshape(b, g, h // g, d)
        return F.scaled_dot_product_attention(q, k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2), scale=scale).reshape(b, 1, h * d)
    q = q_BTHD.reshape(b, t, g, h // g, d).permute(0, 2, 3, 1, 4).reshape(b, g, h // g * t, d)
    if mask is not None and h > g:
        mask = mask.expand(b, 1, h // g, t, mask.shape[-1]).reshape(b, 1, h // g * t, -1)
    elif mask is not None:
        mask = mask.view(-1, 1, t, mask.shape[-1])
    out = F.scaled_dot_product_attention(q, k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.view(b, g, h // g, t, d).permute(0, 3, 1, 2, 4).reshape(b, t, h * d)
