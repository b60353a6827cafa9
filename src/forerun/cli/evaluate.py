"""`forerun evaluate TASK`: quality beside cost, for every way to decode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from forerun.cli.generate import aside, load
from forerun.errors import BadOption, unknown

TASKS = ("scattered", "stories", "humaneval", "functions")
SHOWN = {
    "scattered": ("model", "known", "length", "judge", "temperature", "batch", "machine"),
    "stories": ("model", "missing", "trials", "temperature", "batch", "machine"),
    "humaneval": ("model", "trials", "temperature", "batch", "machine"),
    "functions": ("model", "trials", "temperature", "batch", "machine"),
}
MISSING = {1: (2,), 3: (1, 2, 3)}  # sentences that are missing, from 0
DEFAULTS = {"any-subset": ("sequential", "assd", "assd:ngram"), "masked": ("stepwise", "ssd")}
NEEDS_DATA = {
    "stories": "a file of five-sentence stories",
    "humaneval": "a file of HumanEval infilling tasks",
    "functions": "a file of HumanEval tasks",
}


def run(task: str, name: str, methods: Sequence[str] | None, options: dict[str, Any], how: dict[str, Any], as_json: bool) -> None:
    from forerun import registry
    from forerun.evaluate.compare import machine
    from forerun.evaluate.tasks import How

    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if task in NEEDS_DATA and not how["data"]:
        raise BadOption(f"task {task!r} needs --data: {NEEDS_DATA[task]}.")
    if how["missing"] not in MISSING:
        raise BadOption(f"missing={how['missing']} must be 1 or 3 sentences.")
    model = load(name) if not methods else None
    if model is not None:
        methods = DEFAULTS.get(model.family.name, (model.family.default,))
    hows = [How.read(method, options) for method in methods or ()]
    unused = [key for key in options if not any(key in h.options for h in hows)]
    if unused:
        known = {name for h in hows for name in registry.get("methods", h.method).option_names()}
        raise unknown(f"option of {' and '.join(h.method for h in hows)}", unused[0], known)
    model = model or load(name)
    with Progress(console=aside, transient=True) as progress:
        bar = progress.add_task(f"{task} …")
        rows = _run(task, model, hows, how, lambda done, total: progress.update(bar, completed=done, total=total))
    report = {
        "task": task,
        "model": name,
        "machine": machine(),
        "date": str(date.today()),
        **{k: v for k, v in how.items() if v is not None},
        "rows": [row.as_dict() for row in rows],
    }
    if as_json:
        typer.echo(json.dumps(report))
    else:
        show(report, rows)


def _run(task: str, model: Any, hows: Sequence[Any], how: dict[str, Any], progress: Any) -> list[Any]:
    from forerun.evaluate import tasks
    from forerun.train.data import held_out_windows

    common = dict(temperature=how["temperature"], batch=how["batch"], seed=how["seed"], progress=progress)
    count = how["count"]
    if task == "scattered":
        judge = None if how["judge"] == "none" else load(how["judge"], lanes=1)
        windows = held_out_windows(how["data"], model.tokenizer, count or 32, how["length"])
        return tasks.scattered(model, hows, windows, known=how["known"], judge=judge, **common)
    if task == "stories":
        told = tasks.read_stories(how["data"])[:count]
        return tasks.stories(model, hows, told, missing=MISSING[how["missing"]], trials=how["trials"], **common)
    if task == "functions":
        programs = tasks.read_programs(how["data"], fields=())[:count]
        return tasks.functions(model, hows, programs, trials=how["trials"], **common)
    programs = tasks.read_programs(how["data"])[:count]
    return tasks.humaneval(model, hows, programs, trials=how["trials"], **common)


def show(report: dict[str, Any], rows: Sequence[Any]) -> None:
    """A column for every way to decode."""
    table = Table("", *(row.how for row in rows), box=None)
    for name in rows[0].measures:
        table.add_row(name, *(str(row.measures[name]) for row in rows))
        if name in rows[-1].p_values:
            table.add_row("  p of no difference", *(f"{row.p_values[name]:.2f}" if row.p_values else "" for row in rows))
    console = Console()
    console.print(table)
    facts = "; ".join(f"{k} {v}" for k, v in report.items() if k in SHOWN[report["task"]])
    console.print(facts, style="dim", highlight=False)
