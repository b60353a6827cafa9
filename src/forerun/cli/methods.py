"""`forerun methods`: the decoding methods there are."""

from __future__ import annotations

from dataclasses import Field, asdict, dataclass, fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from forerun import registry
from forerun.cli.common import print_json
from forerun.cli.flags import Json

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class OptionRow:
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


def _option_fields(method: registry.Method) -> list[Field[Any]]:
    """The options of the method, then those of the drafter that it always uses."""
    found = list(fields(method.options))
    if method.drafter:
        found += fields(registry.get("drafters", method.drafter))
    return [field for field in found if "help" in field.metadata]


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the decoding methods, what each promises and which options it has."""
    listed = [name] if name else list(registry.usable("methods"))
    rows = [method_row(key) for key in listed]
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    console = Console()
    console.print(_table(rows))
    if name:
        if rows[0].reason:
            console.print(f"  {rows[0].guarantee}: {rows[0].reason}", highlight=False)
        for key, option in rows[0].options.items():
            console.print(
                f"  {_flag(key)}: {option.help} (default {option.default})", highlight=False
            )


def _table(rows: list[MethodRow]) -> Table:
    table = Table(
        "method", "guarantee", "reference", "drafter", "options", "what it does", box=None
    )
    for row in rows:
        options = ", ".join(f"{_flag(key)} {option.default}" for key, option in row.options.items())
        table.add_row(
            row.method, row.guarantee, row.reference, row.drafter or "", options, row.summary
        )
    return table


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
