"""`forerun analyse`: what limits a method on a model, and how a block model decodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from forerun.cli.common import (
    Prompt,
    check_picture,
    load,
    print_json,
    print_table,
    progress_bar,
    prompts_or_code,
    stderr_console,
    tokenizer_of,
)
from forerun.cli.flags import Json, MaxTokens, PromptFile, Quiet, model_option, takes_flags
from forerun.errors import BadOption, unknown
from forerun.options import check_whole

if TYPE_CHECKING:
    from forerun.evaluate.ar_ness import OrderReport

GIVEN = 64  # tokens of each prompt of `frontier`
AR_NESS_METHODS = {"static": "block-stepwise", "dynamic": "block", "s2d2": "s2d2"}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class AnalyseFlags:
    analysis: Annotated[
        str,
        typer.Argument(
            help="ssd-limit: how much better drafts could make SSD; ar-ness: how nearly from left "
            "to right a block model decodes, and how sure it is; estimators: how well acceptance "
            "is foreseen; frontier: what speed costs in quality."
        ),
    ]
    model: Annotated[
        str | None, model_option("Default: zoo:masked for ssd-limit, else zoo:block.")
    ] = None
    prompts: PromptFile = None
    block: Annotated[
        int | None, typer.Option(help="Tokens per block; default: 8 for ssd-limit, else 16.")
    ] = None
    cache: Annotated[str, typer.Option(help="ssd-limit: none, prefix or dual.")] = "none"
    max_tokens: MaxTokens = 64
    temperature: Annotated[float, typer.Option(help="0 decides on the likeliest token.")] = 0.0
    data: Annotated[
        str | None,
        typer.Option(
            help="frontier: held-out text of a folder of .py files or a .jsonl[.xz]; default: what "
            "is installed."
        ),
    ] = None
    count: Annotated[int, typer.Option(help="frontier: completions.")] = 16
    judge: Annotated[
        str, typer.Option(help="frontier: a left-to-right model with the same tokens.")
    ] = "zoo:ar"
    plot: Annotated[
        str | None, typer.Option(help="Also draw it into this file (ar-ness, frontier).")
    ] = None
    quiet: Quiet = False
    as_json: Json = False


@dataclass(frozen=True)
class Subject:
    """What is analysed: a model and a block size, given or by default, and prompts."""

    model: str
    block: int
    prompts: Sequence[Prompt]


@dataclass(frozen=True)
class Findings:
    """What an analysis found: rows for JSON, and tables for the terminal."""

    rows: list[dict[str, object]]
    tables: list[Table]


@dataclass(frozen=True)
class Analysis:
    """An analysis, and the model and block size that it takes by default."""

    run: Callable[[AnalyseFlags, Subject], Findings]
    model: str
    block: int
    drawn: bool = False


@app.command()
@takes_flags(AnalyseFlags)
def analyse(flags: AnalyseFlags) -> None:
    """Show what limits a method on a model, and how a model decodes."""
    if flags.analysis not in ANALYSES:
        raise unknown("analysis", flags.analysis, ANALYSES)
    analysis = ANALYSES[flags.analysis]
    check_picture(flags.plot)
    if flags.plot and not analysis.drawn:
        drawn = [name for name, other in ANALYSES.items() if other.drawn]
        raise BadOption(
            f"plot={flags.plot!r}: there is no picture of {flags.analysis}, only of "
            f"{' and '.join(drawn)}."
        )
    subject = Subject(
        model=flags.model or analysis.model,
        block=analysis.block if flags.block is None else flags.block,
        prompts=prompts_or_code(flags.prompts),
    )
    found = analysis.run(flags, subject)
    if flags.as_json:
        print_json(_finite(found.rows))
        return
    for table in found.tables:
        print_table(table)


def _finite(value: object) -> object:
    """The same with None for numbers that JSON does not know, such as the error of one sample."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ssd_limit(flags: AnalyseFlags, subject: Subject) -> Findings:
    from forerun.evaluate.ssd_limit import ssd_limit

    model = load(subject.model)
    with stderr_console.status("decoding stepwise …"):
        limits = ssd_limit(
            model,
            subject.prompts,
            block=subject.block,
            cache=flags.cache,
            max_tokens=flags.max_tokens,
        )
    tops = sorted({limit.top for limit in limits})
    title = "forwards saved, were any of the k likeliest a draft"
    table = Table("N", *(f"k = {top}" for top in tops), "bound", box=None, title=title)
    for drafts in sorted({limit.drafts for limit in limits}):
        of_drafts = [limit for limit in limits if limit.drafts == drafts]
        reductions = [f"{limit.reduction:.1%}" for limit in of_drafts]
        table.add_row(str(drafts), *reductions, f"{of_drafts[0].bound:.1%}")
    rows = [{**vars(limit), "reduction": limit.reduction, "bound": limit.bound} for limit in limits]
    return Findings(rows, [table])


def ar_ness(flags: AnalyseFlags, subject: Subject) -> Findings:
    from forerun.evaluate.ar_ness import check_fills_blocks, order_report
    from forerun.evaluate.plots import plot_order

    model = load(subject.model)
    check_fills_blocks(model, "ar-ness")
    reports = []
    for name, method in AR_NESS_METHODS.items():
        with stderr_console.status(f"decoding, {name} …"):
            results = model.generate_all(
                subject.prompts,
                method=method,
                block=subject.block,
                max_tokens=flags.max_tokens,
                temperature=flags.temperature,
                ignore_eos=True,
                logprobs=0,
            )
            reports.append(order_report(results, name, subject.block))
    if flags.plot:
        plot_order(reports, flags.plot)
    tables = [_order_table(reports), _course_table(reports)]
    return Findings([asdict(report) for report in reports], tables)


def _order_table(reports: Sequence[OrderReport]) -> Table:
    ks = [f"@{k}" for k in range(1, len(reports[0].local) + 1)]
    title = "how nearly from left to right: 1 is entirely"
    table = Table("decoding", "AR-ness", *ks, box=None, title=title)
    for report in reports:
        table.add_row(report.label, "local", *(f"{share:.2f}" for share in report.local))
        table.add_row("", "global", *(f"{share:.2f}" for share in report.overall))
    return table


def _course_table(reports: Sequence[OrderReport]) -> Table:
    tenths = [f"{10 * i}%" for i in range(10)]
    title = "from a block's first forward to its last"
    table = Table("decoding", "", *tenths, box=None, title=title)

    def words(values: Sequence[float | None], form: str) -> list[str]:
        return ["" if value is None else format(value, form) for value in values]

    for report in reports:
        table.add_row(report.label, "confidence", *words(report.confidence, ".2f"))
        table.add_row("", "tokens/forward", *words(report.tokens_per_forward, ".1f"))
    return table


def estimators(flags: AnalyseFlags, subject: Subject) -> Findings:
    from forerun.evaluate.estimators import estimator_errors

    model = load(subject.model)
    with stderr_console.status("verifying every draft …"):
        errors = estimator_errors(
            model,
            subject.prompts,
            block=subject.block,
            max_tokens=flags.max_tokens,
            temperature=flags.temperature,
        )
    columns = ("estimator", "strength", "mean error", "spread", "mean absolute")
    table = Table(*columns, box=None, title="expected less accepted tokens")
    for error in errors:
        table.add_row(
            error.estimator,
            f"{error.strength:g}",
            f"{error.bias:+.2f}",
            f"{error.spread:.2f}",
            f"{error.absolute:.2f}",
        )
    return Findings([asdict(error) for error in errors], [table])


def frontier(flags: AnalyseFlags, subject: Subject) -> Findings:
    from forerun.evaluate.frontier import HeldOutText, frontier, frontier_settings
    from forerun.evaluate.plots import plot_frontier
    from forerun.train.data import held_out_windows

    check_whole("count", flags.count)
    model = load(subject.model, lanes=flags.count)
    judge = load(flags.judge, lanes=1)
    length = GIVEN + flags.max_tokens
    windows = held_out_windows(flags.data, tokenizer_of(model), flags.count, length)
    with progress_bar(f"completing {flags.count} texts") as progress:
        points = frontier(
            model,
            judge,
            HeldOutText(windows, GIVEN),
            frontier_settings(subject.block),
            temperature=flags.temperature,
            progress=progress,
        )
    title = f"blocks of {subject.block}"
    columns = ("decoding", "tokens/forward", "nats", "entropy", "first line right")
    table = Table(*columns, box=None, title=title)
    for point in points:
        measures = (point.tokens_per_forward, point.nats, point.entropy, point.first_line_right)
        table.add_row(point.label, *map(str, measures))
    if flags.plot:
        plot_frontier({title: points}, flags.plot)
    return Findings([point.as_dict() for point in points], [table])


ANALYSES = {
    "ssd-limit": Analysis(ssd_limit, "zoo:masked", block=8),
    "ar-ness": Analysis(ar_ness, "zoo:block", block=16, drawn=True),
    "estimators": Analysis(estimators, "zoo:block", block=16),
    "frontier": Analysis(frontier, "zoo:block", block=16, drawn=True),
}
