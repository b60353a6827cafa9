"""What the host does in a step: nothing on tensors sequence by sequence, and nothing twice."""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from forerun.checkpoints import tiny
from forerun.engine.cache import Memo
from forerun.engine.pages import PagePool, PageShape, PageTable
from forerun.engine.rules import LawSource
from forerun.families.causal import Causal
from forerun.options import Sampling
from forerun.probability.logits import Warp, Warps
from forerun.probability.noise import uniform, uniforms, uniforms_ahead
from forerun.probability.pending import PendingLaws
from forerun.sequence.rows import Plan, causal_rows
from tests.helpers import without_device


class CountedCalls(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func.__name__ != "__get__"  # a look at a tensor's shape or kind
        return func(*args, **(kwargs or {}))


# else they would hang on what forwards cost here
LENGTHS = {"jacobi": {"block": 16}, "lookup": {"k": 10}, "speculative": {"k": 5}}


@pytest.mark.parametrize("method", ["ar", "jacobi", "lookup", "speculative"])
def test_a_step_calls_torch_as_often_for_many_sequences_as_for_few(method, monkeypatch):
    no_device = without_device(monkeypatch)
    text = list(range(20)) * 10
    script = no_device.Script(*[lambda seq, at: text[at]] * 3)
    draft = Causal() if method == "speculative" else None
    calls = {}
    for batch in (2, 8):
        m, little = no_device.model_without_device(
            tiny.tokenizer(), batch, 256, script, draft, device="cpu"
        )
        how = {"draft": little} if little else {}
        how |= LENGTHS.get(method, {})
        for _ in range(3):  # by then all sizes that are met have programs
            with CountedCalls() as counted:
                jobs = m.submit([[5, 6]] * batch, method=method, max_tokens=90, **how)
                m.engine.run()
        calls[batch] = counted.calls
        assert [r.token_ids for r in jobs.results()] == [text[:90]] * batch
    assert calls[2] == calls[8] > 0


def memo_of(pool, lane):
    memo = Memo(64, pool, lane)
    memo.begin(np.zeros(0, np.int32))
    return memo


def run(memo, tokens, start=0):
    rows = causal_rows(np.array(tokens, np.int32))
    plan = Plan(rows, [np.array([len(tokens) - 1])], len(tokens), causal=len(tokens))
    memo.claim(start, len(tokens))
    memo.ran(plan, start)
    return plan


def test_a_shared_page_behind_rows_that_were_written_over_is_still_not_written_into():
    pool = PagePool(PageTable(2, 64, PageShape(16, 8)), lambda *_: None, copies=False)
    one, other = memo_of(pool, 0), memo_of(pool, 1)
    plan = run(one, range(33))
    other.find(plan)
    assert other.pages[:4] == one.pages[:4]
    one.claim(8, 16)  # the second page alone becomes its own
    one.claim(24, 32)  # and then the fourth
    assert one.pages[1] != other.pages[1] and one.pages[3] != other.pages[3]
    assert one.pages[2] == other.pages[2]
    pool.check([one.pages, other.pages])


def test_a_page_that_was_claimed_and_published_since_is_claimed_anew():
    pool = PagePool(PageTable(2, 64, PageShape(16, 8)), lambda *_: None, copies=False)
    one, other = memo_of(pool, 0), memo_of(pool, 1)
    run(one, range(6))
    plan = run(one, range(17), start=6)
    other.find(plan)
    assert other.pages == one.pages[:2]
    one.claim(12, 14)
    assert one.pages[1] != other.pages[1]


def test_tokens_that_were_written_on_are_held_as_if_they_had_run():
    pool = PagePool(PageTable(2, 64, PageShape(16, 8)), lambda *_: None, copies=False)
    one, other = memo_of(pool, 0), memo_of(pool, 1)
    run(one, range(5))
    one.claim(5, 20)
    one.wrote(5, range(5, 20))
    run(other, range(20))
    assert np.array_equal(one.held, other.held)
    plan = run(other, range(22), start=20)
    assert one.start(plan) == 20


def test_sampling_parameters_are_looked_at_again_when_they_change():
    warps = Warps()
    warm, cold = Sampling(temperature=0.7), Sampling(temperature=0.0)
    assert warps.of([warm, cold], 9)[0] == Warp.of([warm, cold], 9)
    first = warps.of([warm, cold], 9)
    assert warps.of([warm, cold], 9) is first
    for samplings in ([cold, cold], [cold], [warm, warm]):
        warp, columns_4B = warps.of(samplings, 9)
        assert warp == Warp.of(samplings, 9)
        assert columns_4B[0].tolist() == [one.temperature for one in samplings]


def test_rows_of_several_tensors_and_parts_are_numbered_as_they_are_joined():
    logits = [torch.randn(4, 3), torch.randn(5, 3)]
    law = Sampling()
    parts = [PendingLaws.of(logits[0], 1, 2, law), PendingLaws.of(logits[1], 3, 1, law)]
    column = [torch.cat(parts), parts[1], parts[0]]
    source = LawSource(column)
    numbers = source.row_numbers(4)
    expected = [one.logits_NV[[*range(one.count), *[0] * (4 - one.count)]] for one in column]
    assert torch.equal(source.logits()[numbers], torch.cat(expected))
    assert source.has_rows_of([torch.cat(parts), parts[1], parts[0]])
    assert not source.has_rows_of([torch.cat(parts), parts[0], parts[1]])


@pytest.mark.parametrize("sequences", [1, 40])
def test_noise_of_many_is_the_noise_of_each(sequences):
    draws = [(2**64 - 1 - i, 3 * i) for i in range(sequences)]
    one_by_one = [[uniform(key, n, 2 + c) for c in range(3)] for key, n in draws]
    assert uniforms(draws, 2, 3).tolist() == one_by_one
    ahead = [[uniform(key, n + i, 0) for i in range(5)] for key, n in draws]
    assert uniforms_ahead(draws, 5).tolist() == ahead
