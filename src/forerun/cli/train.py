"""`forerun train OBJECTIVE --config recipe.yaml`: the one loop, from the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from forerun.cli.common import stderr_console
from forerun.cli.flags import Corpus
from forerun.errors import BadOption, unknown

if TYPE_CHECKING:
    from forerun.train.curve import ProgressRow, Report

app = typer.Typer(add_completion=False)


@app.command()
def train(  # noqa: PLR0913 - options of a command
    objective: Annotated[
        str,
        typer.Argument(
            help="ar, any-subset, masked, block, distil-drafter, distil-block, consistency, or "
            "drafter: one that looks into a --target."
        ),
    ],
    out: Annotated[str, typer.Option(help="Folder for checkpoints, the curve and the model.")],
    config: Annotated[
        str | None, typer.Option(help="The recipe, a YAML file. A drafter needs none.")
    ] = None,
    data: Corpus = None,
    start: Annotated[
        str | None, typer.Option(help="Begin from this checkpoint instead of the recipe's.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Train for this many steps instead of the recipe's.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The model that a drafter is trained to draft for.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="More for the target to write about: a JSON object a line, {chat: question} or "
            "{text: beginning of code}."
        ),
    ] = None,
) -> None:
    """Train a model by a recipe.

    Given again, the same command goes on where it stopped.
    """
    if objective == "drafter":
        _train_drafter(target, config, Path(out), prompts)
        return
    if config is None:
        raise BadOption(f"objective {objective!r} needs --config, its recipe.")
    from forerun.train.objectives import OBJECTIVES
    from forerun.train.recipe import read
    from forerun.train.run import run

    if objective not in OBJECTIVES:
        raise unknown("objective", objective, [*OBJECTIVES, "drafter"])
    recipe = read(config)
    if recipe.objective != objective:
        raise BadOption(f"{config} is a recipe for {recipe.objective!r}, not for {objective!r}.")
    if start:
        recipe = replace(recipe, start=start)
    if steps is not None:
        recipe = replace(recipe, steps=steps)
    with training_bar(recipe.steps) as report:
        folder = run(recipe, data, Path(out), report)
    typer.echo(f"model: {folder}\ncurve: {Path(out) / 'curve.csv'}")


def _train_drafter(target: str | None, config: str | None, out: Path, prompts: str | None) -> None:
    """Own text of the target first, then a drafter that looks into it."""
    if target is None:
        raise BadOption("a drafter needs --target, the model that it drafts for.")
    from forerun.train.drafter import read_recipe, train_drafter
    from forerun.train.networks import load_network, load_tokenizer

    recipe = read_recipe(config)
    network = load_network(target)
    folder = train_drafter(
        recipe,
        network,
        load_tokenizer(target),
        out,
        prompts=prompts,
        target_name=target,
        log=stderr_console.print,
    )
    typer.echo(f"drafter: {folder}\ncurve: {out / 'drafter-curve.csv'}")


@contextmanager
def training_bar(steps: int) -> Iterator[Report]:
    """A progress bar, to be called with rows of the curve."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr_console) as progress:
        task = progress.add_task("training, after reading and tokenising …", total=steps)
        yield lambda row: progress.update(task, completed=row["step"], description=_words(row))


def _words(row: ProgressRow) -> str:
    losses = f"loss {row['loss']:.3f}, held out {row['valid_loss']:.3f}"
    if "perplexity" not in row:
        return losses
    return (
        f"{losses}, decoded: perplexity {row['perplexity']:.1f}, "
        f"{row['tokens_per_forward']:.2f} tokens/forward"
    )
