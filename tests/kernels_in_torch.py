"""Our kernels in plain PyTorch, for tests of what surrounds them: fixed memory, tiles and rows are
read as the kernels read them, and Triton's interpreter is a hundred times slower."""

import torch
import torch.nn.functional as F

from forerun.backbones.kernels import attention as attention_file
from forerun.backbones.kernels import elementwise, matmul


def norm(x_TE, weight_E, eps, given=None):
    normed_TE = F.rms_norm(x_TE, x_TE.shape[-1:], weight_E, eps)
    if given is None:
        return normed_TE
    return torch.where((given.tokens_T >= given.first)[:, None], given.rows_TE, normed_TE)


def swiglu(gate_up_T2I):
    gate, up = gate_up_T2I.chunk(2, -1)
    return F.silu(gate) * up


def rotate_and_keep(layer, qkv_TN, rotary, batch, slots):
    groups, dim = slots.flat(layer)[0].shape[1:]
    x_THD = qkv_TN.unflatten(-1, (-1, dim))
    k_and_q = x_THD[:, :-groups]
    if rotary.q_norm_D is not None:
        weights = (rotary.q_norm_D, rotary.k_norm_D)
        parts = zip(k_and_q.split([k_and_q.shape[1] - groups, groups], 1), weights)
        k_and_q = torch.cat([norm(x, weight, rotary.eps) for x, weight in parts], 1)
    cos, sin = (table[batch.positions_T][:, None] for table in (rotary.cos_CD, rotary.sin_CD))
    rotated = k_and_q * cos + k_and_q.roll(dim // 2, -1) * sin
    slots.write(layer, batch.slots_T, rotated[:, -groups:], x_THD[:, -groups:])
    return rotated[:, :-groups]


def attention(layer, q_THD, tiles, slots, scale):
    out_THD = torch.zeros_like(q_THD)
    horizon, row_lo, row_hi = tiles.spans_3T[..., None]
    for first, size, lane, near, lo, far in tiles.bounds_6N.T.tolist():
        if not size:  # padding
            continue
        rows = slice(first, first + size)
        slot = torch.tensor([*range(near), *range(lo, far)], dtype=torch.long)
        table = slots.table
        places = table.on_device[lane * table.per_lane + slot // table.size] + slot % table.size
        keys, values = (kept[places] for kept in slots.flat(layer))
        fold = q_THD.shape[1] // keys.shape[1]
        sees = (slot < horizon[rows]) | ((row_lo[rows] <= slot) & (slot < row_hi[rows]))
        scores = torch.einsum("thd,shd->ths", q_THD[rows], keys.repeat_interleave(fold, 1)) * scale
        weights = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1)
        out_THD[rows] = torch.einsum("ths,shd->thd", weights, values.repeat_interleave(fold, 1))
    return out_THD.flatten(1)


def use(monkeypatch):
    """Where there is no GPU, forwards over fixed memory go by these."""
    if torch.cuda.is_available():
        return
    for file, name in (
        (matmul, "norm"),
        (matmul, "swiglu"),
        (elementwise, "norm"),
        (elementwise, "rotate_and_keep"),
        (attention_file, "attention"),
    ):
        monkeypatch.setattr(file, name, globals()[name])
