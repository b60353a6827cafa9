"""Holes that must hold something: what users write, and what they are told."""

import json
import re

import pytest

from forerun.errors import BadOption, NotAble
from forerun.requests.infill import Infilled
from tests.helpers import ROOT, model, run

pytest.importorskip("outlines_core")

PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}
FILLS = [
    ("any-subset", "sequential", {}),
    ("any-subset", "assd", {"k": 4}),
    ("any-subset", "assd", {"k": 4, "draft": "ngram"}),
    ("masked", "stepwise", {}),
    ("masked", "ssd", {}),
    ("masked", "threshold", {"threshold": 0.0}),
    ("masked", "entropy-bounded", {"bound": 5.0}),
    ("masked", "ancestral", {"steps": 2}),
]


@pytest.mark.parametrize(("arch", "method", "options"), FILLS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_fills_holes_with_what_they_must_hold(arch, method, options, temperature):
    result = model(arch).infill(
        "x = <|fill:20|>; y = <|fill:5|>; z = <|fill:3|>",
        method=method,
        temperature=temperature,
        holes=[{"schema": PAIR}, {"regex": "[a-z]+_[0-9]"}, {"choices": ["yes", "no!", "maybe"]}],
        **options,
    )
    first, second, third = result.fills
    assert json.loads(first).keys() == {"a", "b"}
    assert re.fullmatch("[a-z]+_[0-9]", second)
    assert third in ("yes", "no!")
    assert result.parsed == [json.loads(first), second, third]
    assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("arch", "method"),
    [
        ("masked", "stepwise"),
        ("masked", "ssd"),
        ("masked", "threshold"),
        ("block", "block-stepwise"),
        ("block", "block-ssd"),
        ("block", "block"),
        ("block", "s2d2"),
        ("block", "s2d2-canvases"),
    ],
)
def test_canvases_that_are_generated_are_texts_of_the_language(arch, method):
    for length in (9, 30):
        result = model(arch).generate(
            "x = ", method=method, temperature=1.0, max_tokens=length, regex="[a-c]{2,30}[.]"
        )
        assert re.fullmatch("[a-c]{2,30}[.]", result.text), result.text
        assert result.parsed == result.text


@pytest.mark.parametrize(("arch", "method"), [("masked", "stepwise"), ("block", "block-ssd")])
def test_a_constraint_that_cannot_be_met_says_so_without_a_forward(arch, method):
    result = model(arch).generate("x", method=method, regex="[a-c]{9}", max_tokens=3)
    assert (result.finish_reason, result.text, result.parsed) == ("unmet", "", None)
    assert result.stats.forwards == 0


def test_ssd_writes_what_stepwise_writes_and_assd_what_sequential_writes():
    text = "x = <|fill:12|>; y = <|fill:6|>"
    for arch, methods in (("masked", ("stepwise", "ssd")), ("any-subset", ("sequential", "assd"))):
        fills = [
            model(arch).infill(text, method=m, regex="[a-z]+[0-9]{2,5}").fills for m in methods
        ]
        assert fills[0] == fills[1]


def test_batched_is_what_alone_is():
    texts = ["x = <|fill:6|>", "return <|fill:4|>!", "a"]
    together = model("masked").infill(texts[:2], regex="[a-z]+[0-9]")
    for text, result in zip(texts, together):
        assert model("masked").infill(text, regex="[a-z]+[0-9]").fills == result.fills


def test_only_lengths_that_the_language_has_are_tried():
    result = model("any-subset").infill("x = <|fill:2-9|>", regex="(abc)+", n=2, temperature=1.0)
    assert {one.text for one in result} <= {"x = abc", "x = abcabc", "x = abcabcabc"}


def test_a_hole_without_a_length_takes_those_of_its_choices():
    result = model("any-subset").infill("x = <|fill|>;", choices=["one", "fifteen"])
    assert result.fills[0] in ("one", "fifteen")
    with pytest.raises(BadOption, match="needs a length"):
        model("any-subset").infill("x = <|fill|>;", regex="[a-z]+")


def test_holes_that_touch_each_hold_their_own():
    result = model("masked").infill(
        "<|fill:2|><|fill:3|>x", holes=[{"regex": "[a-c]+"}, {"regex": "[0-9]+"}]
    )
    assert re.fullmatch("[a-c]{2}", result.fills[0]) and re.fullmatch("[0-9]{3}", result.fills[1])


def test_what_holds_for_the_request_holds_in_the_hole():
    letters = [ord(letter) for letter in "abz"]
    tokenizer = model("masked").tokenizer
    allowed = [tokenizer(chr(letter)).input_ids[0] for letter in letters]
    result = model("masked").infill("x<|fill:6|>", regex="[a-y]+", allowed_tokens=allowed)
    assert set(result.fills[0]) <= set("ab")


def test_the_reference_says_that_a_constraint_is_part_of_it():
    constrained = model("masked").infill("x<|fill:2|>", regex="[a-y]+", method="ssd")
    assert constrained.reference.endswith("under the same constraint")
    assert not model("masked").infill("x<|fill:2|>", method="ssd").reference.endswith("constraint")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"regex": "[0-9]{9}"}, "hole 1 has 2 tokens.*the shortest has 9"),
        ({"regex": "ab", "allowed_tokens": [7]}, "can be spelled"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"choices": []}, "choices"),
        ({"schema": {"type": "object"}}, "properties"),
        ({"holes": [None, None]}, "2 entries, and the text has 1"),
        ({"holes": [{"regexp": "a"}]}, "'regexp'"),
        ({"holes": [{"regex": "a", "choices": ["a"]}]}, "must be None or have one of"),
        ({"holes": [{"regex": "a"}], "regex": "a"}, "give one of them"),
        ({"holes": {"regex": "a"}}, "one entry for each hole"),
        ({"holes": "regex"}, "one entry for each hole"),
    ],
    ids=str,
)
def test_bad_holes_are_refused_in_one_line(options, said):
    with pytest.raises(BadOption, match=said) as refused:
        model("masked").infill("x = <|fill:2|>", **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("arch", "method"), [("masked", "stepwise"), ("any-subset", "assd")])
def test_context_free_grammars_over_holes_are_refused_with_the_reason(arch, method):
    with pytest.raises(NotAble, match="context-free"):
        model(arch).infill("x<|fill:2|>", method=method, grammar='start: "(" start ")" | "x"')


def test_a_bad_hole_of_one_text_fails_alone():
    with pytest.warns(UserWarning, match="1 of 2"):
        good, bad = model("masked").infill(["<|fill:3|>x", "<|fill:2|>x"], choices=["yes"])
    assert good.fills == ["yes"]
    assert isinstance(bad, Infilled) and "so many" in str(bad.error)


def test_tokens_that_may_still_change_and_a_constraint_are_refused_together():
    with pytest.raises(BadOption, match=r"edit=0\.9 with a constraint"):
        model("block").generate("x", method="block", edit=0.9, regex="[a-z]+", max_tokens=4)


def test_log_probabilities_are_those_of_the_model_and_of_the_constrained_law():
    result = model("masked").infill("x<|fill:2|>", choices=["ab"], logprobs=1)
    for entry in result.logprobs:
        assert entry["logprob"] < 0
        assert entry["sampled_logprob"] == 0  # it was certain


def test_the_command_line_fills_each_hole_with_its_own():
    words = ["infill", "--model", "zoo:masked", "x = <|fill:2|>; y =<|fill|>", "--json"]
    done = run(*words, "--hole", "regex=[0-9]+", "--hole", 'choices=[" True", " None"]')
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert re.fullmatch("[0-9]+", found["fills"][0]) and found["fills"][1] in (" True", " None")
    done = run("infill", "--model", "zoo:masked", "x = <|fill:2|>", "--regex", "[a-f]+", "--json")
    assert re.fullmatch("[a-f]+", json.loads(done.stdout)["fills"][0])


@pytest.mark.parametrize("hole", ["foo", "regex", "choices=[1", "schema=nowhere.json"])
def test_the_command_line_refuses_a_bad_hole_in_one_line(hole):
    done = run("infill", "--model", "zoo:masked", "x = <|fill:2|>", "--hole", hole)
    assert isinstance(done.exception, BadOption)
    assert "--hole" in str(done.exception) and "\n" not in str(done.exception)


def test_the_example_fills_holes_with_names_in_scope(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import names_in_scope

    monkeypatch.setattr("sys.argv", ["names_in_scope.py"])
    names_in_scope.main()
    written = capsys.readouterr().out
    assert "hole" not in written and "fill" not in written
    for function in names_in_scope.FUNCTIONS:
        head = function.split("\n", 1)[0]
        assert head in written
    names = {name for f in names_in_scope.FUNCTIONS for name in names_in_scope.names_in_scope(f)}
    for found in re.findall(r"return (.*)", written):
        assert found in names


def test_an_engine_for_grammars_is_refused_where_none_reads_them():
    asked = dict(regex="[a-z]+", grammar_engine="xgrammar")
    with pytest.raises(BadOption, match=r"grammar_engine='xgrammar'.*no engine reads"):
        model("any-subset").infill("x = <|fill:2|>", **asked)
    with pytest.raises(BadOption, match="grammar_engine='xgrammar'"):
        model("masked").generate("x = ", max_tokens=4, **asked)
