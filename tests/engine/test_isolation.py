"""No request touches another: what one does, or fails to do, changes nothing for its neighbours."""

import gc
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from forerun.backbones import attention
from forerun.drafters.adaptive import adaptive_length
from forerun.errors import BadOption, NotAble
from forerun.options import Sampling
from forerun.probability.acceptance import sample_token
from forerun.probability.lossy import tolerant
from forerun.probability.outcomes import Outcome
from forerun.sequence.canvas import BLANK
from forerun.sequence.rows import Plan
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


@pytest.mark.parametrize(
    "how",
    [
        dict(method="assd", draft=model(), k=3),
        dict(method="specdiff", draft=model("masked"), k=3, first=4, first_draft=model()),
    ],
    ids=["assd", "first_draft"],
)
def test_a_left_to_right_draft_has_nothing_to_say_of_a_leading_hole(how):
    m = stepped(fresh("any-subset", lanes=2))
    holes = [None, None, 5, None, 9, None]
    expected = m.infill(token_ids=holes, method="sequential").token_ids
    first = m.submit_infill(token_ids=holes, **how)
    second = m.submit_infill(token_ids=[8, None, None, 4], **how)
    m.engine.run()
    assert first.results()[0].token_ids == expected
    alone = m.infill(token_ids=[8, None, None, 4], method="sequential").token_ids
    assert second.results()[0].token_ids == alone


@torch.inference_mode()
def poisoned(m):
    """Slots as a request leaves them whose forwards were no numbers."""
    for layer in range(m.backbone.layers):
        for kept in m.host.slots.flat(layer):
            kept[:] = torch.nan
    m.host.forget()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "masked", "block", "any-subset", "xlnet"])
def test_what_an_earlier_request_left_in_the_slots_reaches_nobody(kind):
    m = fresh(kind, lanes=2)
    how = dict(max_tokens=6, ignore_eos=True)
    if kind == "xlnet":
        ask = lambda: m.infill(token_ids=[4, None, None, 9, None]).token_ids
    else:
        ask = lambda: m.generate([PROMPTS[0], PROMPTS[2]], **how)[1].token_ids
    expected = ask()
    poisoned(m)
    assert ask() == expected


def test_side_by_side_attention_does_not_multiply_what_nobody_sees(monkeypatch):
    m = fresh(lanes=2)
    expected = [r.token_ids for r in m.generate(PROMPTS[1:3], max_tokens=4, ignore_eos=True)]
    monkeypatch.setattr(attention, "_one_by_one", attention._side_by_side)
    poisoned(m)
    found = m.generate(PROMPTS[1:3], max_tokens=4, ignore_eos=True)
    assert [r.token_ids for r in found] == expected


@pytest.mark.parametrize("method", ["ar", "jacobi", "lookup"])
def test_an_interrupt_while_one_is_served_changes_nothing_for_the_others(method):
    how = dict(method=method, temperature=1.0, max_tokens=12, ignore_eos=True, logprobs=1)
    m = stepped(fresh(dtype=torch.float64, lanes=3))
    expected = [m.generate(PROMPTS[i], seed=i, **how) for i in range(3)]
    jobs = [m.submit(PROMPTS[i], seed=i, **how) for i in range(3)]
    m.engine.step()
    interrupted = jobs[0].jobs[0].ticket
    changes = 0

    def interrupt():  # where Python delivers one: between the answers of two sequences
        nonlocal changes
        changes += 1
        if changes in (2, 4):
            raise KeyboardInterrupt

    interrupted.on_change = interrupt
    while m.engine.busy:
        try:
            m.engine.step()
        except KeyboardInterrupt:
            assert len(m.engine.running) >= 2
    for job, alone in zip(jobs[1:], expected[1:]):
        [found] = job.results()
        assert found.token_ids == alone.token_ids
        assert found.stats.forwards == alone.stats.forwards
        pairs = zip(found.logprobs, alone.logprobs, strict=True)
        assert all(ours["logprob"] == pytest.approx(own["logprob"]) for ours, own in pairs)


def test_an_interrupted_decision_ends_its_request_and_no_other():
    m = stepped(fresh(lanes=2))
    bad = m.submit(PROMPTS[1], max_tokens=5)
    good = m.submit(PROMPTS[0], max_tokens=6, ignore_eos=True)
    job = bad.jobs[0]

    async def interrupted(seq, target):
        await target.next_law(seq)
        raise KeyboardInterrupt

    job.ticket.start = lambda: interrupted(job.seq, m.handle())
    with pytest.raises(KeyboardInterrupt):
        m.engine.run()
    m.engine.run()
    assert "interrupted" in str(bad.results()[0].error)
    assert good.results()[0].token_ids == alone() and m.engine.free_lanes == [0, 1]


def test_a_plan_without_rows_fails_alone():
    async def hostile(seq, target):
        await target.ask(seq, Plan(np.zeros((5, 0), np.int32), [np.zeros(0, int)], 0), [])

    bad, good, _ = beside(hostile)
    assert "0 rows" in str(bad.error) and good.token_ids == alone()


@pytest.mark.parametrize("ahead", ["whole", "every"])
def test_drafts_of_every_prefix_fit_into_a_lane_or_are_left_out(ahead):
    m = fresh("any-subset", lanes=1)
    how = dict(max_tokens=100, ignore_eos=True)
    expected = m.generate(PROMPTS[0], method="sequential", **how).token_ids
    assert m.generate(PROMPTS[0], method="assd", ahead=ahead, k=16, **how).token_ids == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-100, 1e-46, 1e39, 1e300])
def test_temperatures_beyond_a_float_are_the_limit_that_they_mean(temperature, dtype):
    m = model("llama", dtype)
    how = dict(max_tokens=4, ignore_eos=True, allowed_tokens=range(20))
    found = m.generate(PROMPTS[0], temperature=temperature, **how)
    cold = m.generate(PROMPTS[0], **how)
    assert len(found.token_ids) == 4
    assert temperature > 1 or found.token_ids == cold.token_ids


def test_a_scalar_where_a_list_belongs_is_refused_by_name():
    for value in (torch.tensor(2), np.array(2), 2, "2"):
        with pytest.raises(BadOption, match=r"stop_token_ids=.* must be a list"):
            Sampling(stop_token_ids=value)
    assert Sampling(stop_token_ids=torch.tensor([2, 3])).stop_token_ids == (2, 3)


def test_rules_made_from_options_are_not_kept_for_ever():
    for epsilon in range(1000):
        tolerant(epsilon / 1000)
    assert tolerant.cache_info().currsize <= 64
    assert tolerant(0.5) is tolerant(0.5), "sequences with one tolerance share a batch"
