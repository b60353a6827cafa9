"""`forerun compare`: a table in the terminal, JSON, CSV, or one page of HTML."""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from forerun.cli.generate import load, read_prompts
from forerun.errors import BadOption

aside = Console(stderr=True)
JUDGE = "zoo:ar"


def run(
    models: Sequence[str], methods: str | None, draft: str | None, prompts: str | None, how: dict[str, Any], output: dict[str, Any]
) -> None:
    from forerun.evaluate.compare import as_dicts, compare, entries, machine
    from forerun.evaluate.prompts import CODE

    for name, least in (("rounds", 1), ("batch", 1), ("max_tokens", 1)):
        if how[name] < least:
            raise BadOption(f"{name}={how[name]} must be at least {least}.")
    texts = read_prompts(prompts) if prompts else CODE
    wanted = methods.split(",") if methods else None
    loaded = {name: load(name, lanes=max(8, how["batch"])) for name in models}
    contestants = []
    for name, model in loaded.items():
        with_draft = draft or ("zoo:drafter" if name == JUDGE else None)
        contestants += entries(model, wanted, with_draft)
    judge = loaded.get(JUDGE) or load(JUDGE)
    with Progress(console=aside, transient=True) as progress:
        task = progress.add_task("taking turns …")
        rows = compare(
            contestants, texts, judge=judge, progress=lambda done, total: progress.update(task, completed=done, total=total), **how
        )
    report = {"machine": machine(), **how, "prompts": len(texts), "rows": as_dicts(rows)}
    if output["csv"]:
        _write_csv(output["csv"], report["rows"])
    if output["html"]:
        with open(output["html"], "w", encoding="utf-8") as page:
            page.write(as_html(report))
    if output["json"]:
        typer.echo(json.dumps(report))
    else:
        show(report, Console())


def cells(row: dict[str, Any]) -> dict[str, str]:
    """A row as words, by column."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    law = number(row["equals_reference"], ".0%") if row["p_value"] is None else f"p = {row['p_value']:.2g}"
    return {
        "model": row["model"],
        "method": row["method"],
        "guarantee": row["guarantee"],
        "forwards": str(row["forwards"]),
        "of the draft": str(row["draft_forwards"] or ""),
        "tokens/forward": f"{row['tokens_per_forward']:.2f}",
        "accepted": number(row["acceptance_length"], ".2f"),
        "tokens/s": f"{row['tokens_per_second']:.0f} ({row['least']:.0f}-{row['most']:.0f})",
        "speed-up": number(row["speedup"], ".2f"),
        "over ar": number(row["over_ar"], ".2f"),
        "reference's": law,
        "perplexity": number(row["perplexity"], ".2f"),
        "parses": f"{row['parses']:.0%}",
        "MFLOP/token": f"{row['mflops_per_token']:.1f}",
        "MFLOP/draft": number(row["draft_mflops"], ".1f"),
        "MB/token": f"{row['mbytes_per_token']:.1f}",
    }


NARROW = ("model", "method", "tokens/forward", "tokens/s", "speed-up", "reference's", "parses")  # what fits into 80 columns


def show(report: dict[str, Any], console: Console) -> None:
    """The table: all columns where there is room, else those that matter most."""
    words = [cells(row) for row in report["rows"]]
    columns = [
        name for name in words[0] if console.width >= 170 or name in (NARROW if console.width < 130 else list(words[0])[:-3])
    ]
    table = Table(*columns, box=None)
    for row in words:
        table.add_row(*(row[name] for name in columns))
    console.print(table)
    console.print(_caption(report, judged="perplexity" in columns), style="dim", highlight=False)


def _caption(report: dict[str, Any], judged: bool = True) -> str:
    return "; ".join(
        [
            f"{report['prompts']} prompts, {report['max_tokens']} tokens each",
            f"temperature {report['temperature']:g}, batch {report['batch']}",
            f"tokens/s: median of {report['rounds']} turns (least-most)",
            *([f"perplexity under {JUDGE}"] if judged else []),
            report["machine"],
        ]
    )


def _write_csv(file: str, rows: list[dict[str, Any]]) -> None:
    with open(file, "w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222 }
table { border-collapse: collapse }
th, td { padding: .3rem .7rem; text-align: left; border-bottom: 1px solid #ddd }
p { color: #666 }
.name { display: inline-block; width: 18rem }
.bar { display: inline-block; height: 1rem; background: #2a7 }
"""


def as_html(report: dict[str, Any]) -> str:
    """One page that needs nothing else: the table, and bars for speed and for tokens per forward."""
    rows = report["rows"]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in cells(rows[0]))
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row).values()) + "</tr>" for row in rows)
    bars = _bars("Tokens per second", rows, "tokens_per_second") + _bars("Tokens per forward", rows, "tokens_per_forward")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>forerun compare</title><style>{STYLE}</style>'
        f"<h1>forerun compare</h1><table><tr>{head}</tr>{body}</table><p>{html.escape(_caption(report))}</p>{bars}</html>"
    )


def _bars(title: str, rows: list[dict[str, Any]], key: str) -> str:
    most = max(row[key] for row in rows)
    lines = "".join(
        f'<div><span class="name">{html.escape(row["model"])} {html.escape(row["method"])}</span>'
        f'<span class="bar" style="width:{row[key] / most * 30:.1f}rem"></span> {row[key]:.2f}</div>'
        for row in rows
    )
    return f"<h2>{title}</h2>{lines}"
