"""Laws and draws over a vocabulary, in two launches each, on a GPU.

Plain code passes over a vocabulary a dozen times, and where rows are few most of the GPU waits for
one block per row. Here every row is cut into stretches, which are looked at side by side; then what
was found in them is put together. Cuts hang on the vocabulary alone, so a row has the same bits in
any company.

R rows, V vocabulary, C stretches, W words of a bitmask. Numbers are float32, sums of laws that are
drawn from float64: draws are those of the plain code (`noise.py`) but for roundings. Triton
launches on the current device, which need not be the logits' own.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 2048  # outcomes
CHAIN_STRETCH = 256  # the same where each has a row of a matrix
WARPS = 4


@triton.jit
def _possible(logits, masks, row, at, vocab, words, MASKED: tl.constexpr):
    """Logits of a stretch as float32, and nothing for what is not allowed."""
    inside = at < vocab
    x = tl.load(logits + row * vocab + at, inside, -float("inf")).to(tl.float32)
    if MASKED:
        word = tl.load(masks + row * words + at // 32, inside, 0)
        x = tl.where((word >> (at % 32)) & 1 == 1, x, -float("inf"))
    return x


@triton.jit
def _peaks(
    logits, masks, temperatures, best, where, total, vocab, words, stretches,
    WARM: tl.constexpr, MASKED: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """Of every stretch the largest logit, its first token, and the sum of exp((x - largest) / T).
    What is no number counts as the largest."""
    row = tl.program_id(0).to(tl.int64)
    place = row * stretches + tl.program_id(1)
    at = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    x = _possible(logits, masks, row, at, vocab, words, MASKED)
    numbers = tl.where(x == x, x, float("inf"))
    top = tl.max(numbers, 0)
    is_none = tl.max((x != x).to(tl.int32), 0) > 0
    tl.store(best + place, tl.where(is_none, float("nan"), top))
    tl.store(where + place, tl.min(tl.where(numbers == top, at, vocab), 0))
    if WARM:
        mass = tl.sum(tl.exp((numbers - top) / tl.load(temperatures + row)), 0)
        tl.store(total + place, tl.where(top == -float("inf"), 0.0, mass))


@triton.jit
def _highest_peak(best, row, stretches, SIZE: tl.constexpr):
    """All peaks of a row, the highest, and whether any is no number."""
    at = tl.arange(0, SIZE)
    peak = tl.load(best + row * stretches + at, at < stretches, -float("inf"))
    is_none = tl.max((peak != peak).to(tl.int32), 0) > 0
    return peak, tl.max(tl.where(peak == peak, peak, float("inf")), 0), is_none


@triton.jit
def _first_highest(best, where, row, stretches, SIZE: tl.constexpr):
    """The first token of the highest peak of a row; -1 where there is none, or logits are not
    numbers."""
    at = tl.arange(0, SIZE)
    inside = at < stretches
    peak, top, is_none = _highest_peak(best, row, stretches, SIZE)
    tokens = tl.load(where + row * stretches + at, inside, 0)
    first = tl.min(tl.where(inside & (peak == top), tokens, 2147483647), 0)
    return tl.where(is_none | (top == -float("inf")), -1, first).to(tl.int64)


@triton.jit
def _highest(best, where, token, stretches, SIZE: tl.constexpr):
    """The likeliest token of a row, or -1."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(token + row, _first_highest(best, where, row, stretches, SIZE))


@triton.jit
def _softmax(
    logits, masks, temperatures, best, total, out, vocab, words, stretches,
    MASKED: tl.constexpr, STRETCH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """exp((x - largest) / T) over its sum, for one stretch."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    peak, top, is_none = _highest_peak(best, row, stretches, SIZE)
    part = tl.arange(0, SIZE)
    mass = tl.load(total + row * stretches + part, part < stretches, 0.0)
    whole = tl.sum(mass * tl.exp((peak - top) / temperature), 0)
    at = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    x = _possible(logits, masks, row, at, vocab, words, MASKED)
    law = tl.exp((x - top) / temperature) / whole
    tl.store(out + row * vocab + at, tl.where(is_none, float("nan"), law), at < vocab)


@triton.jit
def _sums(law, total, vocab, stretches, STRETCH: tl.constexpr):
    """The mass of a stretch."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    p = tl.load(law + row * vocab + at, at < vocab, 0.0).to(tl.float64)
    tl.store(total + row * stretches + tl.program_id(1), tl.sum(p, 0))


@triton.jit
def _at_level(mass, level, SIZE: tl.constexpr):
    """The first place whose cumulative mass exceeds a level, never one without mass: after a
    rounding the next that has some, or else the last."""
    at = tl.arange(0, SIZE)
    cumulative = tl.cumsum(mass, 0)
    exceeds = tl.min(tl.where(cumulative > level, at, SIZE), 0)
    following = tl.min(tl.where((at >= exceeds) & (mass > 0), at, SIZE), 0)
    last = tl.max(tl.where(mass > 0, at, 0), 0)
    place = tl.where(following < SIZE, following, last)
    return place, tl.sum(tl.where(at < place, mass, 0.0), 0)


@triton.jit
def _draw(
    law, total, u, outcome, vocab, stretches, STRETCH: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The outcome at a quantile: the stretch where it lies, and the place in it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SIZE)
    mass = tl.load(total + row * stretches + part, part < stretches, 0.0)
    whole = tl.sum(mass, 0)
    level = tl.load(u + row) * whole
    stretch, before = _at_level(mass, level, SIZE)
    at = stretch * STRETCH + tl.arange(0, STRETCH)
    p = tl.load(law + row * vocab + at, at < vocab, 0.0).to(tl.float64)
    place, _ = _at_level(p, level - before, STRETCH)
    found = stretch * STRETCH + place
    tl.store(outcome + row, tl.where(whole > 0, found, -1).to(tl.int64))


@triton.jit
def _chain_peaks(
    logits, last, before, after, best, where, tokens, step, count, vocab, stretches, rows, rank,
    FIRST: tl.constexpr, STRETCH: tl.constexpr, SIZE: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Of one stretch of a sequence's logits at a step, moved by the token before, the peak. The
    token before is the highest of the last step's peaks. Peaks of two steps lie side by side."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if FIRST:
        token = tl.load(last + row)
    else:
        peaks = ((step - 1) % 2) * rows * stretches + row * stretches
        parts = tl.arange(0, SIZE)
        inside = parts < stretches
        peak = tl.load(best + peaks + parts, inside, -float("inf"))
        found = tl.load(where + peaks + parts, inside, 0)
        highest = inside & (peak == tl.max(peak, 0))
        token = tl.min(tl.where(highest, found, 2147483647), 0).to(tl.int64)
        if part == 0:
            tl.store(tokens + row * count + step - 1, token)
    at = part * STRETCH + tl.arange(0, STRETCH)
    own = logits + (row * count + step) * vocab
    x = tl.load(own + at, at < vocab, -float("inf")).to(tl.float32)
    x = tl.where(x == x, x, -float("inf"))  # what is no number has no token
    r = tl.arange(0, RANK)
    of_token = tl.load(before + tl.maximum(token, 0) * rank + r, r < rank, 0.0).to(tl.float32)
    possible = (x > -float("inf"))[:, None] & (r < rank)[None]
    moves = tl.load(after + at.to(tl.int64)[:, None] * rank + r[None], possible, 0.0)
    x += tl.sum(moves.to(tl.float32) * of_token[None], 1)
    top = tl.max(x, 0)
    place = (step % 2) * rows * stretches + row * stretches + part
    tl.store(best + place, top)
    tl.store(where + place, tl.min(tl.where(x == top, at, 2147483647), 0))


@triton.jit
def _last_of_chain(best, where, tokens, count, stretches, SIZE: tl.constexpr):
    """The highest of the last step's peaks; the first token where nothing is possible."""
    row = tl.program_id(0).to(tl.int64)
    token = _first_highest(best, where, row, stretches, SIZE)
    tl.store(tokens + row * count + count - 1, tl.maximum(token, 0))


@triton.jit
def _verdict(
    best, where, drafts, accepted, token, out, stretches,
    SIZE: tl.constexpr, DRAFTED: tl.constexpr,
):  # fmt: skip
    """How many tokens of a sequence's draft are the likeliest ones, and the likeliest one behind
    them; -1 where there is none."""
    row = tl.program_id(0).to(tl.int64)
    going = tl.full((), 1, tl.int64)
    count = tl.full((), 0, tl.int64)
    behind = tl.full((), -1, tl.int64)
    for number in tl.static_range(0, DRAFTED + 1):
        said = _first_highest(best, where, row * (DRAFTED + 1) + number, stretches, SIZE)
        behind = tl.where(going == 1, said, behind)
        if number < DRAFTED:
            own = tl.load(drafts + row * DRAFTED + number)
            tl.store(out + row * (DRAFTED + 2) + number, own)
            going = tl.where((own >= 0) & (own == said), going, 0)
            count += going
    tl.store(out + row * (DRAFTED + 2) + DRAFTED, count)
    tl.store(out + row * (DRAFTED + 2) + DRAFTED + 1, behind)
    tl.store(accepted + row, count)
    tl.store(token + row, tl.maximum(behind, 0))


def judge_rows(
    logits_RV: Tensor, drafted_BK: Tensor, accepted_B: Tensor, token_B: Tensor
) -> Tensor:
    """`certain.judge_rows` in two launches."""
    drafted_BK = drafted_BK.contiguous()
    texts, drafted = drafted_BK.shape
    out_BX = torch.empty(texts, drafted + 2, dtype=torch.long, device=drafted_BK.device)
    with torch.cuda.device_of(logits_RV):
        peaks = _Peaks(logits_RV, None)
        _verdict[(texts,)](
            peaks.best_RC, peaks.where_RC, drafted_BK, accepted_B, token_B, out_BX,
            peaks.stretches, SIZE=peaks.size, DRAFTED=drafted, num_warps=1,
        )  # fmt: skip
    return out_BX


def likeliest_chain(
    logits_BKV: Tensor, last_B: Tensor, before_VR: Tensor, after_VR: Tensor
) -> Tensor:
    """The likeliest token of each of some logits, [B, K], from left to right: each are moved by
    before[token before it] times after."""
    logits_BKV = logits_BKV.contiguous()
    rows, count, vocab = logits_BKV.shape
    rank = after_VR.shape[1]
    device = logits_BKV.device
    stretches = triton.cdiv(vocab, CHAIN_STRETCH)
    size = triton.next_power_of_2(stretches)
    best_2BC = torch.empty(2, rows, stretches, dtype=torch.float32, device=device)
    where_2BC = torch.empty(2, rows, stretches, dtype=torch.int32, device=device)
    tokens_BK = torch.empty(rows, count, dtype=torch.long, device=device)
    with torch.cuda.device_of(logits_BKV):
        for step in range(count):
            _chain_peaks[(rows, stretches)](
                logits_BKV,
                last_B.contiguous(),
                before_VR.contiguous(),
                after_VR.contiguous(),
                best_2BC,
                where_2BC,
                tokens_BK,
                step,
                count,
                vocab,
                stretches,
                rows,
                rank,
                FIRST=step == 0,
                STRETCH=CHAIN_STRETCH,
                SIZE=size,
                RANK=triton.next_power_of_2(rank),
                num_warps=WARPS,
            )
        last = (count - 1) % 2
        _last_of_chain[(rows,)](
            best_2BC[last], where_2BC[last], tokens_BK, count, stretches, SIZE=size, num_warps=1
        )
    return tokens_BK


def likeliest(logits_RV: Tensor, masks_RW: Tensor | None = None) -> Tensor:
    """The first of the likeliest tokens, [R]; -1 where none is possible, or logits are not
    numbers."""
    with torch.cuda.device_of(logits_RV):
        peaks = _Peaks(logits_RV, masks_RW)
        token_R = torch.empty(len(logits_RV), dtype=torch.long, device=logits_RV.device)
        _highest[(len(token_R),)](
            peaks.best_RC, peaks.where_RC, token_R, peaks.stretches, SIZE=peaks.size, num_warps=1
        )
    return token_R


def laws(logits_RV: Tensor, temperature_R: Tensor, masks_RW: Tensor | None = None) -> Tensor:
    """The softmax of allowed logits over their temperature, [R, V]."""
    rows, vocab = logits_RV.shape
    out_RV = torch.empty(rows, vocab, dtype=torch.float32, device=logits_RV.device)
    with torch.cuda.device_of(logits_RV):
        peaks = _Peaks(logits_RV, masks_RW, temperature_R)
        _softmax[(rows, peaks.stretches)](
            peaks.logits_RV,
            peaks.masks_RW,
            peaks.temperature_R,
            peaks.best_RC,
            peaks.total_RC,
            out_RV,
            vocab,
            peaks.words,
            peaks.stretches,
            MASKED=masks_RW is not None,
            STRETCH=STRETCH,
            SIZE=peaks.size,
            num_warps=WARPS,
        )
    return out_RV


def pick(law_NV: Tensor, u_N: Tensor) -> Tensor:
    """The outcome at quantile u of each law, [N]; -1 of a law without mass."""
    law_NV = law_NV.contiguous()
    rows, vocab = law_NV.shape
    stretches = triton.cdiv(vocab, STRETCH)
    total_NC = torch.empty(rows, stretches, dtype=torch.float64, device=law_NV.device)
    outcome_N = torch.empty(rows, dtype=torch.long, device=law_NV.device)
    with torch.cuda.device_of(law_NV):
        _sums[(rows, stretches)](
            law_NV, total_NC, vocab, stretches, STRETCH=STRETCH, num_warps=WARPS
        )
        _draw[(rows,)](
            law_NV,
            total_NC,
            u_N.contiguous(),
            outcome_N,
            vocab,
            stretches,
            STRETCH=STRETCH,
            SIZE=triton.next_power_of_2(stretches),
            num_warps=WARPS,
        )
    return outcome_N


class _Peaks:
    """The largest logits of every stretch, and (with temperatures) the mass below them."""

    def __init__(
        self,
        logits_RV: Tensor,
        masks_RW: Tensor | None,
        temperature_R: Tensor | None = None,
    ):
        self.logits_RV = logits_RV.contiguous()
        rows, vocab = logits_RV.shape
        device = logits_RV.device
        self.stretches = triton.cdiv(vocab, STRETCH)
        self.size = triton.next_power_of_2(self.stretches)
        self.best_RC = torch.empty(rows, self.stretches, dtype=torch.float32, device=device)
        self.where_RC = torch.empty(rows, self.stretches, dtype=torch.int32, device=device)
        self.total_RC = torch.empty_like(self.best_RC)
        # kernels that do not look at them get them all the same
        self.masks_RW = self.where_RC if masks_RW is None else masks_RW.contiguous()
        self.words = self.masks_RW.shape[1]
        self.temperature_R = self.best_RC if temperature_R is None else temperature_R.contiguous()
        _peaks[(rows, self.stretches)](
            self.logits_RV,
            self.masks_RW,
            self.temperature_R,
            self.best_RC,
            self.where_RC,
            self.total_RC,
            vocab,
            self.words,
            self.stretches,
            WARM=temperature_R is not None,
            MASKED=masks_RW is not None,
            STRETCH=STRETCH,
            num_warps=WARPS,
        )
