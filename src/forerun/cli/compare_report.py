"""A comparison as a table, as CSV, or as one page of HTML."""

from __future__ import annotations

import csv
import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from forerun.cli.common import print_table

if TYPE_CHECKING:
    from forerun.evaluate.compare import ComparisonRow

JUDGE = "zoo:ar"  # its perplexity is shown

# what fits into 80 columns
NARROW = ("model", "method", "tokens/forward", "tokens/s", "speed-up", "reference's", "parses")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The rows of a comparison, and how they were made. Its fields are the keys of the JSON."""

    machine: str
    max_tokens: int
    temperature: float
    rounds: int
    batch: int
    seed: int = 0
    prompts: int
    rows: Sequence[ComparisonRow]


def cells(row: ComparisonRow) -> dict[str, str]:
    """A row as words, by column."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    tested = number(row.equals_reference, ".0%")
    if row.p_value is not None:
        tested = f"p = {row.p_value:.2g}"
    return {
        "model": row.model,
        "method": row.method,
        "guarantee": row.guarantee,
        "forwards": str(row.forwards),
        "of the draft": str(row.draft_forwards or ""),
        "tokens/forward": f"{row.tokens_per_forward:.2f}",
        "accepted": number(row.acceptance_length, ".2f"),
        "α": number(row.alpha, ".2f"),
        "tokens/s": f"{row.tokens_per_second:.0f} ({row.least:.0f}-{row.most:.0f})",
        "speed-up": number(row.speedup, ".2f"),
        "over ar": number(row.over_ar, ".2f"),
        "reference's": tested,
        "perplexity": number(row.perplexity, ".2f"),
        "parses": f"{row.parses:.0%}",
        "first line right": number(row.first_line_right, ".0%"),
        "loss": number(row.loss, ".2f"),
        "MFLOP/token": f"{row.mflops_per_token:.1f}",
        "MFLOP/draft": number(row.draft_mflops, ".1f"),
        "MB/token": f"{row.mbytes_per_token:.1f}",
    }


def columns_for(width: int, names: Sequence[str]) -> list[str]:
    """All columns where there is room, else those that matter most."""
    if width >= 170:
        return list(names)
    if width >= 130:
        return list(names[:-3])
    return [name for name in names if name in NARROW]


def show(report: Report, console: Console) -> None:
    rows = [cells(row) for row in report.rows]
    columns = columns_for(console.width, list(rows[0]))
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    print_table(table, console)
    console.print(caption(report, judged="perplexity" in columns), style="dim", highlight=False)


def caption(report: Report, judged: bool = True) -> str:
    return "; ".join(
        [
            f"{report.prompts} prompts, {report.max_tokens} tokens each",
            f"temperature {report.temperature:g}, batch {report.batch}",
            f"tokens/s: median of {report.rounds} turns (least-most)",
            *([f"perplexity under {JUDGE}"] if judged else []),
            report.machine,
        ]
    )


def write_csv(file: str, rows: Sequence[ComparisonRow]) -> None:
    with open(file, "w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222 }
table { border-collapse: collapse }
th, td { padding: .3rem .7rem; text-align: left; border-bottom: 1px solid #ddd }
p { color: #666 }
.name { display: inline-block; width: 18rem }
.bar { display: inline-block; height: 1rem; background: #2a7 }
"""


def as_html(report: Report) -> str:
    """One page that needs nothing else: the table, and bars for speed and tokens per forward."""
    words = [cells(row) for row in report.rows]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in words[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) + "</tr>"
        for row in words
    )
    speeds = [row.tokens_per_second for row in report.rows]
    sizes = [row.tokens_per_forward for row in report.rows]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>forerun compare</title>'
        f"<style>{STYLE}</style>"
        f"<h1>forerun compare</h1><table><tr>{head}</tr>{body}</table>"
        f"<p>{html.escape(caption(report))}</p>"
        f"{_bars('Tokens per second', report.rows, speeds)}"
        f"{_bars('Tokens per forward', report.rows, sizes)}</html>"
    )


def _bars(title: str, rows: Sequence[ComparisonRow], values: Sequence[float]) -> str:
    most = max(values)
    lines = "".join(
        f'<div><span class="name">{html.escape(row.model)} {html.escape(row.method)}</span>'
        f'<span class="bar" style="width:{value / most * 30:.1f}rem"></span> {value:.2f}</div>'
        for row, value in zip(rows, values, strict=True)
    )
    return f"<h2>{title}</h2>{lines}"
