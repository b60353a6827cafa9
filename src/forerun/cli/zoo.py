"""`forerun zoo`: the embedded models, and how to make them again."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.markdown import Markdown

from forerun import zoo
from forerun.cli.train import bar


def show(name: str | None, as_json: bool) -> None:
    if name is not None:
        card = (zoo.recipe(name).parent.parent / "cards" / f"{name}.md").read_text()
        typer.echo(json.dumps({"name": name, "card": card})) if as_json else Console().print(Markdown(card))
        return
    rows = [{"model": f"zoo:{n}", "shipped": n in zoo.shipped(), "recipe": str(zoo.recipe(n))} for n in zoo.names()]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        Console().print(f"{row['model']:16} {'shipped' if row['shipped'] else 'not shipped'}   {row['recipe']}", highlight=False)


def train(name: str, data: str | None, out: str) -> None:
    """Train with a progress bar; an interrupted run goes on where it stopped when the same command is given again."""
    from forerun.train.recipe import read
    from forerun.zoo.build import make

    with bar(sum(read(stage).steps for stage in zoo.stages(name))) as report:
        file = make(name, data, Path(out), report)
    typer.echo(f"weights: {file}\ncurve: {Path(out) / 'curve.csv'}")
