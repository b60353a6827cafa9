"""`forerun zoo`: the embedded models, and how to make them again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from forerun import zoo
from forerun.cli.common import print_json
from forerun.cli.flags import Corpus, Json
from forerun.cli.train import training_bar

app = typer.Typer(
    help="List the embedded models, read their cards, train them again.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="Show this model's card.")] = None,
    as_json: Json = False,
) -> None:
    """List the embedded models, or show the card of one."""
    if name is not None:
        _show_card(name, as_json)
        return
    rows = [
        {"model": f"zoo:{name}", "shipped": name in zoo.shipped(), "recipe": str(zoo.recipe(name))}
        for name in zoo.names()
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        shipped = "shipped" if row["shipped"] else "not shipped"
        typer.echo(f"{row['model']:16} {shipped}   {row['recipe']}")


def _card(name: str) -> Path:
    """The card of an embedded model, or of a drafter or adapters for another (smollm:drafter)."""
    from forerun.checkpoints import adapters, drafters

    beside = {**drafters.shipped(), **adapters.shipped()}
    if name in beside:
        return beside[name] / "card.md"
    return zoo.recipe(name).parent.parent / "cards" / f"{name}.md"


def _show_card(name: str, as_json: bool) -> None:
    card = _card(name).read_text()
    if as_json:
        print_json({"name": name, "card": card})
    else:
        Console().print(Markdown(card))


@app.command()
def train(
    name: Annotated[str, typer.Argument(help="A model that has a recipe.")],
    out: Annotated[str, typer.Option(help="Folder for the checkpoint, the curve and the weights.")],
    data: Corpus = None,
) -> None:
    """Train a model of the zoo by its recipe.

    Given again, the same command goes on where it stopped.
    """
    from forerun.train.recipe import read
    from forerun.train.zoo import make

    with training_bar(sum(read(stage).steps for stage in zoo.stages(name))) as report:
        file = make(name, data, Path(out), report)
    typer.echo(f"weights: {file}\ncurve: {Path(out) / 'curve.csv'}")
