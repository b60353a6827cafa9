"""What a trace shows when it is asked to show everything, for every method."""

import json
import math
from functools import cache

import pytest

import forerun
from forerun import registry
from forerun.backbones.table import FREE_ROWS
from forerun.engine.costs import FixedCosts
from forerun.requests.traces import trace_lines
from forerun.sequence.recording import Recorder
from tests.sequence.test_canvas import canvas

MODELS = ("zoo:ar", "zoo:any-subset", "zoo:masked", "zoo:block")
DRAFTS = {"speculative": "zoo:drafter", "specdiff": "zoo:masked"}
LEFT_OUT = (
    "specdiff-confidence",
    "specdiff-ddpm",
    "assd-tolerant",
    "predicted",
)  # they record as others do
METHODS = [name for name in registry.names("methods") if name not in LEFT_OUT]
PROMPT = "def add(a, b):\n    "


@cache
def loaded(name):
    return forerun.load(name, lanes=2)


def model_for(method):
    models = map(loaded, MODELS)
    return next(one for one in models if registry.method_named(method).runs_on(one.family))


@cache
def decoded(method):
    """A result with all that can be recorded, and one without."""
    model = model_for(method)
    asked = dict(method=method, draft=DRAFTS.get(method), max_tokens=8, temperature=0.8, seed=3)
    asked["heal"] = False  # a healed token has the law of a cover, not of a place
    if method == "auto":  # what it chooses hangs on the clock, and on what it has learnt
        model.host.costs = FixedCosts(FREE_ROWS)
        asked["learn"] = False
    recorded = model.generate(PROMPT, record=True, logprobs=2, **asked)
    return recorded, model.generate(PROMPT, **asked)


def lines_of(method, kind):
    return [line for line in decoded(method)[0].recorded if line["kind"] == kind]


@pytest.mark.parametrize("method", METHODS)
def test_recording_changes_nothing(method):
    recorded, plain = decoded(method)
    assert recorded.token_ids == plain.token_ids
    assert recorded.trace == plain.trace
    assert plain.recorded is None


@pytest.mark.parametrize("method", METHODS)
def test_the_commits_rebuild_the_text(method):
    result, _ = decoded(method)
    [start] = lines_of(method, "start")
    canvas = list(start["tokens"])
    assert [token for token in canvas if token is not None] == result.prompt_ids
    for line in lines_of(method, "commit"):
        for position, token in zip(line["positions"], line["tokens"], strict=True):
            canvas[position] = token
    written = canvas[len(result.prompt_ids) :]
    assert written[: len(result.token_ids)] == result.token_ids
    assert start["method"] == method and start["guarantee"] == result.guarantee


@pytest.mark.parametrize("method", METHODS)
def test_every_token_has_the_law_it_was_drawn_from(method):
    result, _ = decoded(method)
    told = {}
    for line in lines_of(method, "commit"):
        for position, law in zip(line["positions"], line["laws"], strict=True):
            told[position] = law
    for position, entry in enumerate(result.logprobs, len(result.prompt_ids)):
        law = told[position]
        at = law["tokens"].index(entry["token"])
        assert law["model"][at] == pytest.approx(math.exp(entry["logprob"]), abs=1e-4)
        assert law["p"][at] == pytest.approx(math.exp(entry["sampled_logprob"]), abs=1e-4)
        assert law["model"][:5] == sorted(law["model"][:5], reverse=True)


@pytest.mark.parametrize("method", METHODS)
def test_forwards_are_counted_as_they_are_shown(method):
    result, _ = decoded(method)
    forwards = lines_of(method, "forward")
    assert sum(not line["draft"] for line in forwards) == result.stats.forwards
    assert sum(line["draft"] for line in forwards) == result.stats.draft_forwards
    shown = [line["forward"] for line in forwards if not line["draft"]]
    assert shown == list(range(1, len(shown) + 1))
    for line in forwards:
        assert len(line["positions"]) == len(line["tokens"]) == len(line["confidence"])
        assert all(0 < sure <= 1 for sure in line["confidence"])


@pytest.mark.parametrize("method", ["speculative", "assd", "jacobi", "ssd", "s2d2", "multiblock"])
def test_what_is_rejected_was_drafted_with_its_chance(method):
    drafts = lines_of(method, "draft")
    assert drafts
    for line in drafts:
        assert len(line["positions"]) == len(line["tokens"]) == len(line["q"])
        assert all(0 < q <= 1 for q in line["q"])
    if method in ("jacobi", "ssd", "multiblock"):  # guesses, certain of themselves
        assert {q for line in drafts for q in line["q"]} == {1.0}
    judged = [line for line in lines_of(method, "commit") if line["drafted"]]
    known = [line["tokens"] for line in drafts]
    if method != "multiblock":  # whose commits are told apart by where a guess came from
        assert all(line["drafted"] in known for line in judged)


def test_routers_say_what_they_saw():
    decisions = lines_of("s2d2", "router")
    assert decisions
    assert all(isinstance(line["verify"], bool) and line["run"] >= 1 for line in decisions)


def test_an_edit_is_a_commit_with_what_it_replaced():
    seq = canvas()
    seq.recorder = Recorder(seq.trace, {})
    told = []
    seq.recorder.on_line = lambda: told.append(len(seq.recorder.lines))
    seq.finalize(2)
    seq.fill([2, 3], [7, 7], "said")
    seq.edit([(3, 8)])
    assert told == [2, 3]  # after each line, and it is there by then
    _, _, edit = seq.recorder.lines
    assert (edit["reason"], edit["positions"], edit["tokens"]) == ("edited", [3], [8])
    assert edit["rejected"] == [7] and edit["laws"] == [None]  # no model was asked


def test_iterates_of_jacobi_are_what_each_forward_was_asked_with():
    chains = [line["chain"] for line in lines_of("jacobi", "forward")]
    drafts = [line["tokens"] for line in lines_of("jacobi", "draft")]
    assert [chain for chain in chains if chain] == drafts


@pytest.mark.parametrize("method", METHODS)
def test_lines_are_json_with_a_text_for_every_token(method):
    result, plain = decoded(method)
    decode = model_for(method).decode
    lines = json.loads(json.dumps(trace_lines(result, 3, decode)))
    assert lines[0]["kind"] == "start" and lines[-1]["kind"] == "end"
    assert lines[-1]["text"] == result.text
    times = [line["time"] for line in lines if "time" in line]
    assert times == sorted(times)
    for line in lines:
        assert line["request"] == 3
        if "tokens" in line:
            assert len(line["texts"]) == len(line["tokens"])
    commits = trace_lines(plain, 0, decode)
    assert {line["kind"] for line in commits} == {"commit"}
    assert [line["tokens"] for line in commits] == [event.tokens for event in plain.trace]


def test_holes_are_recorded_too():
    model = loaded("zoo:any-subset")
    jobs = model.submit_infill("x = <|fill:3|>\n", record=True)
    jobs.run()
    [filled] = jobs.results()
    start = filled.recorded[0]
    assert start["tokens"].count(None) == 3 and start["tokens"][-1] is not None
