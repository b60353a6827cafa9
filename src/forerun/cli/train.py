"""`forerun train OBJECTIVE --config recipe.yaml`: the one loop, from the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from forerun.errors import BadOption, unknown


def run(objective: str, config: str, data: str | None, out: str, start: str | None, steps: int | None) -> None:
    from forerun.train.objectives import OBJECTIVES
    from forerun.train.recipe import read
    from forerun.train.run import run as train

    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    recipe = read(config)
    if recipe.objective != objective:
        raise BadOption(f"{config} is a recipe for {recipe.objective!r}, not for {objective!r}.")
    changes: dict[str, Any] = {"start": start} if start else {}
    changes |= {"steps": steps} if steps is not None else {}
    recipe = replace(recipe, **changes)
    with bar(recipe.steps) as report:
        folder = train(recipe, data, Path(out), report)
    typer.echo(f"model: {folder}\ncurve: {Path(out) / 'curve.csv'}")


class bar:
    """A progress bar that is moved by rows of the curve."""

    def __init__(self, steps: int):
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=Console(stderr=True))
        self.task = self.progress.add_task("training, after reading and tokenising …", total=steps)

    def __enter__(self) -> Any:
        self.progress.start()
        return self.report

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def report(self, row: dict[str, Any]) -> None:
        words = f"loss {row['loss']:.3f}, held out {row['valid_loss']:.3f}"
        if "perplexity" in row:
            words += f", decoded: perplexity {row['perplexity']:.1f}, {row['tokens_per_forward']:.2f} tokens/forward"
        self.progress.update(self.task, completed=row["step"], description=words)
