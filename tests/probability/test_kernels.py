"""Kernels for laws and draws give what the plain code gives, in any company."""

import math
import os
import subprocess
import sys

import pytest
import torch

from forerun.constraints.base import words
from forerun.probability.acceptance import keep_foreseen
from forerun.probability.certain import judge_rows
from forerun.probability.logits import Warp, likeliest, masked_by
from forerun.probability.markov import Markov
from forerun.probability.noise import pick_by_sums

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("forerun.probability.kernels")

ON = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARIES = [5, kernels.STRETCH, 2 * kernels.STRETCH + 77]
WARM = Warp(cold=False, warm=True, top_k=0, top_p=False, min_p=False)


def some_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rounded, so that many are equal; the last row has no possible token, the one before it
    something that is no number."""
    logits = (4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))).round()
    logits[0, ::2] = -math.inf
    logits[-1] = -math.inf
    logits[-2, vocab // 2] = math.nan
    return logits.to(dtype).to(ON)


def some_masks(rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    size = (rows, words(vocab))
    return torch.randint(-(2**31), 2**31, size, generator=generator, dtype=torch.int32).to(ON)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_likeliest_is_the_first_of_the_largest(vocab, dtype, masked):
    logits = some_logits(6, vocab, dtype)
    masks = some_masks(6, vocab) if masked else None
    best, token = masked_by(logits.cpu(), None if masks is None else masks.cpu()).max(-1)
    expected = torch.where(best > -math.inf, token, -1)
    assert kernels.likeliest(logits, masks).tolist() == expected.tolist()


@pytest.mark.parametrize("vocab", [5, kernels.CHAIN_STRETCH, 2 * kernels.CHAIN_STRETCH + 77])
@pytest.mark.parametrize("rank", [1, 3, 4])
def test_a_chain_of_likeliest_tokens_is_that_of_the_plain_code(vocab, rank):
    """Whole numbers, so that both add exactly; one law has no possible token."""
    some = torch.Generator().manual_seed(vocab + rank)
    before, after = (
        torch.randint(-3, 4, (vocab, rank), generator=some).to(ON, torch.bfloat16) for _ in "ab"
    )
    logits = torch.randint(-9, 0, (3, 4, vocab), generator=some).float()
    logits[:, :, 1::3] = -math.inf
    logits[1, 2] = -math.inf
    logits[2, 1] = math.nan  # which has no token, and must not be taken for one
    logits = logits.to(ON)
    last = torch.tensor([0, vocab - 1, 2], device=ON)
    markov = Markov(before.cpu().float(), after.cpu().float())
    plain = logits.cpu().nan_to_num(-math.inf, neginf=-math.inf)
    expected = markov.likeliest_chain(plain, last.cpu())
    found = kernels.likeliest_chain(logits, last, before, after)
    assert found.tolist() == expected.tolist()
    alone = kernels.likeliest_chain(logits[1:2], last[1:2], before, after)
    assert alone.tolist() == found[1:2].tolist()


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_drafts_are_judged_as_by_the_plain_code(vocab):
    """All of a draft is right, some of it, nothing; a token is missing in it; a law has none."""
    logits = some_logits(7, vocab)[:5].repeat(4, 1)
    logits[3] = -math.inf
    logits[5, vocab - 1] = math.nan
    said = likeliest(logits.cpu()).view(5, 4)
    drafted = said[:, :3].clone()
    drafted[2, 1] += 1
    drafted[3, 0] += 1
    drafted[4, 2] = -1
    found = [torch.full((5,), 9, device=ON) for _ in "ab"]
    plain = [torch.full((5,), 9) for _ in "ab"]
    expected = judge_rows(logits.cpu(), drafted, *plain)
    rows = kernels.judge_rows(logits, drafted.to(ON), *found)
    assert rows.tolist() == expected.tolist()
    assert [one.tolist() for one in found] == [one.tolist() for one in plain]
    assert {0, 1, 2, 3} >= set(plain[0].tolist()) and -1 in expected[:, -1]
    verdict = keep_foreseen(drafted, said)
    assert [verdict.accepted.tolist(), verdict.token.tolist()] == expected[:, -2:].T.tolist()


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("masked", [False, True])
def test_laws_are_those_of_the_plain_code(vocab, masked):
    logits = some_logits(6, vocab)
    masks = some_masks(6, vocab) if masked else None
    temperature = torch.tensor([0.5, 1.0, 2.0, 1e-3, 1.0, 1.0], device=ON)
    columns = torch.zeros(4, 6, dtype=torch.float64)
    columns[0] = temperature
    plain = WARM.laws(logits.cpu(), columns, None if masks is None else masks.cpu())
    found = kernels.laws(logits, temperature, masks).cpu()
    assert torch.allclose(found, plain, rtol=1e-5, atol=1e-9, equal_nan=True)
    assert found[-1].isnan().all() and not found[:4].isnan().any()
    assert found[-2].isnan().all() or masked  # which may hide what is no number


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_draws_are_those_of_the_plain_code(vocab):
    rows = 64
    law = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(2)).to(ON)
    law[:, ::3] = 0
    law[-1] = 0
    law[-2, 1] = math.nan
    u = torch.rand(rows, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(ON)
    found = kernels.pick(law, u)
    assert found.tolist() == pick_by_sums(law, u).tolist()
    assert found[-2:].tolist() == [-1, -1]


@pytest.mark.parametrize("u", [0.0, 2.0**-49, 0.5, 1 - 2.0**-48, 1.0])
def test_no_draw_has_probability_zero(u):
    """Not even at the ends, or where roundings of sums leave nothing above the level."""
    vocab = 2 * kernels.STRETCH + 5
    law = torch.zeros(2, vocab, device=ON)
    law[0, 7] = 1e-30
    law[1, kernels.STRETCH + 1 : kernels.STRETCH + 9] = 0.1
    level = torch.full((2,), u, dtype=torch.float64, device=ON)
    first, second = kernels.pick(law, level).tolist()
    assert first == 7
    assert law[1, second] > 0


def test_a_row_has_the_same_bits_in_any_company():
    logits = some_logits(6, 5000, torch.bfloat16)
    temperature = torch.linspace(0.5, 2, 6, device=ON)
    together = kernels.laws(logits, temperature)
    for row in range(4):
        alone = kernels.laws(logits[row : row + 1], temperature[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_a_quantile_that_is_off_by_a_ten_thousandth_is_caught(monkeypatch):
    right = kernels.pick
    monkeypatch.setattr(kernels, "pick", lambda law, u: right(law, (u + 1e-4) % 1))
    with pytest.raises(AssertionError):
        test_draws_are_those_of_the_plain_code(VOCABULARIES[-1])


def test_a_mask_of_the_wrong_row_is_caught(monkeypatch):
    right = kernels.likeliest
    monkeypatch.setattr(
        kernels,
        "likeliest",
        lambda logits, masks=None: right(logits, None if masks is None else masks.roll(1, 0)),
    )
    with pytest.raises(AssertionError):
        test_likeliest_is_the_first_of_the_largest(VOCABULARIES[-1], torch.float32, True)


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from forerun.probability import kernels

single, sizes = "*fp32", dict.fromkeys(("vocab", "words", "stretches"), "i32")
given = dict(logits="*bf16", masks="*i32", temperatures=single, where="*i32", token="*i64")
given |= dict(best=single, total=single, out=single, **sizes)
drawn = dict(law=single, total="*fp64", u="*fp64", outcome="*i64", **sizes)
chain = dict.fromkeys(("step", "count", "rows", "rank"), "i32") | given
chain |= dict(last="*i64", before="*bf16", after="*bf16", tokens="*i64")
judged = given | dict.fromkeys(("drafts", "accepted", "token", "out"), "*i64")
spans = dict(STRETCH=kernels.STRETCH)
for kernel, types, fixed in (
    (kernels._peaks, given, dict(WARM=True, MASKED=True, **spans)),
    (kernels._highest, given, dict(SIZE=32)),
    (kernels._softmax, given, dict(MASKED=True, SIZE=32, **spans)),
    (kernels._sums, drawn, spans),
    (kernels._draw, drawn, dict(SIZE=128, **spans)),
    (kernels._chain_peaks, chain, dict(FIRST=False, STRETCH=256, SIZE=1024, RANK=64)),
    (kernels._last_of_chain, chain, dict(SIZE=1024)),
    (kernels._verdict, judged, dict(SIZE=32, DRAFTED=7)),
):
    signature = {n: "constexpr" if n in fixed else types[n] for n in kernel.arg_names}
    compile(ASTSource(kernel, signature, fixed, {}), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__)
"""


def test_they_compile_for_a_gpu_that_is_not_there():
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=plain, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    laws = ["_peaks", "_highest", "_softmax", "_sums", "_draw"]
    assert done.stdout.split() == [*laws, "_chain_peaks", "_last_of_chain", "_verdict"]
