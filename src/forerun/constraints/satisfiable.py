"""Does a JSON schema have a value that ends? `{"type": "array", "minItems": 1, "items": {"$ref":
"#"}}` has none, and grammar engines would write it for ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from forerun.errors import BadOption

MOST_STEPS = 200_000


class _Search:
    """Looks for a value that takes no reference twice on its way: if there is a finite value, there
    is such a one."""

    def __init__(self, root: Any):
        self.root = root
        self.steps = 0
        self.ends: set[str] = set()  # references that are known to have a value

    def has_value(self, schema: Any, opened: frozenset[str]) -> bool:
        self.steps += 1
        if self.steps > MOST_STEPS or not isinstance(schema, Mapping):
            return schema is not False
        if not self._reference_has_value(schema.get("$ref"), opened):
            return False
        if not all(self.has_value(part, opened) for part in schema.get("allOf", ())):
            return False
        for key in ("anyOf", "oneOf"):
            if key in schema and not any(self.has_value(part, opened) for part in schema[key]):
                return False
        kinds = schema.get("type", "any")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return any(self._kind_has_value(kind, schema, opened) for kind in kinds)

    def _reference_has_value(self, reference: Any, opened: frozenset[str]) -> bool:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True  # none, or one that an engine will refuse
        if reference in self.ends:
            return True
        if reference in opened:
            return False
        found = self.has_value(self._resolve(reference), opened | {reference})
        if found:
            self.ends.add(reference)
        return found

    def _resolve(self, reference: str) -> Any:
        found = self.root
        for part in reference[1:].split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                raise BadOption(f"schema: {reference!r} refers to nothing.")
        return found

    def _kind_has_value(self, kind: Any, schema: Mapping[str, Any], opened: frozenset[str]) -> bool:
        if kind == "object":
            properties = schema.get("properties") or {}
            wanted = [properties.get(name, True) for name in schema.get("required", ())]
            return all(self.has_value(part, opened) for part in wanted)
        if kind == "array":
            least = schema.get("minItems", 0)
            first = list(schema.get("prefixItems", ()))[:least]
            wanted = [*first, *([schema.get("items", True)] if least > len(first) else [])]
            return all(self.has_value(part, opened) for part in wanted)
        return True


def check_ends(schema: Any) -> None:
    """Refuse a schema all of whose values would be without end."""
    try:
        ends = _Search(schema).has_value(schema, frozenset("#"))
    except RecursionError:
        raise BadOption("schema= is nested too deep to be read.") from None
    except (TypeError, AttributeError) as error:  # such as "required": 3
        raise BadOption(f"schema= is no JSON schema: {error}.") from None
    if not ends:
        raise BadOption(
            "schema= has no value: every way through it leads back to where it began, or to false."
        )
