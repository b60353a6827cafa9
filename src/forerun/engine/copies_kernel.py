"""`copies.plain_copies` as one launch, a program per text."""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 1024  # tokens that are looked at side by side


@triton.jit
def _find(
    tokens, ends, last_tokens, drafts, length, count,
    RUN: tl.constexpr, SIZE: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    text = tl.program_id(0).to(tl.int64)
    tokens += text * length
    end = tl.load(ends + text)
    last = tl.load(last_tokens + text)
    best = tl.full((), -1, tl.int64)
    for start in range(0, length, STRETCH):
        place = start + tl.arange(0, STRETCH).to(tl.int64)
        same = (place < end) & (tl.load(tokens + place, place < end, -1) == last)
        agree = same.to(tl.int64)
        for back in tl.static_range(1, RUN):
            mine = tl.load(tokens + end - back, end >= back, -2)
            there = tl.load(tokens + place - back, (place < end) & (place >= back), -3)
            same = same & (there == mine)
            agree += same.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(agree > 0, agree * length + place, -1), 0))
    found = tl.maximum(best, 0) % length
    number = tl.arange(0, SIZE).to(tl.int64)
    at = found + 1 + number % tl.maximum(end - found, 1)
    copied = tl.where(at == end, last, tl.load(tokens + at, at < end, -1))
    tl.store(drafts + text * count + number, tl.where(best >= 0, copied, -1), number < count)


def find_copies(
    tokens_BT: Tensor, end_B: Tensor, token_B: Tensor, longest_run: int, count: int
) -> Tensor:
    texts, length = tokens_BT.shape
    drafts_BK = torch.empty(texts, count, dtype=torch.long, device=tokens_BT.device)
    with torch.cuda.device_of(tokens_BT):
        _find[(texts,)](
            tokens_BT.contiguous(),
            end_B.contiguous(),
            token_B.contiguous(),
            drafts_BK,
            length,
            count,
            RUN=longest_run,
            SIZE=triton.next_power_of_2(count),
            STRETCH=STRETCH,
            num_warps=4,
        )
    return drafts_BK
