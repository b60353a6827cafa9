"""`forerun samples`: the text that a teacher writes for distillation, before training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.common import stderr_console
from forerun.cli.flags import Corpus, Quiet, takes_flags
from forerun.cli.scaled import Gpus, RayAddress, Threads, Workers, make_pool, parts_bar
from forerun.errors import BadOption

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class SamplesFlags:
    config: Annotated[str, typer.Option(help="The recipe of the run that they are for.")]
    out: Annotated[str, typer.Option(help="Folder of that run: `forerun train` finds them there.")]
    data: Corpus = None
    ray: RayAddress = None
    workers: Workers = None
    threads: Threads = 1
    gpus: Gpus = None
    quiet: Quiet = False


@app.command()
@takes_flags(SamplesFlags)
def samples(flags: SamplesFlags) -> None:
    """Have a teacher write the text that distillation by a recipe needs.

    Given again, the same command goes on where it stopped.
    """
    from forerun.scale.collecting import SampleWorkers, collect_samples
    from forerun.train.data import tokenise
    from forerun.train.distil import Distillation
    from forerun.train.objectives import make_objective
    from forerun.train.recipe import read
    from forerun.train.run import check_start, tokenizer_of, with_family
    from forerun.train.samples import SamplePlan

    recipe = read(flags.config)
    check_start(recipe)
    tokenizer = tokenizer_of(recipe)
    recipe = with_family(recipe, tokenizer)
    objective = make_objective(recipe.objective, recipe.options)
    if not isinstance(objective, Distillation) or not objective.sampled:
        raise BadOption(f"{flags.config}: objective {recipe.objective!r} uses no samples.")
    out = Path(flags.out)
    pool = make_pool(flags)
    corpus = tokenise(flags.data, tokenizer, out / "tokens.npz")
    plan = SamplePlan(objective.samples, recipe.context, objective.temperatures, recipe.seed)
    with parts_bar("samples") as progress:
        collect_samples(
            SampleWorkers(objective.teacher, plan), corpus, out / "samples", pool, progress
        )
    stderr_console.print(f"{plan.count} sequences in {out / 'samples'}", highlight=False)
