"""From a text that a constraint has made to its value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forerun.constraints.spec import ConstraintSpec


def parsed(spec: ConstraintSpec, schema: Any, text: str) -> Any:
    """The value of a text: of JSON the object, of a Pydantic model or a type an instance of it
    (None if validators of its own refuse it), of anything else the text."""
    if spec.kind != "json":
        return text
    if schema is None or isinstance(schema, str | Mapping | bool):
        return json.loads(text)
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(schema).validate_json(text)
    except ValidationError:  # of validators that no schema tells of
        return None


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        from pydantic import TypeAdapter

        return TypeAdapter(type(value)).dump_python(value, mode="json")
