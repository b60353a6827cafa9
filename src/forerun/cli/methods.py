"""`forerun methods`: the decoding methods there are."""

from __future__ import annotations

import warnings
from dataclasses import Field, asdict, dataclass, fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun import registry
from forerun.cli.common import print_json, print_table
from forerun.cli.flags import Json

WIDE = 100  # columns of a terminal that has room for the references

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


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the decoding methods, what each promises and which options it has."""
    rows = [method_row(name)] if name else usable_rows()
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    if name:
        _show_method(rows[0], Console())
    else:
        console = Console()
        print_table(_table(rows, with_reference=console.width >= WIDE), console)
        hint = "forerun methods NAME shows its reference and options."
        console.print(hint, style="dim", highlight=False)


def _table(rows: list[MethodRow], with_reference: bool) -> Table:
    headings = ["method", "guarantee", *(["reference"] if with_reference else [])]
    table = Table(box=None)
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    table.add_column("what it does")
    for row in rows:
        table.add_row(*(getattr(row, heading) for heading in headings), escape(row.summary))
    return table


def _show_method(row: MethodRow, console: Console) -> None:
    console.print(f"[bold]{row.method}[/]: {escape(row.summary)}", highlight=False)
    reason = f" ({row.reason})" if row.reason else ""
    facts = {
        "guarantee": row.guarantee + reason,
        "reference": row.reference,
        "needs": ", ".join(row.needs),
        "drafter": row.drafter or "none",
    }
    for key, value in facts.items():
        console.print(f"  {key}: {escape(value)}", highlight=False)
    for key, option in row.options.items():
        line = f"  {_flag(key)}: {option.help} (default {option.default})"
        console.print(escape(line), highlight=False)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
