"""Prompts that end inside a token: what callers get, in every shape of a request."""

import json

import pytest

import forerun
from tests.helpers import run

BREAK = "def fib(n):\n"
HALF = "import nu"


@pytest.fixture(scope="module")
def zoo():
    with forerun.load("zoo:ar", lanes=4) as model:
        yield model


def test_a_text_that_ends_in_a_line_break_goes_on_as_one_that_does_not(zoo):
    before = zoo.generate(BREAK[:-1], max_tokens=12)
    after = zoo.generate(BREAK, max_tokens=12)
    assert before.text == "\n" + after.text
    assert [*before.prompt_ids, *before.token_ids] == [*after.prompt_ids, *after.token_ids]
    assert after.text.startswith("    ")
    assert not zoo.generate(BREAK, max_tokens=12, heal=False).text.startswith(" ")


def test_half_a_word_is_completed(zoo):
    found = zoo.generate(HALF, max_tokens=8)
    assert found.text.startswith("mpy")
    assert found.stats.tokens == len(found.token_ids) == 8
    assert found.stats.prompt_tokens == len(found.prompt_ids) == 1  # "import"
    assert zoo.decode([*found.prompt_ids, *found.token_ids]) == HALF + found.text


@pytest.mark.parametrize("name", ["zoo:masked", "zoo:any-subset", "zoo:block", "zoo:consistency"])
def test_every_family_heals(name):
    with forerun.load(name, lanes=1) as model:
        assert model.generate(BREAK, max_tokens=8).text.startswith("    ")
        assert model.generate(HALF, max_tokens=6).text.startswith("mpy")


def test_token_ids_and_chats_are_taken_as_they_are(zoo):
    ids = zoo.encode(BREAK)
    assert zoo.generate(ids, max_tokens=8).prompt_ids == ids
    assert (
        zoo.generate(ids, max_tokens=8).text == zoo.generate(BREAK, max_tokens=8, heal=False).text
    )


def test_a_prompt_that_no_token_extends_costs_nothing(zoo):
    found = zoo.generate("def fib(n):", max_tokens=8)
    assert found.prompt_ids == zoo.encode("def fib(n):")
    assert found.stats.forwards == 8
    assert not any(event.reason == "healed" for event in found.trace)


def test_streams_say_every_character_once(zoo):
    whole = zoo.generate([BREAK, HALF, "x = 'h"], max_tokens=10, method="lookup")
    pieces = ["", "", ""]
    for index, piece in zoo.stream([BREAK, HALF, "x = 'h"], max_tokens=10, method="lookup"):
        pieces[index] += piece
    assert pieces == [result.text for result in whole]


def test_samples_heal_each_for_itself(zoo):
    found = zoo.generate(HALF, n=4, temperature=1.5, seed=3, max_tokens=4)
    assert len({result.text for result in found}) > 1
    for result in found:
        assert zoo.decode([*result.prompt_ids, *result.token_ids]) == HALF + result.text
        assert len(result.token_ids) == 4


def test_log_probabilities_are_of_the_text_that_is_new(zoo):
    found = zoo.generate(HALF, max_tokens=4, logprobs=2, prompt_logprobs=0)
    assert "".join(entry["text"] for entry in found.logprobs) == found.text
    assert len(found.prompt_logprobs) == len(found.prompt_ids)
    first = found.logprobs[0]
    score = zoo.score([*found.prompt_ids], [[first["token"]]])[0]
    assert first["logprob"] == pytest.approx(score.logprob, abs=1e-4)


def test_a_stop_string_may_stand_beyond_the_prompt(zoo):
    found = zoo.generate(HALF, stop="mp", max_tokens=8)
    assert found.text == ""
    assert found.stopped_by == "mp"
    # The prompt's own bytes are no output: nothing stops there.
    assert zoo.generate(HALF, stop="nump", max_tokens=4).stopped_by is None


def test_what_may_not_be_generated_ends_no_prompt(zoo):
    numpy = zoo.generate(HALF, max_tokens=1).token_ids[0]
    other = zoo.generate(HALF, max_tokens=1, logit_bias={numpy: -100.0})
    assert other.token_ids[0] != numpy
    assert zoo.generate(HALF, max_tokens=1, logit_bias={numpy: 50.0}).token_ids == [numpy]
    allowed = zoo.encode("q", special=False)
    forced = zoo.generate(HALF, max_tokens=2, allowed_tokens=allowed)
    assert forced.text == "qq"


def test_a_constraint_holds_for_what_follows_the_prompt(zoo):
    pytest.importorskip("llguidance")
    found = zoo.generate(HALF, regex="mpy( as [a-z]{1,3})?", max_tokens=8)
    assert found.text.startswith("mpy") and found.parsed == found.text
    assert found.token_ids[0] == zoo.generate(HALF, max_tokens=1).token_ids[0]
    closed = zoo.generate(HALF, choices=["mpy"], max_tokens=8)
    assert closed.text == "mpy" and closed.finish_reason == "stop"
    shape = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
             "additionalProperties": False}  # fmt: skip
    assert zoo.generate("# JSON:\n", schema=shape, max_tokens=48).parsed == {"a": 1}


def test_penalties_count_the_prompt_as_the_model_saw_it(zoo):
    options = dict(max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.5)
    assert zoo.generate(BREAK, **options).text == zoo.generate(BREAK[:-1], **options).text[1:]


def test_methods_heal_alike(zoo):
    plain = zoo.generate(BREAK, max_tokens=16)
    for options in (
        dict(method="lookup"),
        dict(method="jacobi"),
        dict(method="speculative", draft="zoo:drafter"),
    ):
        assert zoo.generate(BREAK, max_tokens=16, **options).token_ids == plain.token_ids


def test_at_the_end_of_the_context_nothing_is_spelled_otherwise():
    with forerun.load("zoo:ar", lanes=1, max_context=12) as model:
        found = model.generate(BREAK, max_tokens=5)
        assert len(found.prompt_ids) + len(found.token_ids) <= 12
        assert len(found.token_ids) == 5


def test_it_is_a_flag():
    options = ("--max-tokens", 4, "--json", "-q")
    healed = run("generate", HALF, *options)
    plain = run("generate", HALF, "--no-heal", *options)
    assert json.loads(healed.stdout)["text"].startswith("mpy")
    assert not json.loads(plain.stdout)["text"].startswith("mpy")


def test_a_value_that_is_none_is_refused(zoo):
    with pytest.raises(forerun.ForerunError, match="heal='yes' must be True or False"):
        zoo.generate(HALF, heal="yes")
