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
from forerun.errors import BadOption, NotAble

aside = Console(stderr=True)
JUDGE = "zoo:ar"


def run(
    models: Sequence[str],
    methods: str | None,
    draft: str | None,
    prompts: str | None,
    held_out: dict[str, Any],
    how: dict[str, Any],
    output: dict[str, Any],
) -> None:
    from forerun.evaluate.compare import as_dicts, compare, machine

    for name, least in (("rounds", 1), ("batch", 1), ("max_tokens", 1)):
        if how[name] < least:
            raise BadOption(f"{name}={how[name]} must be at least {least}.")
    names = [name for given in models for name in (zoo_models() if given == "zoo" else [given])]
    loaded = {name: load(name, lanes=max(8, how["batch"])) for name in names}
    texts, truths = _texts(prompts, held_out, loaded, how["max_tokens"])
    contestants = contestants_of(loaded, methods.split(",") if methods else None, draft)
    judge = loaded.get(JUDGE) or load(JUDGE)
    with Progress(console=aside, transient=True) as progress:
        task = progress.add_task("taking turns …")
        rows = compare(
            contestants, texts, judge=judge, truths=truths, **how,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
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


def zoo_models() -> list[str]:
    """The embedded models that are targets; the drafter drafts for them."""
    from forerun import zoo

    return [f"zoo:{name}" for name in zoo.shipped() if name != "drafter"]


def contestants_of(loaded: dict[str, Any], wanted: list[str] | None, draft: str | None) -> list[Any]:
    """All that the models can run, or what is wanted of it; embedded models that fill blanks draft for zoo:ar if they take part."""
    from forerun.core import Marginal
    from forerun.evaluate.compare import Entry, entries

    found = []
    for name, model in loaded.items():
        drafter = draft or ("zoo:drafter" if name == JUDGE else None)
        fillers = [m for m in loaded.values() if name == JUDGE and m.name.startswith("zoo:") and Marginal in m.family.answers]
        own = wanted if wanted is None or len(loaded) == 1 else [m for m in wanted if _can_run(m, model, drafter, fillers)]
        found += entries(model, own, drafter) if own is None or own else []
        if draft is None and (wanted is None or "specdiff" in wanted):
            found += [Entry(model, "specdiff", {"draft": filler}) for filler in fillers]
    for method in wanted or []:
        if not any(entry.method == method for entry in found):
            raise NotAble(f"method={method!r}: none of {', '.join(loaded)} can run it, or it needs --draft.")
    return found


def _can_run(method: str, model: Any, draft: Any, fillers: list[Any]) -> bool:
    """Of several models each runs what it can: it must answer what the method asks, and have what drafts for it."""
    from forerun import registry

    how: registry.Method = registry.get("methods", method)
    able = all(question in model.family.answers for question in how.needs)
    if how.drafter is not None and how.drafter.startswith("diffusion"):
        return able and draft is not None and not fillers and draft != "zoo:drafter"
    return able and (not how.drafts or how.drafts_itself or how.drafter is not None or draft is not None)


def _texts(
    prompts: str | None, held_out: dict[str, Any], loaded: dict[str, Any], max_tokens: int
) -> tuple[list[Any], list[list[int]] | None]:
    """Prompts, and where they are the beginnings of held-out text, what really follows them."""
    from forerun.evaluate.prompts import CODE
    from forerun.train.data import held_out_windows

    if held_out["data"] is None:
        return (read_prompts(prompts) if prompts else CODE), None
    if prompts:
        raise BadOption(f"prompts={prompts!r} and data={held_out['data']!r} are both prompts: give one of them.")
    tokenizers = {id(model.tokenizer): model.tokenizer for model in loaded.values()}
    tokenizer = next(iter(tokenizers.values()))
    if tokenizer is None or any(other is None or other.get_vocab() != tokenizer.get_vocab() for other in tokenizers.values()):
        raise BadOption("data= gives prompts in tokens, which all models must share: compare models with one tokenizer.")
    given = held_out["given"]
    windows = held_out_windows(held_out["data"], tokenizer, held_out["count"], given + max_tokens)
    return windows[:, :given].tolist(), windows[:, given:].tolist()


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
        "exact": number(row["exact"], ".0%"),
        "loss": number(row["loss"], ".2f"),
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
    console.print(caption(report, judged="perplexity" in columns), style="dim", highlight=False)


def caption(report: dict[str, Any], judged: bool = True) -> str:
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
        f"<h1>forerun compare</h1><table><tr>{head}</tr>{body}</table><p>{html.escape(caption(report))}</p>{bars}</html>"
    )


def _bars(title: str, rows: list[dict[str, Any]], key: str) -> str:
    most = max(row[key] for row in rows)
    lines = "".join(
        f'<div><span class="name">{html.escape(row["model"])} {html.escape(row["method"])}</span>'
        f'<span class="bar" style="width:{row[key] / most * 30:.1f}rem"></span> {row[key]:.2f}</div>'
        for row in rows
    )
    return f"<h2>{title}</h2>{lines}"
