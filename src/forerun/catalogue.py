"""The methods there are, as plain data: what each promises, needs and takes"""

from __future__ import annotations

import warnings
from dataclasses import Field, dataclass, fields
from typing import Any

from forerun import registry


@dataclass(frozen=True)
class OptionRow:
    """An option. Its fields are the keys of the JSON."""

    default: object
    help: str


@dataclass(frozen=True)
class MethodRow:
    """A method. Its fields are the keys of the JSON."""

    method: str
    guarantee: str
    reason: str  # why it is approximate, if it is
    reference: str
    needs: list[str]
    drafter: str | None
    options: dict[str, OptionRow]
    summary: str


def method_row(name: str) -> MethodRow:
    method = registry.method_named(name)
    drafter = method.drafter
    if drafter is None and method.drafts:
        drafter = "draft="
    return MethodRow(
        method=method.name,
        guarantee=method.guarantee,
        reason=method.reason,
        reference=method.reference,
        needs=[need.__name__ for need in method.needs],
        drafter=drafter,
        options={
            field.name: OptionRow(field.default, field.metadata["help"])
            for field in _option_fields(method)
        },
        summary=method.summary,
    )


def usable_rows() -> list[MethodRow]:
    """All methods, but for those of a package whose options or drafter cannot be read."""
    rows = []
    for name in registry.usable("methods"):
        try:
            rows.append(method_row(name))
        except Exception as error:
            if name in registry.BUILT_IN["methods"]:
                raise
            warnings.warn(f"method={name!r} was left out: {error}", stacklevel=2)
    return rows


def _option_fields(method: registry.Method) -> list[Field[Any]]:
    """The options of the method, then those of the drafter that it always uses."""
    found = list(fields(method.options))
    if method.drafter:
        found += fields(registry.get("drafters", method.drafter))
    return [field for field in found if "help" in field.metadata]
