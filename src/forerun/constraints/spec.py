"""A constraint as it is asked for: made from what users write, checked, and comparable."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.constraints.satisfiable import check_ends
from forerun.errors import BadOption

KINDS = ("json", "regex", "lark", "ebnf", "choices")
ENGINES = ("llguidance", "xgrammar")
# Characters of white space between two parts of JSON. Without a limit, some models write no end.
MOST_WHITESPACE = 20
# Look-around, and references to what was matched before.
UNREADABLE = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9]|\(\?P=)")
MOST_CHARACTERS = 200_000  # of a schema, grammar, regular expression or list of choices


@dataclass(frozen=True)
class ConstraintSpec:
    """What a text must look like: the kind of `text`, and the engine that reads it.

    The text of "json" is a JSON schema, that of "choices" a JSON list of strings.
    """

    kind: str
    text: str
    engine: str = "llguidance"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadOption(f"kind={self.kind!r} must be one of {', '.join(KINDS)}.")
        if self.engine not in ENGINES:
            raise BadOption(f"grammar_engine={self.engine!r} must be {' or '.join(ENGINES)}.")
        if len(self.text) > MOST_CHARACTERS:
            raise BadOption(
                f"{self.argument}= has {len(self.text):,} characters: use at most "
                f"{MOST_CHARACTERS:,}."
            )

    @property
    def argument(self) -> str:
        """The argument that users write it with."""
        return {"json": "schema", "lark": "grammar", "ebnf": "grammar"}.get(self.kind, self.kind)

    @property
    def choices(self) -> list[str]:
        return json.loads(self.text)


def spec_of(
    schema: Any, regex: Any, grammar: Any, choices: Any, engine: str
) -> ConstraintSpec | None:
    """The constraint of a request, from the arguments that may name one."""
    given = {"schema": schema, "regex": regex, "grammar": grammar, "choices": choices}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise BadOption(f"{' and '.join(f'{name}=' for name in named)}: give one of them.")
    if not named:
        return None
    if isinstance(grammar, ConstraintSpec):
        return grammar
    make = {
        "schema": json_spec,
        "regex": regex_spec,
        "grammar": grammar_spec,
        "choices": choices_spec,
    }[named[0]]
    return make(given[named[0]], engine)


def json_spec(schema: Any, engine: str = "llguidance") -> ConstraintSpec:
    """A JSON schema (a mapping or its text), a Pydantic model, or a type."""
    return ConstraintSpec("json", schema_text(schema), engine)


def schema_text(schema: Any) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadOption(f"schema={shortened(schema)} is not JSON: {error}.") from None
    if not isinstance(schema, Mapping | bool):
        schema = _schema_of_type(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadOption(f"schema={shortened(schema)} cannot be written as JSON: {error}.") from None
    if len(text) <= MOST_CHARACTERS:
        check_ends(schema)
    return text


def _schema_of_type(kind: Any) -> Any:
    """The JSON schema of a Pydantic model or of any type that Pydantic understands."""
    try:
        from pydantic import TypeAdapter
    except ImportError:
        raise BadOption(
            f"schema={kind!r}: types need Pydantic; `pip install pydantic`, or give a JSON schema."
        ) from None
    try:
        return _closed(TypeAdapter(kind).json_schema())
    except Exception as error:
        raise BadOption(
            f"schema={shortened(kind)} must be a JSON schema (a dict or its text), a Pydantic "
            f"model or a type: {one_line(error)}"
        ) from None


def _closed(schema: Any) -> Any:
    """A type's schema without properties that the type does not have: it would drop them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(part) for key, part in schema.items()}
    if closed.get("type") == "object" and "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def regex_spec(regex: Any, engine: str = "llguidance") -> ConstraintSpec:
    """A regular expression that the whole text must match."""
    if not isinstance(regex, str) or not regex:
        raise BadOption(f"regex={regex!r} must be a regular expression.")
    unreadable = UNREADABLE.search(regex)
    if unreadable:
        raise BadOption(
            f"regex={shortened(regex)} has {unreadable[0]!r} at {unreadable.start()}: look-around "
            f"and references back cannot be followed token by token."
        )
    return ConstraintSpec("regex", regex, engine)


def grammar_spec(grammar: Any, engine: str = "llguidance") -> ConstraintSpec:
    """A Lark grammar (its rules have a colon), or an EBNF one (its rules have ::=)."""
    if not isinstance(grammar, str) or not grammar.strip():
        raise BadOption(f"grammar={grammar!r} must be a grammar in Lark's form, or in EBNF.")
    return ConstraintSpec("ebnf" if "::=" in grammar else "lark", grammar, engine)


def choices_spec(choices: Any, engine: str = "llguidance") -> ConstraintSpec:
    """Some texts, of which one must be written."""
    fine = isinstance(choices, Sequence) and not isinstance(choices, str | bytes)
    texts = list(choices) if fine else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise BadOption(
            f"choices={shortened(choices)} must be a list of texts, none of them empty."
        )
    return ConstraintSpec("choices", json.dumps(list(dict.fromkeys(texts))), engine)


def shortened(value: object, most: int = 80) -> str:
    text = reprlib.repr(value) if isinstance(value, Mapping | list) else repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def one_line(error: object) -> str:
    """What somebody else's error says, on one line."""
    return " ".join(str(error).split())[:300]
