"""No request touches another: what one does, or fails to do, changes nothing for its neighbours."""

import gc
from dataclasses import dataclass

import pytest
import torch

from forerun.drafters.adaptive import adaptive_length
from forerun.errors import NotAble
from forerun.options import Sampling
from forerun.probability.acceptance import sample_token
from forerun.probability.outcomes import Outcome
from forerun.sequence.canvas import BLANK
from tests.helpers import PROMPTS, fresh, model, settled, stepped


def beside(start, **options):
    """A hostile method beside a plain request: (its result, the plain one's, the model)."""
    m = stepped(fresh(lanes=2))
    bad = m.submit(PROMPTS[1], max_tokens=5)
    good = m.submit(PROMPTS[0], max_tokens=6, ignore_eos=True, **options)
    job = bad.jobs[0]
    job.ticket.start = lambda: start(job.seq, m.handle())
    m.engine.run()
    return bad.results()[0], good.results()[0], m


def alone():
    return fresh(lanes=1).generate(PROMPTS[0], max_tokens=6, ignore_eos=True).token_ids


def test_an_abandoned_stream_is_cancelled_between_steps():
    m = fresh(lanes=3)
    expected = m.generate(PROMPTS[0], max_tokens=8, ignore_eos=True).token_ids
    for _ in range(20):
        stream = m.stream(PROMPTS[2], max_tokens=30, ignore_eos=True)
        stream.itself = stream  # only the garbage collector can let go of it
        next(stream)
        del stream
        gc.set_threshold(5)  # so that it comes in the middle of a step
        try:
            assert m.generate(PROMPTS[0], max_tokens=8, ignore_eos=True).token_ids == expected
        finally:
            gc.set_threshold(700, 10, 10)
    gc.collect()
    assert settled(m).engine.free_lanes == [0, 1, 2]


def test_cancelling_in_the_middle_of_a_step_is_applied_after_it():
    m = stepped(fresh(lanes=2))
    first = m.submit(PROMPTS[0], max_tokens=9, ignore_eos=True)
    second = m.submit(PROMPTS[1], max_tokens=9, ignore_eos=True)
    forward = m.backbone.forward

    def cancelling(batch, slots):
        first.cancel()
        assert len(m.engine.running) == 2, "not in the middle of a step"
        return forward(batch, slots)

    m.backbone.forward = cancelling
    m.engine.step()
    m.backbone.forward = forward
    assert first.results()[0].finish_reason == "cancelled" and m.engine.free_lanes == [0]
    m.engine.run()
    assert len(second.results()[0].token_ids) == 9


@pytest.mark.parametrize("kind", ["masked", "masked-shifted"])
def test_ancestral_decoding_gives_a_seed_the_same_text_in_any_company(kind):
    m = model(kind, torch.float64)
    how = dict(method="ancestral", steps=4, temperature=1.0, ignore_eos=True)
    for seed in range(4):
        jobs = [m.submit(PROMPTS[i], max_tokens=5 + 3 * i, seed=seed, **how) for i in range(3)]
        for job in jobs:
            job.run()
        for i, job in enumerate(jobs):
            expected = m.generate(PROMPTS[i], max_tokens=5 + 3 * i, seed=seed, **how).token_ids
            assert job.results()[0].token_ids == expected


def test_a_kept_draft_cache_begins_anew_with_every_request():
    draft = model("masked", torch.float64)
    how = dict(method="specdiff", draft=draft, keep=True, k=3, temperature=1.0, ignore_eos=True)
    first, again = fresh(dtype=torch.float64), fresh(dtype=torch.float64)
    expected = first.generate(PROMPTS[0], max_tokens=10, seed=5, **how)
    again.generate([*PROMPTS[0], 9, 9, 9], max_tokens=10, seed=1, **how)  # the same beginning
    found = again.generate(PROMPTS[0], max_tokens=10, seed=5, **how)
    assert found.token_ids == expected.token_ids
    assert found.stats.acceptance_histogram == expected.stats.acceptance_histogram


def test_adaptive_drafts_draft_nothing_where_nothing_may_be_drafted():
    m = fresh()
    seq = m.canvas([1, BLANK], Sampling())
    assert adaptive_length(seq, 0) == 0 and adaptive_length(seq, 3) >= 1
    how = dict(method="specdiff", draft=model("masked"), adapt=True, max_tokens=1)
    assert len(m.generate(PROMPTS[0], **how).token_ids) == 1


def test_a_method_that_is_no_coroutine_fails_alone():
    bad, good, m = beside(lambda seq, target: 5)
    assert isinstance(bad.error, NotAble) and "async function" in str(bad.error)
    assert good.token_ids == alone() and m.engine.free_lanes == [0, 1]


def test_a_method_that_awaits_while_it_is_closed_frees_its_lane():
    async def stubborn(seq, target):
        try:
            while True:
                await target.next_law(seq)
        finally:
            await target.next_law(seq)

    m = stepped(fresh(lanes=2))
    cancelled = m.submit(PROMPTS[1], max_tokens=5)
    job = cancelled.jobs[0]
    job.ticket.start = lambda: stubborn(job.seq, m.handle())
    m.engine.step()
    cancelled.cancel()
    assert m.engine.free_lanes == [0, 1]
    assert m.generate(PROMPTS[0], max_tokens=6, ignore_eos=True).token_ids == alone()


@dataclass(frozen=True)
class Short(Outcome):
    number: int


def test_a_rule_that_returns_too_few_rows_fails_only_those_who_use_it():
    def short(law_BV, sample):
        return Short.of_batch(number=sample(law_BV)[:0])

    async def hostile(seq, target):
        await seq.draw(short, await target.next_law(seq))

    bad, good, _ = beside(hostile)
    assert "one row per sequence" in str(bad.error) and good.token_ids == alone()


@pytest.mark.parametrize("token", [-5, 10**6])
def test_a_token_that_does_not_exist_fails_only_who_decided_on_it(token):
    async def hostile(seq, target):
        while not seq.done:
            await seq.draw(sample_token, await target.next_law(seq))
            seq.fill(seq.next(1), [token], "invented")

    bad, good, _ = beside(hostile)
    assert f"token {token}" in str(bad.error) and good.token_ids == alone()
