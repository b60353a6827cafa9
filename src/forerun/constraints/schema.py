"""JSON schemas of bounded depth as regular languages.

outlines-core writes a schema as a regular expression, and hears only a part of what a schema may
say. Whatever it would not hear is refused here, so that all that comes out is valid.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from forerun.constraints.automaton import ByteAutomaton
from forerun.constraints.regular import (
    check_length,
    compiled,
    language_of_regex,
    shown,
    without_anchors,
)
from forerun.errors import BadOption

# What is heard of a schema.
SCHEMA_KEYWORDS = {
    *("type", "properties", "required", "items", "prefixItems", "enum", "const", "anyOf", "$ref"),
    *("minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
}
# What must stand alone: without these others, or without any.
LENGTHS = {"minLength", "maxLength"}
ALONE: dict[str, set[str]] = {
    "enum": set(),
    "const": set(),
    "anyOf": set(),
    "$ref": set(),
    "pattern": LENGTHS,
    "format": {"pattern", *LENGTHS},
    "prefixItems": {"items", "minItems", "maxItems"},
}
# Bytes that stand for themselves nowhere in a JSON string.
ESCAPED = [*range(32), ord('"'), ord("\\")]
DATE = (
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?Z"
# Every text that these match is valid; not every valid text is matched (no 29th of February).
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[a-z0-9._+-]{1,64}@[a-z0-9]+(\.[a-z0-9]+)+",
}
ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions", "additionalProperties"),
}


@lru_cache(maxsize=64)
def language_of_schema(schema: str) -> ByteAutomaton:
    """JSON texts that a schema, itself given as JSON, allows."""
    check_length("schema", schema)
    try:
        parsed = json.loads(schema)
    except ValueError:
        raise BadOption(f"schema={shown(schema)} is not JSON.") from None
    _check_schema(parsed)
    return compiled("schema", json.dumps(_with_patterns(parsed)), schema)


def _check_schema(schema: Any, inside: str = "schema") -> None:
    """Refuse what would be ignored: a text that breaks it would come out as valid."""
    if not isinstance(schema, dict):
        raise BadOption(
            f"{inside}={shown(json.dumps(schema))} must be an object: in a hole or on a canvas "
            f"every part of a schema has to say which texts it allows."
        )
    for keyword in sorted(schema.keys() - SCHEMA_KEYWORDS - ANNOTATIONS):
        raise BadOption(
            f"{inside} has the keyword {keyword!r}, which a hole or a canvas cannot hold: leave it "
            f"out, or decode from left to right."
        )
    for keyword in ("enum", "anyOf"):
        if not schema.get(keyword, [True]):
            raise BadOption(f"{inside} has {keyword}=[], and nothing satisfies it.")
    _check_alone(schema, inside)
    _check_container(schema, inside)
    _check_string(schema, inside)
    for name, part in _parts(schema):
        _check_schema(part, f"{inside}.{name}")


def _check_alone(schema: dict[str, Any], inside: str) -> None:
    """Refuse keywords that both say what the text is: only one of them would be heard."""
    said = schema.keys() & SCHEMA_KEYWORDS
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    kinds = _kinds(schema)
    if kinds and values and all(_kind_of(value) & kinds for value in values):
        said -= {"type"}
    for keyword, others in ALONE.items():
        clash = sorted(said & others if others else said - {keyword})
        if keyword in said and clash:
            raise BadOption(
                f"{inside} has {keyword!r} and {clash[0]!r}, which a hole or a canvas cannot hold "
                f"together: leave one of them out."
            )


def _kinds(schema: dict[str, Any]) -> set[str]:
    kinds = schema.get("type", [])
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _kind_of(value: Any) -> set[str]:
    """The JSON types of a value."""
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {{str: "string", float: "number", list: "array"}.get(type(value), "object")}


def _check_container(schema: dict[str, Any], inside: str) -> None:
    """Refuse containers of anything: they hold containers of anything."""
    kinds = _kinds(schema)
    needs = {"object": ("properties",), "array": ("items", "prefixItems")}
    for kind, keywords in needs.items():
        if kind in kinds and not any(keyword in schema for keyword in keywords):
            raise BadOption(
                f"{inside} has type={kind!r} and does not say what is in it: give {keywords[0]!r}."
            )
    if not schema.keys() & {"type", "properties", "enum", "const", "anyOf", "$ref", "items"}:
        raise BadOption(f"{inside} allows any JSON, which is no regular language: give a type.")
    for name in schema.get("required", ()):
        if name not in schema.get("properties", {}):
            raise BadOption(f"{inside} requires {name!r}, which is not among its properties.")


def _check_string(schema: dict[str, Any], inside: str) -> None:
    if schema.get("format", "date") not in FORMATS:
        raise BadOption(
            f"{inside} has format={schema['format']!r}; on a canvas it may be one of "
            f"{', '.join(FORMATS)}."
        )
    if "pattern" in schema:
        pattern = language_of_regex(str(schema["pattern"]))
        if (pattern.table_SB[:, ESCAPED] < pattern.states).any():
            raise BadOption(
                f"{inside} has pattern={shown(schema['pattern'])}, which may write a quote, a "
                f"backslash or a control character: in JSON these would be escaped."
            )


def _parts(schema: dict[str, Any]) -> Sequence[tuple[str, Any]]:
    """The schemas inside a schema."""
    found = [("items", schema["items"])] if "items" in schema else []
    for keyword in ("anyOf", "prefixItems"):
        found += [(f"{keyword}.{i}", part) for i, part in enumerate(schema.get(keyword, ()))]
    for keyword in ("properties", "$defs", "definitions"):
        found += [(f"{keyword}.{name}", part) for name, part in schema.get(keyword, {}).items()]
    return found


def _with_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with a pattern in place of every format."""
    plain = dict(schema)
    if "format" in plain:
        plain["pattern"] = FORMATS[plain.pop("format")]
    if "pattern" in plain:
        plain["pattern"] = f"(?:{without_anchors(plain['pattern'])})"
    if "items" in plain:
        plain["items"] = _with_patterns(plain["items"])
    for keyword in {"anyOf", "prefixItems"} & plain.keys():
        plain[keyword] = [_with_patterns(part) for part in plain[keyword]]
    for keyword in {"properties", "$defs", "definitions"} & plain.keys():
        parts = plain[keyword].items()
        plain[keyword] = {name: _with_patterns(part) for name, part in parts}
    return plain
