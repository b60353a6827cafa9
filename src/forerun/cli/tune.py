"""`forerun tune`: the fastest options on this machine, for your prompts."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from forerun.cli.generate import aside, check_picture, load, read_prompts
from forerun.errors import BadOption, unknown

METHODS = ("specdiff", "jacobi")


def run(method: str, model: str, draft: str | None, prompts: str | None, how: dict[str, Any], out: dict[str, Any]) -> None:
    from forerun.evaluate import tune
    from forerun.evaluate.prompts import CODE

    if method not in METHODS:
        raise unknown("method to tune", method, METHODS)
    if method == "specdiff" and draft is None:
        raise BadOption("tune specdiff needs --draft: a model that fills blanks, such as zoo:masked.")
    if method == "jacobi" and how["temperature"] != 0:
        raise BadOption("tune jacobi decodes greedily: leave --temperature out.")
    check_picture(out["plot"])
    texts = read_prompts(prompts) if prompts else CODE
    target = load(model, lanes=1)
    common: dict[str, Any] = dict(max_tokens=how["max_tokens"], rounds=how["rounds"])
    common["report"] = lambda line: aside.print(line, style="dim")
    if method == "specdiff":
        found = tune.tune_specdiff(target, load(draft, lanes=1), texts, temperature=how["temperature"], **common)
    else:
        found = tune.tune_jacobi(target, texts, **common)
    if out["file"]:
        found.write(out["file"])
    if out["plot"]:
        tune.plot(found, out["plot"])
    typer.echo(json.dumps(found.__dict__)) if out["json"] else show(found, out["file"])


def show(found: Any, file: str | None) -> None:
    columns = [key for key in found.rows[0] if key not in ("refill",)]
    table = Table(*columns, box=None)
    for row in sorted(found.rows, key=lambda row: -row["tokens/s"]):
        cells = [row.get(key, "") for key in columns]
        table.add_row(*(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells))
    console = Console()
    console.print(table)
    options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in found.options.items())
    ratio = found.tokens_per_second / found.plain
    console.print(f"[bold]--method {found.method} {options}[/]", highlight=False)
    console.print(f"{found.tokens_per_second:.0f} tokens/s, {ratio:.2f} times ar ({found.machine})", highlight=False)
    if ratio < 1:
        console.print("Plain decoding is faster here.", style="yellow")
    if file:
        console.print(f"use it with: forerun generate PROMPT --tuned {file}", style="dim", highlight=False)
