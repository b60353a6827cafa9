"""JSON as it goes over the wire."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

# Making an encoder takes as long as using it.
_PLAIN = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ESCAPED = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def encoded(value: Any) -> bytes:
    """JSON in UTF-8. Half characters, which only clients' own words may hold, become escapes, and
    numbers that JSON does not have become null."""
    try:
        return _written(_PLAIN, value).encode()
    except UnicodeEncodeError:
        return _written(_ESCAPED, value).encode()


def _written(encoder: json.JSONEncoder, value: Any) -> str:
    try:
        return encoder.encode(value)
    except ValueError:  # a log-probability of nothing, say
        return encoder.encode(finite(value))


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


class JsonResponse(Response):
    """A JSON answer."""

    media_type = "application/json"

    def __init__(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None):
        super().__init__(encoded(value), status, headers)
