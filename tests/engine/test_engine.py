"""The engine changes only speed: cached = uncached, batched = alone, any order, any padding; and it
keeps its books."""

import gc
import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from forerun.backbones import attention
from forerun.engine.cache import Memo
from forerun.engine.engine import Engine
from forerun.engine.host import Work
from forerun.engine.pack import Batch, _any_bounds, _plain_bounds, make_tiles, stack
from forerun.engine.pages import PAGE
from forerun.families.base import ChainScorer
from forerun.families.causal import Causal
from forerun.options import Sampling
from forerun.probability.acceptance import sample_token
from forerun.sequence.canvas import BLANK
from tests.helpers import ARCHITECTURES, PROMPTS, every_pair, fresh, model, stepped

METHODS = {
    "ar": dict(method="ar"),
    "lookup": dict(method="lookup", k=4),
    "speculative": dict(method="speculative", k=3),
}
SAMPLINGS = {
    "greedy": {},
    "sampled": dict(temperature=0.8, top_p=0.9, seed=5),
    "penalised": dict(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.3, seed=2),
}
DTYPES = (torch.float32, torch.float64)


def options(method, sampling, arch="llama", dtype=torch.float32):
    # A drafter that resembles its target: the same architecture with other weights would never
    # agree.
    draft = {"draft": model(arch, dtype)} if method == "speculative" else {}
    return {**METHODS[method], **SAMPLINGS[sampling], **draft, "max_tokens": 9}


def engine_of(arch, dtype, lanes):
    """The shared weights behind an engine of its own."""
    return model(arch, dtype).twin(lanes)


def alone(m, **how):
    return [m.generate(prompt, **how).token_ids for prompt in PROMPTS]


@every_pair(method=list(METHODS), sampling=list(SAMPLINGS), arch=ARCHITECTURES, dtype=DTYPES)
def test_the_engine_changes_only_speed(method, sampling, arch, dtype, monkeypatch):
    how = options(method, sampling, arch, dtype)
    expected = alone(engine_of(arch, dtype, lanes=1), **how)

    with monkeypatch.context() as uncached:
        uncached.setattr(Memo, "start", lambda self, plan: 0)
        assert alone(engine_of(arch, dtype, lanes=1), **how) == expected, (
            "cached must equal uncached"
        )

    together = engine_of(arch, dtype, lanes=8).generate(PROMPTS, **how)
    assert [r.token_ids for r in together] == expected, "batched must equal alone"

    queued = engine_of(arch, dtype, lanes=2)
    order = random.Random(0).sample(range(len(PROMPTS)), len(PROMPTS))
    results = queued.generate([PROMPTS[i] for i in order], **how)
    assert [results[order.index(i)].token_ids for i in range(len(PROMPTS))] == expected, (
        "any order of service, more requests than lanes"
    )

    with monkeypatch.context() as padded:
        padded.setattr(attention, "_one_by_one", attention._side_by_side)
        results = engine_of(arch, dtype, lanes=4).generate(PROMPTS, **how)
        assert [r.token_ids for r in results] == expected, "any padding"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_ar_is_what_transformers_generates(arch):
    from tests.helpers import network

    for prompt in PROMPTS:
        inputs = torch.tensor([prompt])
        theirs = network(arch).generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=40, do_sample=False
        )
        assert (
            model(arch).generate(prompt, max_tokens=40).token_ids
            == theirs[0, len(prompt) :].tolist()
        )


def test_different_methods_share_a_batch():
    m = stepped(fresh(lanes=6))
    wanted = [options(method, sampling) for method in METHODS for sampling in ("greedy", "sampled")]
    expected = [m.generate(PROMPTS[0], **how).token_ids for how in wanted]
    jobs = [m.submit(PROMPTS[0], **how) for how in wanted]
    m.engine.run()
    assert [job.results()[0].token_ids for job in jobs] == expected
    assert len({str(tokens) for tokens in expected}) > 1


def test_a_request_joins_between_forwards():
    m = stepped(fresh(lanes=2))
    expected = alone(fresh(lanes=1), max_tokens=20)
    first = m.submit(PROMPTS[0], max_tokens=20)
    for _ in range(9):
        m.engine.step()
    second = m.submit(PROMPTS[2], max_tokens=20)
    m.engine.run()
    assert (
        first.results()[0].token_ids == expected[0] and second.results()[0].token_ids == expected[2]
    )


def test_all_sequences_of_a_batch_share_each_forward():
    m = fresh(lanes=5)
    m.generate(PROMPTS, max_tokens=10, ignore_eos=True)
    assert m.engine.clock.forwards == 10


def test_the_cheapest_thing_wanted_is_served_first():
    """Sequences that are behind in drafting catch up before the target runs, so that it runs for
    all of them at once."""
    m = stepped(fresh(lanes=2))
    small = fresh("llama", num_hidden_layers=1)
    draft_runs, target_runs = [], []
    for runs, backbone in ((draft_runs, small.backbone), (target_runs, m.backbone)):
        original = backbone.forward
        backbone.forward = lambda batch, slots, runs=runs, original=original: (
            runs.append(len(batch.segments)) or original(batch, slots)
        )
    jobs = [
        m.submit(PROMPTS[0], method="speculative", draft=small, k=k, max_tokens=12, ignore_eos=True)
        for k in (1, 4)
    ]
    m.engine.run()
    both = [job.results()[0] for job in jobs]
    assert sum(target_runs) == sum(r.stats.forwards for r in both)
    assert len(target_runs) == max(r.stats.forwards for r in both)


def test_forwards_are_counted_for_each_request_alone():
    m = fresh(lanes=4)
    r = m.generate(
        [[1, 2], [3, 4, 5]],
        method="speculative",
        draft=model("llama"),
        k=3,
        max_tokens=9,
        ignore_eos=True,
    )
    alone = fresh(lanes=1).generate(
        [1, 2], method="speculative", draft=model("llama"), k=3, max_tokens=9, ignore_eos=True
    )
    assert (r[0].stats.forwards, r[0].stats.draft_forwards) == (
        alone.stats.forwards,
        alone.stats.draft_forwards,
    )
    # the draft is the target: 4 + 4 + 1 tokens
    assert alone.stats.forwards == 3 and alone.stats.acceptance_rate == 1.0


def test_a_draft_that_is_the_target_is_accepted_whole_at_any_temperature():
    r = fresh().generate(
        [1, 2, 3],
        method="speculative",
        draft=model("llama"),
        k=4,
        max_tokens=20,
        temperature=1.0,
        ignore_eos=True,
    )
    assert r.stats.acceptance_rate > 0.95  # less than 1 only where rounding moves p/q below 1


def test_no_row_runs_twice_without_need():
    m = fresh(lanes=1)
    rows = []
    original = m.backbone.forward
    m.backbone.forward = lambda batch, slots: (
        rows.append(len(batch.tokens_T)) or original(batch, slots)
    )
    m.generate(list(range(30)), max_tokens=5, ignore_eos=True)
    assert rows == [30, 1, 1, 1, 1]
    rows.clear()
    m.generate([*range(30), 99], max_tokens=2, ignore_eos=True)
    assert rows[0] <= 2, "a prompt that begins like an earlier one starts from its slots"


def test_accepted_draft_rows_are_not_run_again():
    m = fresh(lanes=1)
    rows = []
    original = m.backbone.forward
    m.backbone.forward = lambda batch, slots: (
        rows.append(len(batch.tokens_T)) or original(batch, slots)
    )
    m.generate(
        [1, 2, 3], method="speculative", draft=model("llama"), k=4, max_tokens=15, ignore_eos=True
    )
    assert rows == [7, 5, 5], "each verdict runs the last token and the new draft"


def test_cancelling_frees_the_lane_at_once():
    m = stepped(fresh(lanes=1))
    first, second = (
        m.submit([1, 2], max_tokens=50, ignore_eos=True),
        m.submit([3], max_tokens=3, ignore_eos=True),
    )
    for _ in range(8):
        m.engine.step()
    first.cancel()
    assert m.engine.free_lanes == [0]
    m.engine.run()
    assert second.results()[0].finish_reason == "length"
    assert (
        first.results()[0].finish_reason == "cancelled"
        and 0 < len(first.results()[0].token_ids) < 50
    )


def test_a_queued_request_can_be_cancelled_before_it_starts():
    m = stepped(fresh(lanes=1))
    first, second = m.submit([1], max_tokens=3, ignore_eos=True), m.submit([2], max_tokens=3)
    m.engine.step()
    second.cancel()
    m.engine.run()
    assert second.results()[0].token_ids == [] and first.results()[0].finish_reason == "length"


def test_cancelling_twice_or_after_the_end_does_nothing():
    m = stepped(fresh(lanes=1))
    jobs = m.submit([1], max_tokens=2, ignore_eos=True)
    m.engine.run()
    jobs.cancel()
    jobs.cancel()
    assert jobs.results()[0].finish_reason == "length" and m.engine.free_lanes == [0]


def test_a_method_that_fails_fails_alone(monkeypatch):
    import forerun.methods.speculative as file

    async def broken(self, seq, k):
        raise RuntimeError("no ideas")

    monkeypatch.setattr("forerun.drafters.lookup.LookupDrafter.propose", broken)
    m = stepped(fresh(lanes=2))
    bad, good = (
        m.submit([1, 2], method="lookup", max_tokens=5),
        m.submit([1, 2], max_tokens=5, ignore_eos=True),
    )
    m.engine.run()
    assert bad.results()[0].finish_reason == "error" and "no ideas" in str(bad.results()[0].error)
    assert len(good.results()[0].token_ids) == 5 and m.engine.free_lanes == [0, 1]
    assert file.lookup.name == "lookup"


def test_a_rule_that_fails_takes_only_its_users_with_it(monkeypatch):
    import forerun.methods.speculative as file

    def broken(*arguments):
        raise RuntimeError("bad rule")

    monkeypatch.setattr(file, "matching", broken)
    m = stepped(fresh(lanes=2))
    bad, good = (
        m.submit([1, 2], method="lookup", max_tokens=5),
        m.submit([1, 2], max_tokens=5, ignore_eos=True),
    )
    m.engine.run()
    assert "bad rule" in str(bad.results()[0].error) and len(good.results()[0].token_ids) == 5


@pytest.mark.parametrize("logprobs", [None, 0])  # the draw in the step that asks, and after it
def test_what_is_drawn_from_a_question_fails_alone(logprobs, monkeypatch):
    judged = ChainScorer.judged

    def asked(self, seq, *arguments):
        question = judged(self, seq, *arguments)
        if seq.tokens[0] == 1:
            question.then = lambda p_LV: p_LV["no such row"]
        return question

    monkeypatch.setattr(ChainScorer, "judged", asked)
    m = stepped(fresh(lanes=2))
    how = dict(method="lookup", max_tokens=5, ignore_eos=True, logprobs=logprobs)
    bad, good = m.submit([1, 2, 1, 2], **how), m.submit([3, 2, 3, 2], **how)
    m.engine.run()
    assert bad.results()[0].finish_reason == "error" and good.results()[0].error is None
    assert len(good.results()[0].token_ids) == 5


def test_a_forward_that_fails_leaves_no_wrong_memory():
    m = fresh(lanes=1)
    expected = m.generate([1, 2, 3, 4], max_tokens=6).token_ids
    original = m.backbone.forward

    def half_way(batch, slots):
        original(batch, slots)
        raise RuntimeError("out of memory")

    m.backbone.forward = half_way
    with pytest.raises(RuntimeError):
        result = m.generate([[9, 9, 9, 9]], max_tokens=2)[0]
        raise result.error
    m.backbone.forward = original
    assert m.generate([1, 2, 3, 4], max_tokens=6).token_ids == expected


def test_a_method_that_awaits_something_else_fails_alone():
    import asyncio

    from forerun.registry import Method

    async def lost(seq, target):
        await asyncio.sleep(0)

    m = stepped(fresh(lanes=2))
    bad, good = m.submit([1, 2], max_tokens=5), m.submit([1, 2], max_tokens=5, ignore_eos=True)
    bad.jobs[0].ticket.start = lambda: lost(None, None)
    m.engine.run()
    assert "may await" in str(bad.results()[0].error) and len(good.results()[0].token_ids) == 5
    assert Method("lost", lost, "exact", "ar").summary == ""


def test_a_method_that_cannot_start_fails_alone():
    m = stepped(fresh(lanes=1))
    bad, good = m.submit([1, 2], max_tokens=5), m.submit([1, 2], max_tokens=5, ignore_eos=True)
    bad.jobs[0].ticket.start = lambda: 1 / 0
    m.engine.run()
    assert (
        isinstance(bad.results()[0].error, ZeroDivisionError)
        and len(good.results()[0].token_ids) == 5
    )


def test_a_plan_longer_than_a_lane_never_reaches_the_next_one():
    async def greedy_for_slots(seq, target):
        await target.conditionals(seq, [1] * 100, [2] * 400)

    m = stepped(fresh(lanes=2))
    bad = m.submit([1, 2], max_tokens=5)
    seq = bad.jobs[0].seq
    bad.jobs[0].ticket.start = lambda: greedy_for_slots(seq, m.handle())
    m.engine.run()
    assert "502 rows" in str(bad.results()[0].error)


def test_a_text_goes_to_the_lane_that_holds_most_of_it():
    m = fresh(lanes=3)
    m.generate(
        [list(range(30)), list(range(50, 80)), list(range(100, 130))], max_tokens=2, ignore_eos=True
    )
    rows = []
    original = m.backbone.forward
    m.backbone.forward = lambda batch, slots: (
        rows.append(len(batch.tokens_T)) or original(batch, slots)
    )
    m.generate([*range(50, 80), 7], max_tokens=1)
    assert rows == [2] or rows == [1]


def test_laws_of_one_forward_are_stacked_without_a_copy_and_others_with_one():
    whole = torch.arange(60.0).view(6, 10)
    pieces = list(whole.split(2))
    for some in (pieces, pieces[1:], [p[0] for p in whole[:, None]], [whole[:, 0], whole[:, 1]]):
        assert torch.equal(stack(some, whole.device), torch.stack(some))
    assert stack(pieces, whole.device).data_ptr() == whole.data_ptr()
    apart = (
        [pieces[1], pieces[0]],
        [pieces[0], pieces[2]],
        [pieces[0], pieces[0]],
        [pieces[0], pieces[1].clone()],
    )
    for some in apart:
        assert torch.equal(stack(some, whole.device), torch.stack(some))
    unequal = stack([whole[:2], whole[2:3]], whole.device)
    assert (
        unequal.shape == (2, 2, 10)
        and torch.equal(unequal[1, 0], whole[2])
        and not unequal[1, 1].any()
    )


def test_a_sequence_draws_the_same_in_every_version():
    """Of laws in which all tokens are equally likely, so that only the noise decides."""
    m = model()
    seq = m.canvas([1, *[BLANK] * 4], Sampling(temperature=1.0))

    async def draw_all():
        while not seq.done:
            drawn = await seq.draw(sample_token, torch.ones(m.vocab))
            seq.fill(seq.next(1), [drawn.token], "said")

    m.run_to_end(seq, draw_all)
    assert seq.output == [121, 43, 51, 88] and m.vocab == 257


def test_work_is_counted_from_nothing():
    m = fresh(lanes=1)
    assert m.host.work == Work(rows=0, pairs=0, slots=0, forwards=0)
    m.generate([5, 6, 7], max_tokens=2, ignore_eos=True)
    # the prompt's three rows look at three slots each, then one row looks at four
    assert m.host.work == Work(rows=4, pairs=13, slots=7, forwards=2)


def test_laws_of_two_forwards_are_copied_though_they_lie_at_neighbouring_offsets():
    one = torch.arange(8.0).view(2, 4)
    other = one + 100
    for some in ([one[0], other[1]], [one[:1], other[1:]]):
        assert torch.equal(stack(some, one.device), torch.stack(some))


def test_laws_of_other_numbers_are_copied_though_they_lie_side_by_side():
    whole = torch.arange(8, dtype=torch.float32)
    seen_as_integers = whole.view(torch.int32)
    some = [whole[:4], seen_as_integers[4:]]
    assert torch.equal(stack(some, whole.device), torch.stack(some))


def test_a_finished_request_keeps_no_laws():
    m = stepped(fresh(lanes=1))
    jobs = m.submit([1, 2], max_tokens=3, logprobs=2)
    m.engine.run()
    assert jobs.jobs[0].seq.logprobs._answered == {} and len(jobs.results()[0].logprobs) >= 1


def test_an_idle_engine_does_nothing():
    engine = Engine(2)
    engine.step()
    engine.run()
    assert not engine.busy


def test_ten_thousand_requests_leave_memory_where_it_was():
    import psutil  # a machine that only runs mutants may lack it

    m = fresh(lanes=8)
    process = psutil.Process()

    def serve(n):
        for i in range(n // 100):
            m.generate([[j % 250, 3] for j in range(100)], max_tokens=2, seed=i, temperature=1.0)
        gc.collect()
        return process.memory_info().rss

    sizes = [serve(2500) for _ in range(4)]
    growth = [(after - before) / 2**20 for before, after in pairwise(sizes)]
    # An allocator may take more once; a leak takes more every time.
    assert min(growth) < 2, f"memory grew by {growth} MiB"


def test_a_lane_takes_the_memory_that_it_says():
    m = fresh(lanes=1)
    slots = m.backbone.make_slots(3, 40)
    kept = [tensor[:-1] for layer in range(m.backbone.layers) for tensor in slots.flat(layer)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    assert m.backbone.bytes_per_lane(3 * PAGE) == size  # 40 slots are a page


def test_what_is_cancelled_says_so_and_what_had_ended_keeps_its_reason():
    m = stepped(fresh(lanes=1))
    running, queued = (m.submit([1], max_tokens=9, ignore_eos=True) for _ in range(2))
    m.engine.step()
    for jobs in (running, queued):
        jobs.cancel()
        assert jobs.jobs[0].seq.finish_reason == "cancelled"
    ended = m.submit([1], max_tokens=9, ignore_eos=True).jobs[0]
    ended.seq.finish_reason = "stop"
    m.engine.cancel(ended.ticket)
    assert ended.seq.finish_reason == "stop"


def tiles_of(*lengths, held=0, programs=1000):
    plans = [Causal.after(np.arange(held + n, dtype=np.int32), [()]) for n in lengths]
    batch = Batch(
        [(lane, plan, held) for lane, plan in enumerate(plans)], held + 99, torch.device("cpu")
    )
    return make_tiles(batch, heads=8, key_heads=2, programs=programs)


def test_long_runs_of_rows_are_cut_into_tiles():
    first, size, lane, *_ = tiles_of(3, 1).bounds_6N.tolist()  # a tile holds 4 rows of 4 heads
    assert (first, size, lane) == ([0, 3], [3, 1], [0, 1])
    first, size, lane, *_ = tiles_of(35, 2, 16).bounds_6N.tolist()  # and else 16
    assert (first, size, lane) == ([0, 16, 32, 35, 37], [16, 16, 3, 2, 16], [0, 0, 0, 1, 2])


def test_every_share_of_a_long_text_has_a_program_if_there_are_few_tiles():
    slots = {100: 1, 256: 1, 257: 2, 600: 3, 1000: 4, 1100: 6, 1600: 8, 2048: 8, 2100: 12}
    for held, programs in slots.items():
        assert tiles_of(1, held=held - 1).splits == 4 * programs
    assert tiles_of(1, held=999, programs=4).splits == 1
    assert tiles_of(1, held=999, programs=5).splits == 16


def test_one_long_text_among_many_is_cut_into_sections():
    """Or all others would wait for the program that looks at it."""
    for held, sections in {1000: 1, 1024: 1, 1025: 4, 4096: 4, 4097: 16, 70_000: 69}.items():
        tiles = tiles_of(1, held=held - 1, programs=4)
        assert (tiles.splits, tiles.by_section) == (sections, sections > 1)
    assert not tiles_of(90, held=8192, programs=1).by_section  # many tiles: none waits for one


def test_a_long_prompt_is_read_by_sections_where_its_tiles_are_full():
    """What each share of a full tile finds takes long to write and to join."""
    for rows, by_section in {1: False, 4: False, 16: False, 64: False, 90: True}.items():
        found = tiles_of(rows, *[1] * 3, held=4000, programs=264)
        assert found.by_section == by_section  # from 9 tiles of 16 rows on, which count as 32
    assert not tiles_of(90, *[1] * 3, held=400, programs=264).by_section  # not so long


def test_tiles_of_plain_text_are_those_of_any_rows():
    """One is arithmetic, the other looks at every row."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        work = []
        for _ in range(rng.integers(1, 5)):
            length, guessed = int(rng.integers(1, 60)), int(rng.integers(0, 40))
            text = rng.integers(0, 9, length).astype(np.int32)
            plan = Causal.after(text, [list(range(guessed))])
            work.append((int(rng.integers(0, 9)), plan, int(rng.integers(0, length))))
        batch = Batch(work, 128, torch.device("cpu"))
        for low, high in ((4, 16), (1, 8), (16, 64)):
            plain, height = _plain_bounds(batch, low, high)
            looked_at, same_height = _any_bounds(batch, low, high)
            assert height == same_height and np.array_equal(plain, looked_at)
