import pytest
import torch

from tests.gpu import bits
from tests.gpu.checks import (
    AHEAD_CASES,
    AMONG_MANY_CASES,
    CASES,
    FEATURE_CASES,
    GAP_CASES,
    HOLE_CASES,
    PAGE_CASES,
    gaps_explain_differences,
    rounds_on_cuda_are_those_of_single_steps,
    same_drafts_on_cuda,
    same_holes_on_cuda,
    same_long_text_among_many,
    same_tokens_in_few_pages,
    same_tokens_on_cuda,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = pytest.mark.filterwarnings("error:forwards of this model are not captured")


@needs_cuda
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_cuda_gives_the_tokens_of_the_cpu(case):
    same_tokens_on_cuda(*case)


@needs_cuda
@pytest.mark.parametrize("case", HOLE_CASES, ids="-".join)
def test_cuda_fills_holes_as_the_cpu_does(case):
    same_holes_on_cuda(*case)


@needs_cuda
@pytest.mark.parametrize("case", PAGE_CASES, ids="-".join)
def test_bits_do_not_hang_on_pages(case):
    same_tokens_in_few_pages(*case)


@needs_cuda
@pytest.mark.parametrize("case", AMONG_MANY_CASES, ids="-".join)
def test_bits_do_not_hang_on_how_a_text_is_cut(case):
    same_long_text_among_many(*case)


@needs_cuda
@pytest.mark.parametrize("case", FEATURE_CASES, ids="-".join)
def test_drafters_look_into_their_target_on_cuda_as_on_the_cpu(case):
    same_drafts_on_cuda(*case)


@needs_cuda
@pytest.mark.parametrize("case", AHEAD_CASES, ids="-".join)
def test_rounds_on_cuda_are_those_of_single_steps(case):
    rounds_on_cuda_are_those_of_single_steps(*case)


@needs_cuda
@pytest.mark.parametrize("case", GAP_CASES, ids="-".join)
def test_captured_forwards_part_from_plain_ones_only_where_tokens_are_as_likely(case):
    gaps_explain_differences(*case)


@needs_cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", bits.EXACT)
def test_exact_methods_write_the_same_bits_in_any_company(name, dtype):
    for temperature in (0.0, 1.0):
        assert not bits.check(name, dtype, tokens=32, count=8, temperature=temperature)
