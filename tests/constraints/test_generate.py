"""Constraints from Python and the command line, through the whole engine, on models that know
nothing of JSON."""

import json
import re

import pytest
from typer.testing import CliRunner

import forerun
from forerun.cli import app
from forerun.errors import BadOption, ForerunError
from tests.helpers import model

pytest.importorskip("llguidance")
pydantic = pytest.importorskip("pydantic")
jsonschema = pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["kind", "age", "tags"],
    "additionalProperties": False,
}
METHODS = [
    dict(method="ar"),
    dict(method="lookup"),
    dict(method="jacobi"),
    dict(method="multiblock"),
    dict(method="lookahead"),
    dict(method="speculative", draft="tiny:llama:1"),
]


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)
    legs: int = pydantic.Field(ge=0, le=9)


def write(max_tokens=120, **options):
    return model().generate([5, 6, 7], max_tokens=max_tokens, **options)


@pytest.mark.parametrize("options", METHODS, ids=lambda o: o["method"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_method_writes_json_of_the_schema(options, temperature):
    result = write(schema=SCHEMA, temperature=temperature, seed=3, **options)
    assert result.finish_reason == "stop" and result.guarantee == "exact"
    assert result.parsed == json.loads(result.text)
    jsonschema.validate(result.parsed, SCHEMA)
    assert result.reference.endswith("with schema as llguidance reads it")


ENDLESS = [  # of prompts that make drafts reach the last token of a language
    ([110, 241, 78, 79, 110, 241], dict(regex="(ab|cd){3,20}", top_k=2, temperature=1.0, seed=2)),
    ([28, 154, 37, 122] * 10, dict(regex="hello [a-z ]{3,20}!")),
    ([10, 20], dict(choices=["hello there", "good bye"])),
]


@pytest.mark.parametrize("prompt,options", ENDLESS)
def test_a_draft_may_complete_a_text_that_no_token_may_end(prompt, options):
    """Behind its last token nothing is allowed; nothing is wanted there, either."""
    written = {}
    for how in [
        *METHODS,
        dict(method="auto"),
        dict(method="lookup", k=16, adapt=False),
        dict(method="predicted", prediction=[64, 65] * 10),
    ]:
        result = model().generate([prompt], max_tokens=50, ignore_eos=True, **options, **how)[0]
        assert (result.finish_reason, result.error) == ("stop", None)
        assert re.fullmatch(options.get("regex", "hello there|good bye"), result.text)
        written[how["method"]] = result.text
    certain = ("ar", "lookup", "jacobi", "auto", "predicted")
    alike = certain if "temperature" in options else written
    assert len({written[name] for name in alike}) == 1


def test_at_temperature_0_every_method_writes_the_same():
    texts = {write(schema=SCHEMA, **options).text for options in METHODS}
    assert len(texts) == 1


def test_forced_tokens_make_more_tokens_per_forward():
    result = write(schema=SCHEMA, method="ar")
    forced = sum(len(event.tokens) for event in result.trace if event.reason == "forced")
    assert forced > 10
    assert result.stats.forwards + forced == result.stats.tokens


def test_with_logprobs_forced_tokens_have_theirs():
    plain = write(schema=SCHEMA)
    told = write(schema=SCHEMA, logprobs=1)
    assert told.text == plain.text and len(told.logprobs) == told.stats.tokens
    assert sum(entry["sampled_logprob"] == 0 for entry in told.logprobs) == told.stats.tokens


def test_models_and_types_come_back_as_values():
    pet = write(schema=Pet, temperature=1.0).parsed
    assert isinstance(pet, Pet) and 0 <= pet.legs <= 9
    assert isinstance(write(schema=bool).parsed, bool)
    out = write(schema=Pet, temperature=1.0)
    assert json.loads(json.dumps(out.as_dict()))["parsed"] == out.parsed.model_dump()


def test_regular_expressions_grammars_and_choices():
    assert re.fullmatch(r"[0-9]{3}-[a-f]+", write(regex=r"[0-9]{3}-[a-f]{1,4}").text)
    lark = 'start: "(" inner ")"\ninner: /[xyz]/ | start\n'
    text = write(grammar=lark, temperature=1.0, seed=1).text
    assert text.count("(") == text.count(")") > 0
    assert re.fullmatch(r"ab+", write(grammar='root ::= "a" "b" | "a" "bb"').text)
    chosen = write(choices=["yes", "no", "perhaps"])
    assert chosen.parsed in ("yes", "no", "perhaps") and chosen.finish_reason == "stop"


def test_a_constraint_that_is_not_met_in_time_says_so():
    result = write(schema=SCHEMA, max_tokens=6)
    assert result.finish_reason == "unmet" and result.parsed is None
    longer = write(regex="[ab]+", max_tokens=6)
    assert longer.finish_reason in ("length", "stop") and longer.parsed == longer.text


def test_samples_and_prompts_have_constraints_of_their_own():
    results = model().generate([[5], [6, 7]], regex=["a[bc]", "[0-9]{2}"], max_tokens=9)
    assert re.fullmatch("a[bc]", results[0].text) and re.fullmatch("[0-9]{2}", results[1].text)
    several = write(choices=["one", "two"], n=3, temperature=1.0)
    assert {result.text for result in several} <= {"one", "two"}


def test_streamed_text_is_the_text():
    pieces = list(model().stream([5, 6], schema=SCHEMA, max_tokens=120))
    assert "".join(pieces) == model().generate([5, 6], schema=SCHEMA, max_tokens=120).text


def test_both_engines_are_named_and_write_what_was_asked():
    pytest.importorskip("xgrammar")
    result = write(schema=SCHEMA, grammar_engine="xgrammar", method="lookup", temperature=1.0)
    jsonschema.validate(result.parsed, SCHEMA)
    assert "xgrammar" in result.reference
    assert write(choices=['a"b\\', "ü"], grammar_engine="xgrammar").text in ('a"b\\', "ü")
    with pytest.raises(BadOption, match="regex= cannot be used"):
        write(regex="(a", grammar_engine="xgrammar")


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(schema=False), "has no value"),
        (dict(schema={"type": "integer", "minimum": 5, "maximum": 4}), "Unsatisfiable"),
        (dict(schema={"type": "thing"}), "Invalid type"),
        (dict(regex="(a"), "unclosed group"),
        (dict(grammar="start: missing"), "missing"),
        (dict(grammar="root ::= ("), "cannot be used"),
        (dict(regex="[ab]+", allowed_tokens=[0]), "cannot be begun"),
        (dict(choices=["ab"], min_tokens=9), "min_tokens=9, but"),
        (dict(regex="ab[cd]e", allowed_tokens=list(range(64, 66))), "no token is possible"),
        (dict(regex="(([a-z]{1,100}){1,100}){1,100}", max_tokens=99), "cannot be followed"),
    ],
)
def test_bad_input_is_one_line_and_harms_nobody(options, said):
    neighbours = model().submit([[5, 6]] * 2, regex="x[yz]{4}", max_tokens=9)
    with pytest.raises(ForerunError) as error:
        write(temperature=1.0, **options)
    assert said in str(error.value) and "\n" not in str(error.value)
    neighbours.run()
    assert all(re.fullmatch("x[yz]{4}", result.text) for result in neighbours.results())


def test_methods_that_do_not_go_from_left_to_right_refuse_grammars():
    with pytest.raises(ForerunError):
        forerun.load("zoo:masked").generate("a", grammar='start: "a"', max_tokens=4)


def test_a_model_without_a_tokenizer_says_so():
    from forerun.backbones.table import TableBackbone
    from forerun.certify.enumeration import table_model

    with pytest.raises(BadOption, match="needs a tokenizer"):
        table_model(TableBackbone(vocab=3, seed=1)).generate([0], regex="a", max_tokens=2)


def test_the_command_line_takes_files_and_texts(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    run = CliRunner().invoke
    out = run(app, ["generate", "hi", "-m", "tiny", "--schema", str(file), "--json"])
    assert out.exit_code == 0, out.output
    jsonschema.validate(json.loads(out.stdout)["parsed"], SCHEMA)
    out = run(app, ["generate", "hi", "-m", "tiny", "--choices", "left", "--choices", "right"])
    assert out.stdout.strip() in ("left", "right")
    out = run(app, ["generate", "hi", "-m", "tiny", "--regex", "[0-9]{4}"])
    assert re.fullmatch("[0-9]{4}", out.stdout.strip())
    out = run(app, ["generate", "hi", "-m", "tiny", "--schema", str(tmp_path / "none.json")])
    assert out.exit_code != 0 and "cannot be read" in str(out.exception)


def test_a_grammar_that_keeps_xgrammar_busy_ends_its_own_request(monkeypatch):
    pytest.importorskip("xgrammar")
    from forerun.constraints import xgrammar_engine

    asked = dict(max_tokens=12, regex="[a-z ]+", grammar_engine="xgrammar")
    monkeypatch.setattr(xgrammar_engine, "MOST_IN_ALL", 0.0)
    with pytest.raises(ForerunError, match=r"constraint cannot be.*xgrammar needs more than 1 s"):
        model("ar").generate([1, 2, 3], **asked)
    monkeypatch.undo()
    assert model("ar").generate([1, 2, 3], **asked).error is None
