"""`forerun methods`: the decoding methods there are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun.catalogue import MethodRow, method_row, usable_rows
from forerun.cli.common import print_json, print_table
from forerun.cli.flags import Json

WIDE = 100  # columns of a terminal that has room for the references

app = typer.Typer(add_completion=False)


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
