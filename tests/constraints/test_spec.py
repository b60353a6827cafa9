"""What users write, and what is wrong with it: one line each, before anything runs."""

import json

import pytest

from forerun.constraints.spec import ConstraintSpec, schema_text, spec_of
from forerun.errors import BadOption
from forerun.options import Sampling

pydantic = pytest.importorskip("pydantic")


class Pet(pydantic.BaseModel):
    name: str
    legs: int = 4


def test_schemas_come_as_mappings_texts_models_and_types():
    whole = {"type": "integer"}
    assert Sampling(schema=whole).constraint == ConstraintSpec("json", json.dumps(whole))
    assert Sampling(schema=json.dumps(whole)).constraint == Sampling(schema=whole).constraint
    assert Sampling(schema=int).constraint == Sampling(schema=whole).constraint
    assert json.loads(schema_text(Pet))["required"] == ["name"]
    assert json.loads(schema_text(list[Pet]))["items"] == {"$ref": "#/$defs/Pet"}


def test_grammars_are_told_apart_by_how_rules_are_written():
    assert Sampling(grammar='start: "a"').constraint.kind == "lark"
    assert Sampling(grammar='root ::= "a"').constraint.kind == "ebnf"
    made = ConstraintSpec("regex", "a+")
    assert Sampling(grammar=made).constraint is made


def test_a_spec_can_be_a_key():
    same = Sampling(choices=["a", "b", "a"]).constraint
    assert {same: 1}[spec_of(None, None, None, ("a", "b"), "llguidance")] == 1


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(schema="{", max_tokens=3), "schema='{' is not JSON"),
        (dict(schema={"a": float("nan")}), "cannot be written as JSON"),
        (dict(schema=object()), "must be a JSON schema"),
        (dict(schema={}, regex="a"), "schema= and regex=: give one"),
        (dict(regex=""), "must be a regular expression"),
        (dict(regex=r"a(?=b)"), "look-around"),
        (dict(regex=r"(?<!a)b"), "look-around"),
        (dict(regex=r"(a)\1"), "references back"),
        (dict(grammar=" "), "must be a grammar"),
        (dict(choices=[]), "must be a list of texts"),
        (dict(choices="abc"), "must be a list of texts"),
        (dict(choices=["a", ""]), "must be a list of texts"),
        (dict(regex="a", grammar_engine="other"), "must be llguidance or xgrammar"),
        (dict(regex="a", stop=["b"]), "a stop string could end the text"),
        (dict(regex="a" * 1_000_000), "1,000,000 characters: use at most"),
        (dict(schema={"description": "x" * 1_000_000}), "characters: use at most"),
        (dict(schema={"$ref": "#"}), "has no value"),
        (dict(schema={"type": "array", "minItems": 1, "items": {"$ref": "#"}}), "has no value"),
        (dict(schema={"$ref": "#/$defs/x"}), "refers to nothing"),
        (dict(schema={"type": "object", "required": 3}), "is no JSON schema"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options, said):
    with pytest.raises(BadOption) as error:
        Sampling(**options)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_backslash_before_a_digit_or_a_bracket_is_no_reference():
    for regex in (r"\\1", r"\(\?=", r"(?:a|b)", r"(?P<x>a)", r"\d{1,3}"):
        assert Sampling(regex=regex).constraint.text == regex


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},  # it may be left out
        {"anyOf": [{"type": "null"}, {"type": "array", "minItems": 1, "items": {"$ref": "#"}}]},
        {
            "$defs": {
                "tree": {
                    "type": "object",
                    "required": ["kids"],
                    "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                }
            },
            "$ref": "#/$defs/tree",
        },
    ],
)
def test_schemas_that_refer_to_themselves_and_end_are_fine(schema):
    assert Sampling(schema=schema).constraint is not None


def test_a_schema_that_nests_without_measure_is_refused():
    schema = {"type": "integer"}
    for _ in range(5000):
        schema = {"type": "array", "minItems": 1, "items": schema}
    with pytest.raises(BadOption, match="schema"):
        Sampling(schema=schema)


def test_integers_of_64_bits_can_be_asked_for():
    pytest.importorskip("llguidance")
    from forerun.constraints.llguidance_engine import LlguidanceGrammar, within_reach
    from forerun.constraints.spec import json_spec
    from forerun.constraints.vocabulary import Vocabulary

    digits = Vocabulary(11, spelled=[bytes([c]) for c in b"0123456789-"])
    seed = {"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 9.3e18}
    LlguidanceGrammar(json_spec(seed), digits)
    # What is no bound of an integer stays as it is.
    kept = {"enum": [{"type": "integer", "minimum": -(2**63)}], "type": "number", "maximum": 1e30}
    assert within_reach(kept) == kept
    assert within_reach([seed])[0] == {"type": "integer", "minimum": -(2**62),
                                       "exclusiveMaximum": 2**62}  # fmt: skip
