"""`forerun evaluate TASK`: quality beside cost, for every way to decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from forerun.cli.common import load, need, print_json, print_table, progress_bar, tokenizer_of
from forerun.cli.flags import (
    WITH_METHOD_OPTIONS,
    Json,
    MethodOptions,
    Quiet,
    Seed,
    Temperature,
    model_option,
    takes_flags_and_options,
)
from forerun.errors import BadOption, unknown

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.evaluate.programs import ProgramSettings
    from forerun.evaluate.tasks import MethodChoice, TaskRow
    from forerun.profile.progress import Progress

# For each task what is printed under its table.
CAPTIONS = {
    "scattered": ("model", "known", "length", "judge", "temperature", "batch", "machine"),
    "stories": ("model", "missing", "trials", "temperature", "batch", "machine"),
    "humaneval": ("model", "trials", "temperature", "batch", "machine"),
    "functions": ("model", "trials", "temperature", "batch", "machine"),
}
MISSING = {1: (2,), 3: (1, 2, 3)}  # sentences that are missing, from 0
DEFAULT_METHODS = {
    "any-subset": ("sequential", "assd", "assd:ngram"),
    "masked": ("stepwise", "ssd"),
}
NEEDS_DATA = {
    "stories": "a file of five-sentence stories",
    "humaneval": "a file of HumanEval infilling tasks",
    "functions": "a file of HumanEval tasks",
}
DEFAULT_WINDOWS = 32  # sequences of the task scattered

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class EvaluateFlags:
    task: Annotated[str, typer.Argument(help="scattered, stories, humaneval or functions.")]
    method: Annotated[
        list[str] | None,
        typer.Option(help="METHOD or METHOD:DRAFT; repeat the flag. Default: by the model's kind."),
    ] = None
    model: Annotated[str, model_option("The model: one that fills holes, but for functions.")] = (
        "zoo:any-subset"
    )
    data: Annotated[
        str | None,
        typer.Option(
            help="The task's file; for scattered: a folder of .py files or a .jsonl[.xz]."
        ),
    ] = None
    count: Annotated[
        int | None, typer.Option(help="Use this many sequences, stories or programs.")
    ] = None
    known: Annotated[float, typer.Option(help="scattered: share of tokens that is given.")] = 0.3
    length: Annotated[int, typer.Option(help="scattered: tokens per sequence.")] = 256
    judge: Annotated[
        str, typer.Option(help="scattered: a left-to-right model with the same tokens, or none.")
    ] = "zoo:ar"
    missing: Annotated[int, typer.Option(help="stories: sentences that are missing, 1 or 3.")] = 1
    trials: Annotated[
        int, typer.Option(help="stories, humaneval, functions: completions of each.")
    ] = 1
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="humaneval, functions: run the model's programs even where they cannot be "
            "isolated.",
        ),
    ] = False
    temperature: Temperature = 1.0
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1
    seed: Seed = 0
    quiet: Quiet = False
    as_json: Json = False

    def settings(self) -> dict[str, object]:
        """What a report says of how it was made."""
        apart = ("task", "method", "model", "as_json", "allow_code", "quiet")
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in apart and value is not None
        }


@app.command(context_settings=WITH_METHOD_OPTIONS)
@takes_flags_and_options(EvaluateFlags)
def evaluate(flags: EvaluateFlags, options: MethodOptions) -> None:
    """Measure quality and cost of methods on a task.

    Standard errors come with every number, p-values compare with the first method. Options of the
    methods are flags too: --k 8; see `forerun methods`.
    """
    from forerun.evaluate.tasks import MethodChoice
    from forerun.profile.machine import machine

    _check(flags)
    model = None
    names = flags.method
    if not names:
        model = load(flags.model)
        names = [*DEFAULT_METHODS.get(model.family.name, (model.family.default_method,))]
    choices = [MethodChoice.read(name, options) for name in names]
    _check_options(options, choices)
    if model is None:
        model = load(flags.model)
    with progress_bar(f"{flags.task} …") as progress:
        rows = _run(flags, model, choices, progress)
    report = {
        "task": flags.task,
        "model": flags.model,
        "machine": machine(),
        "date": str(date.today()),
        **flags.settings(),
        "rows": [row.as_dict() for row in rows],
    }
    if flags.as_json:
        print_json(report)
    else:
        show(report, rows)


def _check(flags: EvaluateFlags) -> None:
    if flags.task not in CAPTIONS:
        raise unknown("task", flags.task, CAPTIONS)
    if flags.task in NEEDS_DATA and not flags.data:
        raise BadOption(f"task {flags.task!r} needs --data: {NEEDS_DATA[flags.task]}.")
    if flags.missing not in MISSING:
        raise BadOption(f"missing={flags.missing} must be 1 or 3 sentences.")
    if flags.task == "scattered":
        need("scipy")
    if flags.task in ("humaneval", "functions"):
        _program_settings(flags).limits  # noqa: B018 - refuses what cannot be isolated


def _check_options(options: MethodOptions, choices: Sequence[MethodChoice]) -> None:
    """Refuse an option that none of the methods has."""
    from forerun import registry

    unused = [name for name in options if not any(name in choice.options for choice in choices)]
    if unused:
        names = [choice.method for choice in choices]
        known = {o for name in names for o in registry.method_named(name).option_names()}
        raise unknown(f"option of {' and '.join(names)}", unused[0], known)


def _run(
    flags: EvaluateFlags, model: Model, choices: Sequence[MethodChoice], progress: Progress
) -> list[TaskRow]:
    if flags.task == "scattered":
        return _scattered(flags, model, choices, progress)
    if flags.task == "stories":
        return _stories(flags, model, choices, progress)
    return _programs(flags, model, choices, progress)


def _scattered(
    flags: EvaluateFlags, model: Model, choices: Sequence[MethodChoice], progress: Progress
) -> list[TaskRow]:
    from forerun.evaluate.scattered import ScatteredTask, scattered
    from forerun.evaluate.tasks import TaskSettings
    from forerun.train.data import held_out_windows

    judge = None if flags.judge == "none" else load(flags.judge, lanes=1)
    count = flags.count or DEFAULT_WINDOWS
    windows = held_out_windows(flags.data, tokenizer_of(model), count, flags.length)
    task = ScatteredTask(windows, flags.known, judge)
    settings = TaskSettings(flags.temperature, flags.batch, flags.seed)
    return scattered(model, choices, task, settings, progress)


def _stories(
    flags: EvaluateFlags, model: Model, choices: Sequence[MethodChoice], progress: Progress
) -> list[TaskRow]:
    from forerun.evaluate.stories import read_stories, stories
    from forerun.evaluate.tasks import TaskSettings

    texts = read_stories(flags.data or "")[: flags.count]
    settings = TaskSettings(flags.temperature, flags.batch, flags.seed, flags.trials)
    missing = MISSING[flags.missing]
    return stories(model, choices, texts, settings, missing=missing, progress=progress)


def _program_settings(flags: EvaluateFlags) -> ProgramSettings:
    from forerun.evaluate.programs import ProgramSettings

    return ProgramSettings(
        flags.temperature,
        flags.batch,
        flags.seed,
        flags.trials,
        allow_code=flags.allow_code,
    )


def _programs(
    flags: EvaluateFlags, model: Model, choices: Sequence[MethodChoice], progress: Progress
) -> list[TaskRow]:
    from forerun.evaluate.programs import functions, humaneval, read_programs

    data = flags.data or ""
    settings = _program_settings(flags)
    if flags.task == "functions":
        programs = read_programs(data, fields=())[: flags.count]
        return functions(model, choices, programs, settings, progress)
    programs = read_programs(data)[: flags.count]
    return humaneval(model, choices, programs, settings, progress)


def show(report: Mapping[str, object], rows: Sequence[TaskRow]) -> None:
    """A column for every way to decode."""
    table = Table("", *(row.label for row in rows), box=None)
    for name in rows[0].measures:
        table.add_row(name, *(str(row.measures[name]) for row in rows))
        if name in rows[-1].p_values:
            table.add_row(
                "  p of no difference",
                *(f"{row.p_values[name]:.2f}" if row.p_values else "" for row in rows),
            )
    console = Console()
    print_table(table, console)
    shown = CAPTIONS[str(report["task"])]
    facts = "; ".join(f"{key} {value}" for key, value in report.items() if key in shown)
    console.print(facts, style="dim", highlight=False)
