"""JSON schemas on a canvas: all that comes out is valid, and what cannot be held is refused."""

import json

import numpy as np
import pytest

from forerun.constraints.schema import language_of_schema
from forerun.errors import BadOption

jsonschema = pytest.importorskip("jsonschema")

HELD = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["a", 'b"c\\d', "é", None, 1.5]}},
        },
        "required": ["age"],
        "title": "a person",
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string", "minLength": 2}]},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "format": "date"}]},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "pattern": "a|b+"},
    {"type": ["string", "null"]},
    {"type": "string", "enum": ["x y", "z"]},
    {"type": "integer", "const": 7},
    {
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/Node"}},
                "required": ["value"],
            }
        },
        "$ref": "#/$defs/Node",
    },
]


def text_of(language, rng, longest=60):
    """A random text of a language: any byte that leads on, and the shortest way from `longest`
    on."""
    distance_S = np.where(language.final_S, 0, 1 << 20)
    for _ in range(language.states):
        after_S = np.append(distance_S, 1 << 20)
        distance_S = np.minimum(distance_S, 1 + after_S[language.table_SB].min(1))
    after_S = np.append(distance_S, 1 << 20)
    state, text = language.start, b""
    while True:
        ways = np.flatnonzero(after_S[language.table_SB[state]] < 1 << 20)
        may_end = language.final_S[state]
        if may_end and (len(text) > longest or not len(ways) or rng.random() < 0.3):
            return text
        left = after_S[language.table_SB[state, ways]]
        if len(text) > longest:
            ways = ways[left == left.min()]
        byte = int(rng.choice(ways))
        text += bytes([byte])
        state = int(language.table_SB[state, byte])


@pytest.mark.parametrize("schema", HELD, ids=lambda schema: json.dumps(schema)[:50])
def test_every_text_of_a_schema_is_valid(schema):
    language = language_of_schema(json.dumps(schema))
    rng = np.random.default_rng(0)
    for _ in range(25):
        text = text_of(language, rng)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("{", "is not JSON"),
        ("true", "must be an object"),
        ({"not": {"type": "string"}}, "'not'"),
        ({"type": "integer", "minimum": 3}, "'minimum'"),
        ({"type": "array", "items": {"type": "integer", "multipleOf": 2}}, "schema.items"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
        ({"enum": []}, "nothing satisfies"),
        ({"type": "object"}, "'properties'"),
        ({"type": "array"}, "'items'"),
        ({"title": "anything"}, "any JSON"),
        ({"type": "object", "properties": {}, "required": ["b"]}, "requires 'b'"),
        ({"type": "integer", "enum": ["a"]}, "'enum' and 'type'"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "'pattern' and 'maxLength'"),
        ({"type": "string", "pattern": ".*"}, "a quote"),
        ({"type": "string", "format": "uri"}, "format='uri'"),
        ({"type": "string", "minLength": 4, "maxLength": 2}, "cannot be used"),
        ({"$ref": "#"}, "cannot be used"),
    ],
    ids=str,
)
def test_what_would_not_be_heard_is_refused_by_name(schema, said):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(BadOption, match=said) as refused:
        language_of_schema(text)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
