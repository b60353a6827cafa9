"""On a CPU a model writes several tokens in one step where its forward is C++: the same text as
token by token."""

import pytest

import forerun
from forerun.backbones import native
from forerun.engine import continuation
from forerun.engine.continuation import Continuations
from forerun.engine.pack import MovingRows
from tests.helpers import stepped

PROMPTS = [[5, 6, 7], [9], list(range(3, 40))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def compiled(folder, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(folder))
    monkeypatch.setattr(continuation, "MOST_TOKENS", 8)
    native.compiled_in.cache_clear()
    if native.library() is None:
        pytest.skip(native.compiled().words)
    yield
    native.compiled_in.cache_clear()


def pair(graphs=None):
    """A model and another that drafts for it."""
    how = {"lanes": 4, "max_context": 96, "graphs": graphs}
    return forerun.load("tiny:llama", **how), forerun.load("tiny:qwen2", **how)


@pytest.fixture
def written(monkeypatch):
    """How many tokens each launch wrote, for how many sequences."""
    runs = []
    run = Continuations.begin

    def noted(self, asked, lanes, logits_BV):
        answer = run(self, asked, lanes, logits_BV)
        runs.append((len(asked), self.wrote))
        return answer

    monkeypatch.setattr(Continuations, "begin", noted)
    return runs


SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    "ends early": {"temperature": 1.0, "seed": 4, "stop_token_ids": list(range(20, 40))},
    "penalised": {"temperature": 0.9, "seed": 6, "frequency_penalty": 0.5},
    "with logprobs": {"temperature": 0.9, "seed": 7, "logprobs": 2},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_plain_text_is_that_written_token_by_token(name, written):
    outputs = []
    for graphs in (False, None):
        m, _ = pair(graphs)
        results = m.generate(PROMPTS, method="ar", max_tokens=21, **SAMPLING[name])
        outputs.append([(r.token_ids, r.finish_reason, r.stats.forwards) for r in results])
    assert outputs[0] == outputs[1]
    assert bool(written) == (name not in ("penalised", "with logprobs"))  # which need the host


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_drafts_are_those_written_one_by_one(name, written):
    outputs = []
    for graphs in (False, None):
        m, draft = pair(graphs)
        how = {"method": "speculative", "draft": draft, "k": 3, "max_tokens": 12}
        results = m.generate(PROMPTS, ignore_eos=True, **how, **SAMPLING[name])
        outputs.append([(r.token_ids, str(r.trace), r.stats.draft_forwards) for r in results])
    assert outputs[0] == outputs[1] and written


def test_nobody_writes_beyond_the_end_of_all(written):
    m, _ = pair()
    plain = m.generate(PROMPTS[0], method="ar", max_tokens=40, ignore_eos=True)
    third = plain.token_ids[2]
    del written[:]
    m.generate(PROMPTS[0], method="ar", max_tokens=3, ignore_eos=True)
    assert written == [(1, 3)]
    del written[:]
    result = m.generate(PROMPTS[0], method="ar", max_tokens=40, stop_token_ids=[third])
    first = plain.token_ids.index(third)
    assert result.token_ids == plain.token_ids[: first + 1]
    assert written == [(1, first + 1)]


def test_who_asks_for_one_forward_is_not_kept_waiting(written):
    m, _ = pair()
    stepped(m)
    lookup = {"method": "lookup", "max_tokens": 5}
    asked = [([5, 6, 7], {"method": "ar", "max_tokens": 30}), ([9], lookup)]
    jobs = [m.submit(prompt, ignore_eos=True, **options) for prompt, options in asked]
    m.engine.run()
    assert written and max(count for count, _ in written) == 1  # once the other has ended
    alone = [m.generate(prompt, ignore_eos=True, **options).token_ids for prompt, options in asked]
    assert [job.results()[0].token_ids for job in jobs] == alone


@pytest.mark.parametrize("name", ["greedy", "sampled", "ends early"])
def test_a_launch_that_ends_early_changes_no_text(name, written):
    m, _ = pair()
    how = {"method": "ar", "max_tokens": 21, **SAMPLING[name]}
    whole = m.generate(PROMPTS, **how)
    del written[:]
    calls = iter(range(1000))
    m.engine.has_messages = lambda: next(calls) % 3 == 2
    cut = m.generate(PROMPTS, **how)
    assert [r.token_ids for r in cut] == [r.token_ids for r in whole]
    assert [r.finish_reason for r in cut] == [r.finish_reason for r in whole]
    counts = [tokens for _, tokens in written]
    assert 1 in counts and max(counts) > 1


def test_who_joins_waits_for_one_token_only(written, monkeypatch):
    m, _ = pair()
    how = {"method": "ar", "max_tokens": 16, "ignore_eos": True}
    alone = [m.generate(prompt, **how).token_ids for prompt in PROMPTS[:2]]
    del written[:]
    joined = []
    write = m.host.write_likeliest

    def write_as_another_comes(batch, asked):
        if not joined:
            joined.append(m.submit(PROMPTS[1], **how))
        return write(batch, asked)

    monkeypatch.setattr(m.host, "write_likeliest", write_as_another_comes)
    first = m.generate(PROMPTS[0], **how).token_ids
    assert [first, joined[0].results()[0].token_ids] == alone
    assert written[:2] == [(1, 1), (2, 8)]


def test_drafts_are_written_to_their_end_whoever_waits(written):
    m, draft = pair()
    how = {"method": "speculative", "draft": draft, "k": 3, "max_tokens": 12, "ignore_eos": True}
    whole = m.generate(PROMPTS[0], **how)
    del written[:]
    m.engine.has_messages = lambda: True
    again = m.generate(PROMPTS[0], **how)
    assert str(again.trace) == str(whole.trace) and (1, 3) in written


def test_rows_that_do_not_move_write_another_text(monkeypatch):
    """So the tests above would see it."""
    right = pair(False)[0].generate(
        PROMPTS[0], method="ar", max_tokens=12, ignore_eos=True, **SAMPLING["sampled"]
    )
    set_tokens = MovingRows.set_tokens
    monkeypatch.setattr(
        MovingRows, "set_tokens", lambda self, tokens, steps: set_tokens(self, tokens, 0)
    )
    wrong = pair()[0].generate(
        PROMPTS[0], method="ar", max_tokens=12, ignore_eos=True, **SAMPLING["sampled"]
    )
    assert wrong.token_ids != right.token_ids


def test_large_models_write_token_by_token():
    m, _ = pair()
    assert m.host.at_once == continuation.MOST_TOKENS
    m.backbone.read_bytes = 10**9
    assert m.host.at_once == 1
