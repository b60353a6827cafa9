"""A model that writes on by itself writes what it would write token by token. On a GPU that is one
captured program; here it runs over the same fixed memory."""

import pytest
import torch

pytest.importorskip("triton")

import forerun
from forerun.engine import continuation
from forerun.engine.continuation import Continuations
from forerun.engine.costs import StepCosts
from forerun.engine.engine import Engine
from tests import kernels_in_torch
from tests.helpers import stepped

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
PROMPTS = [[5, 6, 7], [9]]


def pair(graphs, **options):
    """A model and another that drafts for it."""
    how = {"device": DEVICE, "lanes": 4, "max_context": 64, "graphs": graphs}
    return forerun.load("tiny:llama", **how), forerun.load("tiny:qwen2", **how)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    kernels_in_torch.use(monkeypatch)


@pytest.fixture
def written(monkeypatch):
    """How many tokens were written at once, for how many sequences."""
    runs = []
    run = Continuations.begin

    def noted(self, asked, lanes, logits_BV):
        answer = run(self, asked, lanes, logits_BV)
        if answer is not None:
            runs.append((len(asked), asked[0].tokens))
        return answer

    monkeypatch.setattr(Continuations, "begin", noted)
    return runs


@pytest.fixture
def eager(monkeypatch):
    """Plain text is written in programs from the first time on, eight tokens each."""
    monkeypatch.setattr(continuation, "ASKED_BEFORE", 1)
    monkeypatch.setattr(continuation, "MOST_TOKENS", 8)
    monkeypatch.setattr(continuation, "LEAST_TOKENS", 2)
    monkeypatch.setattr(continuation, "LEAST_TOKENS_ON_CPU", 2)


def steps(results):
    return [(r.token_ids, str(r.trace), r.stats.draft_forwards) for r in results]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5, "draft_temperature": 0.7},
        {"temperature": 0.9, "seed": 6, "frequency_penalty": 0.5},
    ],
    ids=["greedy", "sampled", "truncated", "penalised"],
)
def test_drafts_written_at_once_are_those_written_one_by_one(sampling, written):
    outputs = []
    for graphs in (False, True):
        m, draft = pair(graphs)
        how = {"method": "speculative", "draft": draft, "k": 3, "max_tokens": 10}
        outputs.append(steps(m.generate(PROMPTS, ignore_eos=True, **how, **sampling)))
    assert outputs[0] == outputs[1]
    assert bool(written) == ("frequency_penalty" not in sampling)  # which needs the host


def test_a_draft_ends_where_the_text_does_and_takes_no_room_that_is_not_there(written):
    m, draft = pair(True)
    how = {"method": "speculative", "draft": draft, "k": 3}
    greedy = m.generate([5, 6, 7], method="ar", max_tokens=4, ignore_eos=True).token_ids
    result = m.generate([5, 6, 7], stop_token_ids=[greedy[2]], max_tokens=4, **how)
    assert result.token_ids == greedy[: greedy.index(greedy[2]) + 1]
    long = list(range(3, 63))  # of 64
    plain = m.generate(long, method="ar", max_tokens=4, ignore_eos=True).token_ids
    assert m.generate(long, ignore_eos=True, max_tokens=4, **how).token_ids == plain
    assert written


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 6}], ids=["cold", "warm"])
def test_a_program_for_more_sequences_does_for_fewer(sampling, written, eager):
    """Until it is clear that fewer are asked for often."""
    m = stepped(forerun.load("tiny:llama", device=DEVICE, lanes=4, max_context=64, graphs=True))
    how = {"method": "ar", "max_tokens": 17, "ignore_eos": True, **sampling}
    prompts = [[5, 6, 7], [9], [8, 8], [4]]
    together = [result.token_ids for result in m.generate(prompts, **how)]
    programs = m.host.writer._programs
    assert [size.forward.rows for size in programs] == [4]
    alone = [m.generate(prompt, **how).token_ids for prompt in prompts]
    assert alone == together and (1, 8) in written
    assert [size.forward.rows for size in programs] == [4]
    for _ in range(continuation.COVERED_BEFORE // 2):
        m.generate([9], **how)
    assert [size.forward.rows for size in programs] == [4, 1]
    assert m.generate([9], **how).token_ids == together[1]


def test_those_who_want_as_many_tokens_share_a_launch(written):
    m, draft = pair(True)
    stepped(m)
    how = {"method": "speculative", "draft": draft, "ignore_eos": True, "max_tokens": 4}
    asked = [([5, 6, 7], 2), ([9], 2), ([3, 4], 1)]
    jobs = [m.submit(prompt, k=k, **how) for prompt, k in asked]
    m.engine.run()
    assert (2, 2) in written and (1, 1) in written
    alone = [m.generate(prompt, k=k, **how) for prompt, k in asked]
    assert [job.results()[0].token_ids for job in jobs] == [one.token_ids for one in alone]


def test_a_program_that_is_wrong_is_used_once_at_most(monkeypatch, written):
    m, draft = pair(True)
    how = {"method": "speculative", "draft": draft, "k": 3, "max_tokens": 4, "ignore_eos": True}
    right = m.generate([5, 6, 7], method="ar", max_tokens=4, ignore_eos=True).token_ids
    set_tokens = continuation.StaticBatch.set_tokens
    monkeypatch.setattr(
        continuation.StaticBatch,
        "set_tokens",
        lambda self, tokens, steps: set_tokens(self, tokens, 0),
    )
    del written[:]
    with pytest.warns(UserWarning, match="tokens written on of this model are not captured"):
        assert m.generate([5, 6, 7], **how).token_ids == right  # a wrong draft is only slower
    assert len(written) == 1


def test_a_program_that_is_wrong_never_writes_a_text(monkeypatch, written, eager):
    right = pair(False)[0].generate([5, 6, 7], method="ar", max_tokens=9, ignore_eos=True)
    m, _ = pair(True)
    set_tokens = continuation.StaticBatch.set_tokens
    monkeypatch.setattr(
        continuation.StaticBatch,
        "set_tokens",
        lambda self, tokens, steps: set_tokens(self, tokens, 0),
    )
    with pytest.warns(UserWarning, match="not captured"):
        found = m.generate([5, 6, 7], method="ar", max_tokens=9, ignore_eos=True)
    assert found.token_ids == right.token_ids and not written


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "seed": 4, "stop_token_ids": list(range(20, 60))},
        {"temperature": 0.9, "seed": 6, "frequency_penalty": 0.5},
        {"temperature": 0.9, "seed": 7, "logprobs": 2},
    ],
    ids=["greedy", "sampled", "ends early", "penalised", "with logprobs"],
)
def test_plain_text_written_at_once_is_that_written_token_by_token(sampling, written, eager):
    outputs = []
    for graphs in (False, True):
        m, _ = pair(graphs)
        how = {"method": "ar", "max_tokens": 21, **sampling}
        results = m.generate(PROMPTS, **how)
        outputs.append([(r.token_ids, r.finish_reason, r.stats.forwards) for r in results])
    assert outputs[0] == outputs[1]
    plain = {"frequency_penalty", "logprobs"} & sampling.keys()  # need the host
    assert [tokens for _, tokens in written] == ([] if plain else [8] * len(written))
    assert bool(written) != bool(plain)


def test_who_asks_for_one_forward_is_not_kept_waiting(written, eager):
    m, _ = pair(True)
    stepped(m)
    how = {"ignore_eos": True}
    lookup = {"method": "lookup", "max_tokens": 5}
    asked = [([5, 6, 7], {"method": "ar", "max_tokens": 30}), ([9], lookup)]
    jobs = [m.submit(prompt, **how, **options) for prompt, options in asked]
    m.engine.run()
    assert written and max(count for count, _ in written) == 1  # once the other has ended
    alone = [m.generate(prompt, **how, **options).token_ids for prompt, options in asked]
    assert [job.results()[0].token_ids for job in jobs] == alone


def test_auto_writes_plain_text_at_once_where_no_draft_pays(written, eager, monkeypatch):
    seconds = []
    observe = StepCosts.observe
    monkeypatch.setattr(
        StepCosts, "observe", lambda self, *seen: seconds.append(seen) or observe(self, *seen)
    )
    m, _ = pair(True)
    m.host.costs.curve = {1: 1.0, 2: 9.0}  # where a draft of one token costs nine steps
    how = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.9, "seed": 2}
    found = m.generate(PROMPTS, method="auto", **how)
    assert [tokens for _, tokens in written] and not m.host.costs.begins_ahead
    assert all(rows == 2 and not judged for rows, judged, *_ in seconds) and seconds
    plain = pair(False)[0].generate(PROMPTS, method="ar", **how)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]


def test_a_size_is_met_before_it_is_captured(written):
    m, _ = pair(True)
    m.generate([5, 6, 7], method="ar", max_tokens=3, ignore_eos=True)
    assert not written


def test_who_was_given_one_token_asks_for_several_again(written, eager, monkeypatch):
    """Where programs are used, the next forward is not begun ahead: or a text whose size is met for
    the first time would go on token by token to its end."""
    monkeypatch.setattr(continuation, "ASKED_BEFORE", 2)
    monkeypatch.setattr(Engine, "prefetches", True)
    m = stepped(pair(True)[0])
    how = {"method": "ar", "ignore_eos": True, "max_tokens": 40}
    m.generate([5, 6, 7], **how)
    assert not written, "ahead, while there is no program at all"
    m.generate([5, 6, 7], **how)
    written.clear()
    m.generate([5, 6, 7], temperature=0.7, **how)  # that is a program of its own
    assert len(written) > 3


def test_large_models_write_token_by_token(monkeypatch):
    """So do those whose forwards are long enough to hide the host."""
    m, _ = pair(True)
    monkeypatch.setattr(m.host.backbone, "cost", 7e9)
    assert m.host.at_once == 1
    monkeypatch.setattr(m.host.backbone, "cost", 1.35e8)
    monkeypatch.setattr(m.host.backbone, "layers", 30)
    assert m.host.at_once == 1
    monkeypatch.undo()
    monkeypatch.setattr(m.host.backbone, "cost", 1e8)
    assert m.host.at_once == continuation.MOST_TOKENS
