"""`forerun evaluate TASK…`: quality beside cost, for every way to decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun.cli.common import (
    check_writable,
    load,
    need,
    print_json,
    print_table,
    progress_bar,
    stderr_console,
    tokenizer_of,
)
from forerun.cli.flags import (
    WITH_METHOD_OPTIONS,
    Device,
    Dtype,
    Json,
    MethodOptions,
    Quantize,
    Quiet,
    Seed,
    model_option,
    read_method_options,
    takes_flags_and_options,
)
from forerun.cli.scaled import (
    Gpus,
    RayAddress,
    Threads,
    Workers,
    is_scaled,
    make_pool,
    parts_bar,
)
from forerun.errors import BadOption, unknown
from forerun.options import check_whole

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.evaluate.benchmarks.base import Benchmark
    from forerun.evaluate.evaluation import Evaluation
    from forerun.evaluate.examiner import SandboxExaminer
    from forerun.evaluate.summary import Summary
    from forerun.evaluate.tasks import MethodChoice, TaskRow

SCATTERED = "scattered"  # no benchmark: it measures with a judge and a t-test
SCATTERED_CAPTION = ("model", "known", "length", "judge", "temperature", "batch", "machine")
DEFAULT_METHODS = {
    "any-subset": ("sequential", "assd", "assd:ngram"),
    "masked": ("stepwise", "ssd"),
}
DEFAULT_WINDOWS = 32  # sequences of the task scattered

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class EvaluateFlags:
    task: Annotated[
        list[str] | None, typer.Argument(help="Benchmarks, or scattered; none lists them all.")
    ] = None
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="METHOD or METHOD:DRAFT, with @OPTION=VALUE behind it; several with commas, or "
            "repeat the flag. Default: by the model's kind."
        ),
    ] = None
    model: Annotated[str, model_option("The model.")] = "zoo:any-subset"
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A benchmark's file or a folder of them, or TASK=PATH; repeat the flag. For "
            "scattered: a folder of .py files or a .jsonl[.xz]."
        ),
    ] = None
    out: Annotated[
        str, typer.Option(help="Folder of the answers: what is there is not asked again.")
    ] = "evaluation"
    html: Annotated[str | None, typer.Option(help="Write a page with tables and frontier.")] = None
    count: Annotated[int | None, typer.Option(help="Use this many items.")] = None
    shots: Annotated[
        int | None, typer.Option(help="Examples in the prompt; default: as published.")
    ] = None
    samples: Annotated[int, typer.Option(help="Answers to each item, for pass@k.")] = 1
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer; default: as published.")
    ] = None
    chat: Annotated[bool, typer.Option(help="Use the model's chat template if it has one.")] = True
    seconds: Annotated[
        float | None, typer.Option(help="Most seconds of decoding for each method.")
    ] = None
    judge: Annotated[
        str | None,
        typer.Option(
            help="mt-bench, spec-bench: the address of an OpenAI-compatible server. scattered: a "
            "left-to-right model, or none; default zoo:ar."
        ),
    ] = None
    judge_model: Annotated[str, typer.Option(help="The model to ask for at that address.")] = (
        "default"
    )
    draws: Annotated[
        int, typer.Option(help="Maskings per log-likelihood of a masked or block model.")
    ] = 32
    missing: Annotated[int, typer.Option(help="stories: sentences that are missing, 1 or 3.")] = 1
    known: Annotated[float, typer.Option(help="scattered: share of tokens that is given.")] = 0.3
    length: Annotated[int, typer.Option(help="scattered: tokens per sequence.")] = 256
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Run the model's programs even where they cannot be isolated.",
        ),
    ] = False
    temperature: Annotated[
        float | None, typer.Option(help="Default 0, greedy; for scattered 1.")
    ] = None
    batch: Annotated[
        int | None, typer.Option(help="Sequences decoded together; default 8, and 64 on a GPU.")
    ] = None
    device: Device = None
    dtype: Dtype = None
    quantize: Quantize = None
    seed: Seed = 0
    ray: RayAddress = None
    workers: Workers = None
    threads: Threads = 1
    gpus: Gpus = None
    quiet: Quiet = False
    as_json: Json = False


@app.command(context_settings=WITH_METHOD_OPTIONS)
@takes_flags_and_options(EvaluateFlags)
def evaluate(flags: EvaluateFlags, options: MethodOptions) -> None:
    """Measure quality and cost of methods on standard benchmarks.

    Every number has its standard error, and every method is compared with the first on the same
    items. An interrupt loses nothing: the same command goes on. Options of the methods are flags
    too: --k 8; see `forerun methods`.
    """
    words = flags.task or []
    tasks = list(takewhile(lambda word: not word.startswith("-"), words))
    options = {**options, **read_method_options(words[len(tasks) :])}  # flags it does not know
    if not tasks:
        list_benchmarks()
        return
    _check(flags, tasks)
    if flags.batch is None:
        flags = replace(flags, batch=_usual_batch(flags.device))
    if tasks == [SCATTERED]:
        _evaluate_scattered(flags, options)
        return
    read = {task: _read(flags, task) for task in tasks}  # before the model: a wrong path shows now
    if is_scaled(flags):
        panels = _panels_by_workers(flags, options, read)
    else:
        panels = _panels(flags, options, read)
    if flags.html:
        from forerun.evaluate.report import page

        Path(flags.html).write_text(page(panels), encoding="utf-8")
    if flags.as_json:
        print_json([[summary.as_dict() for summary in panel] for panel in panels])


AsRead = Mapping[str, tuple["Benchmark", list[Any], dict[str, Any]]]  # by task


def _panels(flags: EvaluateFlags, options: MethodOptions, read: AsRead) -> list[list[Summary]]:
    """What this process measures, task by task."""
    model, choices = _model_and_choices(flags, options)
    panels = []
    for task, (benchmark, items, shown) in read.items():
        evaluation = _evaluation(flags, model, benchmark, items, shown)
        panels.append(_run(evaluation, choices, task))
        if not flags.as_json:
            show_panel(panels[-1])
    return panels


def _panels_by_workers(
    flags: EvaluateFlags, options: MethodOptions, read: AsRead
) -> list[list[Summary]]:
    """The same by several workers. Seconds are those of one worker."""
    from forerun.evaluate.asking import Style
    from forerun.evaluate.summary import summarise
    from forerun.evaluate.tasks import MethodChoice
    from forerun.scale.evaluating import EvaluatePlan, Question, evaluate
    from forerun.scale.loading import LoadPlan

    names = [name for words in flags.method or () for name in words.split(",") if name]
    if not names:
        raise BadOption("--workers and --ray need --method: no model is loaded here to ask.")
    if flags.seconds is not None:
        raise BadOption("--seconds does not go with --workers or --ray.")
    choices = [MethodChoice.read(name, options) for name in names]
    _check_options(options, choices)
    plan = EvaluatePlan(
        LoadPlan(flags.model, flags.device, flags.dtype, flags.batch, quantize=flags.quantize),
        Style(flags.temperature or 0.0, flags.samples, flags.seed, flags.chat, flags.max_tokens),
        flags.draws,
        {
            "allow_code": flags.allow_code,
            "judge": flags.judge,
            "judge_model": flags.judge_model,
        },
    )
    questions = [Question(task, items, shown) for task, (_, items, shown) in read.items()]
    pool = make_pool(flags)
    with parts_bar("evaluating") as progress:
        files = evaluate(plan, questions, choices, Path(flags.out), pool, progress)
    panels = [summarise(of_task) for of_task in files]
    for panel in panels if not flags.as_json else ():
        show_panel(panel)
    return panels


def list_benchmarks() -> None:
    """What there is, and where each file comes from."""
    from forerun.evaluate.benchmarks.catalogue import BENCHMARKS

    table = Table("task", "what is measured", "its file (--data)", box=None)
    for one in BENCHMARKS.values():
        table.add_row(one.name, one.summary, one.source)
    text = "held-out text of which a share of tokens is given: a judge's perplexity"
    table.add_row(SCATTERED, text, "a folder of .py files, or what is installed")
    print_table(table)


def _check(flags: EvaluateFlags, tasks: Sequence[str]) -> None:
    from forerun.evaluate.benchmarks.catalogue import BENCHMARKS

    for task in tasks:
        if task not in (SCATTERED, *BENCHMARKS):
            raise unknown("task", task, [*BENCHMARKS, SCATTERED])
    if SCATTERED in tasks:
        need("scipy")
        if len(tasks) > 1:
            raise BadOption("task 'scattered' has measures of its own: run it alone.")
    elif flags.judge is not None and not flags.judge.startswith("http"):
        raise BadOption(
            f"judge={flags.judge!r} must be the address of an OpenAI-compatible server, such as "
            f"http://localhost:8000/v1; only 'scattered' takes a model."
        )
    if flags.count is not None:
        check_whole("count", flags.count)
    check_whole("samples", flags.samples)
    if flags.samples > 1 and not flags.temperature:
        raise BadOption(f"samples={flags.samples} would all be the same: give --temperature too.")
    check_writable(flags.html)
    if any(BENCHMARKS[task].runs_code for task in tasks if task != SCATTERED):
        _examiner(flags).limits  # noqa: B018 - refuses what cannot be isolated, before the work


def _path_of(flags: EvaluateFlags, benchmark: Benchmark) -> str:
    """Where a benchmark's data is: TASK=PATH, else the path that is for all."""
    given = [word.partition("=") for word in flags.data or ()]
    own = [path for name, equals, path in given if equals and name == benchmark.name]
    every = [name + equals + path for name, equals, path in given if not equals]
    if not own and not every:
        raise BadOption(f"task {benchmark.name!r} needs --data: {benchmark.source}")
    return (own or every)[0]


def _read(flags: EvaluateFlags, task: str) -> tuple[Benchmark, list[Any], dict[str, Any]]:
    from forerun.evaluate.benchmarks.base import Data, find_file
    from forerun.evaluate.benchmarks.catalogue import benchmark_named

    benchmark = benchmark_named(task)
    file = find_file(benchmark, _path_of(flags, benchmark))
    options = {"missing": flags.missing}
    items = benchmark.read(Data(file, flags.shots, flags.seed, options))[: flags.count]
    shown: dict[str, Any] = {"data": Path(file).stem, "shots": flags.shots}
    if task == "stories":
        shown["missing"] = flags.missing
    return benchmark, items, shown


def _model_and_choices(
    flags: EvaluateFlags, options: MethodOptions
) -> tuple[Model, list[MethodChoice]]:
    """Methods are checked before a model is loaded, where they are given."""
    from forerun.evaluate.tasks import MethodChoice

    model = None
    names = [name for words in flags.method or () for name in words.split(",") if name]
    if not names:
        model = _load(flags)
        names = [*DEFAULT_METHODS.get(model.family.name, (model.family.default_method,))]
    choices = [MethodChoice.read(name, options) for name in names]
    _check_options(options, choices)
    return model or _load(flags), choices


def _usual_batch(device: str | None) -> int:
    from forerun.checkpoints.placement import device_named

    return 64 if device_named(device).type == "cuda" else 8


def _load(flags: EvaluateFlags) -> Model:
    return load(
        flags.model,
        device=flags.device,
        dtype=flags.dtype,
        lanes=flags.batch,
        quantize=flags.quantize,
    )


def _check_options(options: MethodOptions, choices: Sequence[MethodChoice]) -> None:
    """Refuse an option that none of the methods has."""
    from forerun import registry

    unused = [name for name in options if not any(name in choice.options for choice in choices)]
    if unused:
        names = [choice.method for choice in choices]
        known = {o for name in names for o in registry.method_named(name).option_names()}
        raise unknown(f"option of {' and '.join(names)}", unused[0], known)


def _evaluation(
    flags: EvaluateFlags, model: Model, benchmark: Benchmark, items: Any, shown: dict[str, Any]
) -> Evaluation:
    from forerun.evaluate.asking import Style
    from forerun.evaluate.evaluation import Evaluation
    from forerun.evaluate.likelihood import Likelihood

    temperature = flags.temperature or 0.0
    return Evaluation(
        model,
        benchmark,
        items,
        flags.out,
        Style(temperature, flags.samples, flags.seed, flags.chat, flags.max_tokens),
        _examiner(flags),
        Likelihood(model, flags.draws, flags.seed),
        flags.seconds,
        shown,
    )


def _examiner(flags: EvaluateFlags) -> SandboxExaminer:
    from forerun.evaluate.examiner import SandboxExaminer

    return SandboxExaminer(
        allow_code=flags.allow_code, judge=flags.judge, judge_model=flags.judge_model
    )


def _run(evaluation: Evaluation, choices: Sequence[MethodChoice], task: str) -> list[Summary]:
    from forerun.evaluate.summary import summarise

    try:
        with progress_bar(f"{task} …") as progress:
            files = evaluation.run(choices, progress)
    except KeyboardInterrupt:
        folder = evaluation.folder
        stderr_console.print(f"answers are kept in {folder}: the same command goes on from there")
        raise typer.Exit(130) from None
    answered = [file for file in files if file.scores]
    if not answered:
        raise BadOption(f"seconds={evaluation.seconds:g} were too few for any answer: give more.")
    return summarise(answered)


def show_panel(panel: Sequence[Summary]) -> None:
    from forerun.evaluate.report import (
        caption,
        cells,
        columns_used,
        group_rows,
        headers,
        measures,
        title,
    )

    rows = [cells(summary) for summary in panel]
    used = columns_used(rows)
    heads = headers(panel)
    table = Table(*(heads[i] for i in used), box=None)
    for row in rows:
        table.add_row(*(escape(row[i]) for i in used))
    console = Console()
    console.print(title(panel), highlight=False)
    print_table(table, console)
    groups = group_rows(panel)
    if groups:
        by_group = Table("tokens/forward", *(escape(one.method) for one in panel), box=None)
        for row in groups:
            by_group.add_row(*map(escape, row))
        print_table(by_group, console)
    for method, words in measures(panel):
        console.print(f"{method}: {words}", style="dim", highlight=False, markup=False)
    console.print(caption(panel), style="dim", highlight=False)


# --- scattered ----------------------------------------------------------------


def _evaluate_scattered(flags: EvaluateFlags, options: MethodOptions) -> None:
    from forerun.evaluate.scattered import ScatteredTask, scattered
    from forerun.evaluate.tasks import TaskSettings
    from forerun.profile.machine import machine
    from forerun.train.data import held_out_windows

    model, choices = _model_and_choices(flags, options)
    temperature = 1.0 if flags.temperature is None else flags.temperature
    name = flags.judge or "zoo:ar"
    judge = None if name == "none" else load(name, lanes=1)
    data = flags.data[0] if flags.data else None
    windows = held_out_windows(
        data, tokenizer_of(model), flags.count or DEFAULT_WINDOWS, flags.length
    )
    assert flags.batch is not None, "a usual one was chosen"
    settings = TaskSettings(temperature, flags.batch, flags.seed)
    with progress_bar(f"{SCATTERED} …") as progress:
        task = ScatteredTask(windows, flags.known, judge)
        rows = scattered(model, choices, task, settings, progress)
    report = {
        "task": SCATTERED,
        "model": flags.model,
        "machine": machine(),
        "date": str(date.today()),
        **{key: asdict(flags)[key] for key in ("known", "length", "batch", "seed", "count")},
        "judge": name,
        "temperature": temperature,
        "rows": [row.as_dict() for row in rows],
    }
    if flags.as_json:
        print_json(report)
    else:
        show_scattered(report, rows)


def show_scattered(report: Mapping[str, object], rows: Sequence[TaskRow]) -> None:
    """A column for every way to decode."""
    table = Table("", *(escape(row.label) for row in rows), box=None)
    for name in rows[0].measures:
        table.add_row(name, *(str(row.measures[name]) for row in rows))
        if name in rows[-1].p_values:
            table.add_row(
                "  p of no difference",
                *(f"{row.p_values[name]:.2f}" if row.p_values else "" for row in rows),
            )
    console = Console()
    print_table(table, console)
    facts = "; ".join(f"{key} {value}" for key, value in report.items() if key in SCATTERED_CAPTION)
    console.print(facts, style="dim", highlight=False)
