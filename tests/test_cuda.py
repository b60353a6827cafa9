import pytest
import torch

from tests.cuda_checks import CASES, same_tokens_on_cuda


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_cuda_gives_the_tokens_of_the_cpu(case):
    same_tokens_on_cuda(*case)
