"""JSON schemas of growing difficulty, made by a seed: what `bench/structured.py` decodes under.

Five levels: flat objects of scalars; texts, numbers and fields that may be missing; arrays, nested
objects, patterns and formats; alternatives, references and tuples; recursion, many fields and long
lists of choices. Values are bounded, so that a model that knows no JSON comes to an end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
LEVELS = 5
NAMES = [
    "id",
    "name",
    "kind",
    "size",
    "age",
    "city",
    "state",
    "code",
    "price",
    "total",
    "count",
    "rate",
    "unit",
    "owner",
    "tags",
    "notes",
    "active",
    "email",
    "phone",
    "start",
    "end",
    "level",
    "score",
    "width",
    "height",
    "colour",
    "weight",
    "parent",
    "status",
    "version",
]
PATTERNS = (r"^[A-Z]{3}-[0-9]{4}$", r"^#[0-9a-f]{6}$", r"^v[0-9]+\.[0-9]+$", r"^(yes|no|maybe)$")
FORMATS = ("date", "time", "uuid", "ipv4")


def schemas(count: int = 500, seed: int = 0) -> Iterator[tuple[int, Schema]]:
    """(level, schema), the same number of every level."""
    for number in range(count):
        level = 1 + number * LEVELS // count
        yield level, _Maker(random.Random(f"{seed}/{number}"), level).root()


def openapi_schemas(file: str) -> Iterator[Schema]:
    """The schemas of an OpenAPI page, each with the others to refer to."""
    page = json.loads(Path(file).read_text())
    named = page["components"]["schemas"]
    for name in named:
        yield {"$ref": f"#/components/schemas/{name}", "components": {"schemas": named}}


class _Maker:
    def __init__(self, chance: random.Random, level: int):
        self.chance = chance
        self.level = level

    def root(self) -> Schema:
        if self.level < LEVELS:
            return self.object(depth=max(0, self.level - 2))
        return self.chance.choice([self.tree, self.wide, self.deep])()

    def object(self, depth: int, fields: int | None = None) -> Schema:
        fields = fields or self.chance.randint(1, 2 + self.level)
        names = self.chance.sample(NAMES, fields)
        made = {name: self.value(depth) for name in names}
        needed = names
        if self.level > 1:
            needed = [name for name in names if self.chance.random() < 0.7]
        return {
            "type": "object",
            "properties": made,
            "required": needed,
            "additionalProperties": False,
        }

    def value(self, depth: int) -> Schema:
        makers = [self.boolean, self.integer, self.choice]
        if self.level > 1:
            makers += [self.text, self.number, self.null_or_text]
        if self.level > 2:
            makers += [self.pattern, self.format]
        if depth > 0:
            makers += [lambda: self.array(depth - 1), lambda: self.object(depth - 1)]
            if self.level > 3:
                makers += [lambda: self.either(depth - 1), lambda: self.tuple(depth - 1)]
        return self.chance.choice(makers)()

    def boolean(self) -> Schema:
        return {"type": "boolean"}

    def integer(self) -> Schema:
        least = self.chance.randint(-50, 50)
        return {
            "type": "integer",
            "minimum": least,
            "maximum": least + self.chance.randint(0, 5000),
        }

    def choice(self) -> Schema:
        return {"enum": self.chance.sample(NAMES, self.chance.randint(2, 6))}

    def text(self) -> Schema:
        return {"type": "string", "maxLength": self.chance.randint(1, 12)}

    def number(self) -> Schema:
        return {"type": "number", "minimum": 0, "maximum": 100}

    def null_or_text(self) -> Schema:
        return {"type": ["null", "string"], "maxLength": 6}

    def pattern(self) -> Schema:
        return {"type": "string", "pattern": self.chance.choice(PATTERNS)}

    def format(self) -> Schema:
        return {"type": "string", "format": self.chance.choice(FORMATS)}

    def array(self, depth: int) -> Schema:
        least = self.chance.randint(0, 1)
        most = least + self.chance.randint(1, 2)
        return {"type": "array", "items": self.value(depth), "minItems": least, "maxItems": most}

    def either(self, depth: int) -> Schema:
        return {"anyOf": [self.object(depth, 2), self.integer(), self.choice()]}

    def tuple(self, depth: int) -> Schema:
        parts = [self.value(depth) for _ in range(self.chance.randint(1, 3))]
        sizes = {"minItems": len(parts), "maxItems": len(parts)}
        return {"type": "array", "prefixItems": parts, "items": False, **sizes}

    def tree(self) -> Schema:
        kids = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
        node = self.object(0, 2)
        node["properties"]["kids"] = kids
        node["required"] = [*node["required"], "kids"]
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}

    def wide(self) -> Schema:
        wide = self.object(1, 10)
        wide["properties"]["pick"] = {"enum": [f"item {i}" for i in range(200)]}
        wide["required"] = [*wide["required"], "pick"]
        return wide

    def deep(self) -> Schema:
        made = self.object(1, 2)
        for name in self.chance.sample(NAMES, 4):
            outer = {"type": "object", "properties": {name: made}, "required": [name]}
            made = {**outer, "additionalProperties": False}
        return made
