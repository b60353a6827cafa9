"""Forwards that are begun before their tokens are known change only speed: a GPU always does it,
here it is asked for."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import forerun
from forerun.backbones.table import TableBackbone
from forerun.certify.cases import SAMPLINGS as CERTIFIED
from forerun.certify.enumeration import certify_case
from forerun.engine import graphs as graphs_file
from forerun.engine import prefetch as prefetch_file
from forerun.engine.cache import Memo
from forerun.engine.engine import Engine
from forerun.engine.pace import Pace
from forerun.engine.prefetch import TokenPrefetch
from forerun.families.base import ChainScorer
from forerun.options import Sampling
from forerun.probability.acceptance import sample_token
from forerun.probability.outcomes import Outcome
from forerun.registry import BUILT_IN, NoOptions, method
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.rows import Plan, causal_rows, next_token_plan
from tests import kernels_in_torch
from tests.helpers import PROMPTS, every_pair, fresh, stepped

SAMPLINGS = {
    "greedy": {},
    "sampled": dict(temperature=0.8, top_p=0.9, seed=5),
    "penalised": dict(
        temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.3, min_tokens=3, seed=2
    ),
    "told": dict(temperature=1.0, logprobs=2, stop=["e"], seed=3),
}


@pytest.fixture
def ahead(monkeypatch):
    """Every engine goes ahead; the list that comes back grows by what was foreseen, and how many
    asked for it."""
    foreseen = []
    finish = Engine._finish_prefetched
    monkeypatch.setitem(BUILT_IN["methods"], "contrary", f"{__name__}:contrary")
    monkeypatch.setattr(Engine, "prefetches", True)
    monkeypatch.setattr(
        Engine,
        "_finish_prefetched",
        lambda self, tickets: foreseen.append(len(tickets)) or finish(self, tickets),
    )
    return foreseen


def said(results):
    return [(r.token_ids, r.text, r.finish_reason, r.stats.forwards, likely(r)) for r in results]


def likely(result):
    """Its log-probabilities, without the last bits: prompts may be read in other pieces."""
    return [round(entry["logprob"], 9) for entry in result.logprobs or ()]


@every_pair(arch=["llama", "gpt2"], sampling=list(SAMPLINGS), lanes=[1, 2, 5])
def test_going_ahead_changes_only_speed(arch, sampling, lanes, ahead, monkeypatch):
    how = dict(max_tokens=14, method="ar", **SAMPLINGS[sampling])
    went = said(fresh(arch, torch.float64, lanes=lanes).generate(PROMPTS, **how))
    assert len(ahead) > 5
    monkeypatch.setattr(Engine, "prefetches", False)
    assert went == said(fresh(arch, torch.float64, lanes=lanes).generate(PROMPTS, **how))


def test_over_fixed_memory_too(ahead):
    """As a captured forward has it: its tokens are put where they belong by the device."""
    expected = said(
        fresh(lanes=3).generate(PROMPTS[:3], method="ar", max_tokens=6, ignore_eos=True)
    )
    captured = fresh(lanes=3)
    captured.host.runner.__init__(captured.backbone, captured.host.slots, graphs=True)
    assert (
        said(captured.generate(PROMPTS[:3], method="ar", max_tokens=6, ignore_eos=True)) == expected
    )
    assert ahead == [3] * 10 and captured.host.runner.captured


def test_a_whole_batch_goes_ahead_in_every_step_and_nothing_is_run_in_vain(ahead):
    m = fresh(lanes=5)
    m.generate(PROMPTS, method="ar", max_tokens=10, ignore_eos=True)
    assert ahead == [5] * 9 and m.engine.clock.forwards == 10


def test_what_was_begun_for_a_text_that_ended_is_left_alone(ahead):
    m = stepped(fresh(lanes=2))
    first, second = (
        m.generate(prompt, method="ar", max_tokens=12, ignore_eos=True).token_ids
        for prompt in PROMPTS[:2]
    )
    ahead.clear()
    jobs = [
        m.submit(
            PROMPTS[0], method="ar", max_tokens=12, ignore_eos=True, stop_token_ids=[first[4]]
        ),
        m.submit(PROMPTS[1], method="ar", max_tokens=12, ignore_eos=True),
    ]
    m.engine.run()
    assert (
        jobs[0].results()[0].token_ids == first[: first.index(first[4]) + 1]
        and jobs[1].results()[0].token_ids == second
    )
    assert 2 in ahead and 1 in ahead


@pytest.mark.parametrize("graphs", [None, True])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_prompts_are_read_in_what_is_begun_ahead(sampling, graphs, ahead):
    """In chunks, the last of which answers: streams beside them need not wait for the host."""
    long = [list(np.random.default_rng(n).integers(5, 90, n)) for n in (40, 33)]
    how = dict(max_tokens=24, ignore_eos=True, method="ar", **SAMPLINGS[sampling])
    texts = (*PROMPTS[:2], *long)
    alone = [said([fresh(max_context=96).generate(p, **how)])[0][:4] for p in texts]
    m = stepped(fresh(lanes=4, max_context=96))
    if graphs:
        m.host.runner.__init__(m.backbone, m.host.slots, graphs=True)
    m.host.pace = Pace(m.host.costs, 8)
    jobs = [m.submit(prompt, **how) for prompt in PROMPTS[:2]]
    for _ in range(6):
        m.engine.step()
    jobs += [m.submit(prompt, **how) for prompt in long]
    m.engine.step()
    before = m.engine.clock.forwards
    seen = len(ahead)
    while not jobs[-1].jobs[0].seq.trace.forwards:
        m.engine.step()
    chunks = m.engine.clock.forwards - before
    assert len(ahead) - seen >= chunks - 3 > 3  # all but those in which somebody joins
    m.engine.run()
    assert [said(job.results())[0][:4] for job in jobs] == alone


def test_a_forward_that_fails_ahead_fails_nobody(ahead, monkeypatch, caplog):
    """It is only a guess; what was drawn stays drawn."""
    how = dict(max_tokens=20, ignore_eos=True, method="ar", temperature=0.9, seed=4)
    expected = [r.token_ids for r in fresh(lanes=2, max_context=96).generate(PROMPTS[:2], **how)]
    m = stepped(fresh(lanes=2, max_context=96))
    batch = TokenPrefetch.batch
    calls = iter(range(1000))

    def failing(self, applied):
        found = batch(self, applied)
        if next(calls) % 3 == 1:
            raise RuntimeError("no memory")
        return found

    monkeypatch.setattr(TokenPrefetch, "batch", failing)
    assert [r.token_ids for r in m.generate(PROMPTS[:2], **how)] == expected
    assert "begun ahead failed" in caplog.text and len(ahead) > 5


def test_a_prompt_that_ends_while_it_is_read_ahead_takes_nothing_with_it(ahead):
    m = stepped(fresh(lanes=3, max_context=96))
    how = dict(max_tokens=30, ignore_eos=True, method="ar")
    expected = [m.generate(prompt, **how).token_ids for prompt in PROMPTS[:2]]
    m.host.pace = Pace(m.host.costs, 8)
    jobs = [m.submit(prompt, **how) for prompt in PROMPTS[:2]]
    for _ in range(6):
        m.engine.step()
    reader = m.submit([7] * 60, **how)
    for _ in range(6):
        m.engine.step()
    assert m.engine._prefetched is None or m.engine._prefetched.reading
    reader.cancel()
    assert reader.jobs[0].seq.finish_reason == "cancelled"
    m.engine.run()
    assert [job.results()[0].token_ids for job in jobs] == expected
    assert not m.engine.running and len(m.engine.free_lanes) == 3


def test_a_request_that_joins_is_not_left_behind(ahead):
    """Those whose forward was begun are answered first; then all go on together."""
    m = stepped(fresh(lanes=2))
    m.host.pace = Pace(m.host.costs, 64)  # however slow the machine, a prompt is read at once
    expected = [
        m.generate(prompt, method="ar", max_tokens=20, ignore_eos=True).token_ids
        for prompt in (PROMPTS[0], PROMPTS[2])
    ]
    first = m.submit(PROMPTS[0], method="ar", max_tokens=20, ignore_eos=True)
    for _ in range(9):
        m.engine.step()
    second = m.submit(PROMPTS[2], method="ar", max_tokens=20, ignore_eos=True)
    ahead.clear()
    m.engine.run()
    assert [first.results()[0].token_ids, second.results()[0].token_ids] == expected
    assert ahead.count(2) >= 8


def test_cancelled_between_two_forwards(ahead):
    m = stepped(fresh(lanes=2))
    expected = m.generate(PROMPTS[1], method="ar", max_tokens=12, ignore_eos=True).token_ids
    gone, stays = (
        m.submit(PROMPTS[i], method="ar", max_tokens=12, ignore_eos=True) for i in (0, 1)
    )
    for _ in range(6):
        m.engine.step()
    gone.cancel()
    # takes the free lane, where something was begun
    late = m.submit(PROMPTS[1], method="ar", max_tokens=12, ignore_eos=True)
    m.engine.run()
    assert stays.results()[0].token_ids == late.results()[0].token_ids == expected


@dataclass(frozen=True)
class Number(Outcome):
    number: int


def far(law_BV, sample):
    """A rule whose outcome is no token."""
    return Number.of_batch(number=sample(law_BV) + 10**6)


@method("contrary", guarantee="approximate", reference="contrary")
async def contrary(seq: Canvas, target: ChainScorer, options: NoOptions) -> None:
    """Draw a token, and now and then write another, or look at the text in another way."""
    while not seq.done:
        law_V = await target.next_law(seq)
        token = (await seq.draw(sample_token, law_V)).token
        seq.fill(seq.next(1), [token if seq.filled % 3 else (token + 1) % len(law_V)], "said")
        if seq.filled % 5 == 0 and not seq.done:
            [law_LV] = await target.conditionals(seq, [token, token])
            last = await seq.draw(sample_token, law_LV[-1])
            seq.fill(seq.next(1), [last.token], "said")
        if seq.filled % 7 == 0 and not seq.done:
            drawn = await seq.draw(far, await target.next_law(seq))
            seq.fill(seq.next(1), [drawn.number - 10**6], "said")


def test_what_is_asked_instead_is_answered(ahead):
    m = fresh(lanes=3, dtype=torch.float64)
    m.engine.prefetches = False
    expected = said(m.generate(PROMPTS, method="contrary", temperature=1.0, max_tokens=20))
    m.engine.prefetches = True
    assert (
        said(m.generate(PROMPTS, method="contrary", temperature=1.0, max_tokens=20)) == expected
        and ahead
    )


def test_what_was_begun_for_one_model_answers_no_question_to_another(ahead):
    """The same text is asked about, so that only the model tells the questions apart."""
    m = fresh(lanes=1, dtype=torch.float64)
    other = fresh(lanes=1, dtype=torch.float64, seed=1)
    second_host = m.engine.add_model(other.backbone, m.host.room)

    async def both(seq, laws):
        target = m.handle()
        second = type(target)(m.family, second_host)
        while not seq.done:
            laws.append(await second.next_law(seq))  # once the text has grown: begun for `target`
            laws.append(await target.next_law(seq))
            drawn = await seq.draw(sample_token, laws[-1])
            seq.fill(seq.next(1), [drawn.token], "said")

    def decode(prefetches):
        m.engine.prefetches = prefetches
        laws = []
        seq = m.canvas([10, 20, 30, *[BLANK] * 6], Sampling(temperature=1.0))
        m.run_to_end(seq, lambda: both(seq, laws))
        return torch.stack(laws)

    assert torch.allclose(decode(True), decode(False), atol=1e-9)


def test_nothing_is_begun_behind_the_last_position(ahead):
    """A text that fills the context has no next token, though a lane has slots behind it."""
    m = fresh(lanes=1)
    for length in (158, 159):
        prompt = [i % 200 for i in range(length)]
        assert (
            len(m.generate(prompt, max_tokens=160 - length, ignore_eos=True).token_ids)
            == 160 - length
        )


def test_other_methods_beside_it(ahead):
    m = stepped(fresh(lanes=4))
    ways = [
        dict(method="ar"),
        dict(method="lookup", k=4),
        dict(method="jacobi", block=4),
        dict(method="ar", temperature=1.0),
    ]
    jobs = [m.submit(PROMPTS[0], max_tokens=16, **how) for how in ways]
    m.engine.run()
    m.engine.prefetches = False
    assert [job.results()[0].token_ids for job in jobs] == [
        m.generate(PROMPTS[0], max_tokens=16, **how).token_ids for how in ways
    ]


def test_a_law_without_an_outcome_fails_alone(ahead):
    m = fresh(lanes=2)
    forward = m.backbone.forward

    def broken(batch, slots):
        logits_RV = forward(batch, slots)
        if len(logits_RV) == 2:
            logits_RV[0] = torch.nan
        return logits_RV

    m.backbone.forward = broken
    bad, good = m.generate([PROMPTS[0], PROMPTS[1]], method="ar", max_tokens=6, ignore_eos=True)
    assert bad.error is not None and "no token is possible" in str(bad.error)
    m.backbone.forward = forward
    assert (
        good.token_ids
        == m.generate(PROMPTS[1], method="ar", max_tokens=6, ignore_eos=True).token_ids
    )


@pytest.mark.parametrize("sampling", CERTIFIED, ids=str)
@pytest.mark.parametrize("eos", [(), (1,), (0, 2)], ids=str)
def test_its_law_is_certified(sampling, eos, ahead):
    certificate = certify_case(
        "ar", TableBackbone(vocab=3, seed=1), [0, 1, 0], eos=eos, max_tokens=4, **sampling
    )
    assert abs(certificate.mass - 1) < 1e-12 and certificate.distance < 1e-12
    assert ahead or eos == (0, 2), "but for texts that end at once"


MUTANTS = {
    "believing every guess": (
        "matches",
        lambda self, ticket: ticket in self.rows_of and ticket.waits_for.host is self.host,
    ),
    "mixing up who is left": ("logits_of", lambda self, tickets: self.logits_RV[: len(tickets)]),
    "reading another's token": ("batch", None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_its_mutants_are_caught(mutant, ahead, monkeypatch):
    name, body = MUTANTS[mutant]
    original = TokenPrefetch.batch

    def another(self, applied):
        batch = original(self, applied)
        batch.drawn_T = batch.drawn_T.roll(1)
        return batch

    monkeypatch.setattr(TokenPrefetch, name, body or another)
    with pytest.raises(AssertionError):
        test_what_was_begun_for_a_text_that_ended_is_left_alone(ahead)
        test_what_is_asked_instead_is_answered(ahead)


def test_only_plain_text_has_a_plan_one_token_later():
    plan = Plan(causal_rows(np.array([4, 5, 6])), [np.array([2])], 3, causal=3)
    later = next_token_plan(plan)
    assert later.rows.tolist() == causal_rows(np.array([4, 5, 6, 0])).tolist()
    assert later.stored == later.causal == 4 and [r.tolist() for r in later.reads] == [[3]]
    assert next_token_plan(Plan(plan.rows, [np.array([1, 2])], 3, causal=3)) is None
    assert next_token_plan(Plan(plan.rows, [np.array([2])], 3)) is None
    assert next_token_plan(Plan(plan.rows, [np.array([2])], 2, causal=2)) is None


@pytest.fixture
def chains(ahead, monkeypatch):
    """Guesses go ahead too, though models are small: over fixed memory, as captured forwards do."""
    pytest.importorskip("triton")
    kernels_in_torch.use(monkeypatch)
    monkeypatch.setattr(prefetch_file, "LEAST_COST", 0)
    return ahead


def guessing(lanes, **options):
    m = forerun.load("tiny:llama", lanes=lanes, max_context=128, graphs=True)
    how = dict(method="jacobi", block=4, max_tokens=40, ignore_eos=True, **options)
    return m, how


@pytest.mark.parametrize("sampling,lanes", [("greedy", 1), ("sampled", 3), ("penalised", 2)])
def test_guesses_go_ahead_by_as_many_tokens_as_are_accepted(sampling, lanes, chains, monkeypatch):
    m, how = guessing(lanes, **SAMPLINGS[sampling])
    went = said(m.generate(PROMPTS[:3], **how))
    assert len(chains) > 5
    accepted = {e.accepted for r in m.generate(PROMPTS[:3], **how) for e in r.trace if e.drafted}
    assert len(accepted) > 1 or sampling != "greedy"
    monkeypatch.setattr(Engine, "prefetches", False)
    m, how = guessing(lanes, **SAMPLINGS[sampling])
    assert went == said(m.generate(PROMPTS[:3], **how))


def test_slots_that_guesses_were_written_to_in_vain_are_not_believed(chains):
    """The next request finds the lane as if nothing had gone ahead."""
    m, how = guessing(1)
    text = m.generate(PROMPTS[0], **how).token_ids
    for end in range(8, 22):
        # It ends in the midst of what went ahead; then the guess of before is what is asked for.
        stopped = m.generate(PROMPTS[0], **{**how, "stop_token_ids": [text[end]]})
        last = [event for event in stopped.trace if event.forward == stopped.trace[-1].forward]
        decided = sum(len(event.tokens) for event in last)
        known = stopped.token_ids[: len(stopped.token_ids) - decided]
        again = [*PROMPTS[0], *known, *last[0].drafted]
        asked = dict(method="ar", max_tokens=3, ignore_eos=True, logprobs=1)
        after = m.generate(again, **asked).logprobs
        m.host.forget()
        whole = m.generate(again, **asked).logprobs
        assert [round(one["logprob"], 4) for one in after] == [
            round(one["logprob"], 4) for one in whole
        ]


CHAIN_MUTANTS = {
    "rows that are not moved on": (graphs_file.StaticBatch, "fill", "moved"),
    "slots that are still believed": (Memo, "keep", None),
}


@pytest.mark.parametrize("mutant", CHAIN_MUTANTS)
def test_mutants_of_guesses_are_caught(mutant, chains, monkeypatch):
    owner, name, cleared = CHAIN_MUTANTS[mutant]
    original = getattr(owner, name)

    def without(self, batch, tiles):
        setattr(batch, cleared, None)
        original(self, batch, tiles)

    monkeypatch.setattr(owner, name, without if cleared else lambda self, rows: None)
    with pytest.raises(AssertionError):
        test_slots_that_guesses_were_written_to_in_vain_are_not_believed(chains)
        test_guesses_go_ahead_by_as_many_tokens_as_are_accepted("greedy", 1, chains, monkeypatch)
