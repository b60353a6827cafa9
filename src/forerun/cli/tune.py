"""`forerun tune`: the fastest options on this machine, for your prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun.cli.common import (
    check_picture,
    load,
    print_json,
    print_table,
    prompts_or_code,
    stderr_console,
)
from forerun.cli.flags import Json, MaxTokens, PromptFile, Quiet, model_option, takes_flags
from forerun.errors import BadOption, unknown

if TYPE_CHECKING:
    from forerun.profile.tune import Tuned

METHODS = ("specdiff", "jacobi")

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class TuneFlags:
    method: Annotated[
        str, typer.Argument(help="specdiff, or jacobi (multi-block decoding with recycling).")
    ]
    model: Annotated[str, model_option("The target.")] = "zoo:ar"
    draft: Annotated[str | None, typer.Option(help="specdiff: the model that drafts.")] = None
    prompts: PromptFile = None
    max_tokens: MaxTokens = 48
    temperature: Annotated[
        float, typer.Option(help="specdiff: above 0 the drafter's own temperature is fitted too.")
    ] = 0.0
    rounds: Annotated[int, typer.Option(help="Turns per setting; the median counts.")] = 1
    out: Annotated[
        str | None, typer.Option(help="Write what was found to this file, for --tuned.")
    ] = None
    plot: Annotated[str | None, typer.Option(help="Draw what was measured into this PNG file.")] = (
        None
    )
    quiet: Quiet = False
    as_json: Json = False


@app.command()
@takes_flags(TuneFlags)
def tune(flags: TuneFlags) -> None:
    """Find the fastest options of a method on this machine.

    Costs and acceptance are measured, and the choice is checked by running it.
    """
    from forerun.profile.plots import plot_tuned

    _check(flags)
    found = _tuned(flags)
    if flags.out:
        found.write(flags.out)
    if flags.plot:
        plot_tuned(found, flags.plot)
    if flags.as_json:
        print_json(found.as_dict())
    else:
        show(found, flags.out)


def _check(flags: TuneFlags) -> None:
    if flags.method not in METHODS:
        raise unknown("method to tune", flags.method, METHODS)
    if flags.method == "specdiff" and flags.draft is None:
        raise BadOption(
            "tune specdiff needs --draft: a model that fills blanks, such as zoo:masked."
        )
    if flags.method == "jacobi" and flags.temperature != 0:
        raise BadOption("tune jacobi decodes greedily: leave --temperature out.")
    check_picture(flags.plot)


def _tuned(flags: TuneFlags) -> Tuned:
    from forerun.profile.tune import TuningSettings
    from forerun.profile.tune_jacobi import tune_jacobi
    from forerun.profile.tune_specdiff import tune_specdiff

    prompts = prompts_or_code(flags.prompts)
    target = load(flags.model, lanes=1)
    settings = TuningSettings(flags.max_tokens, flags.temperature, flags.rounds)
    if flags.method == "jacobi" or flags.draft is None:
        return tune_jacobi(target, prompts, settings, report=_report)
    draft = load(flags.draft, lanes=1)
    return tune_specdiff(target, draft, prompts, settings, report=_report)


def _report(line: str) -> None:
    stderr_console.print(line, style="dim")


def show(found: Tuned, file: str | None) -> None:
    tried = sorted(found.rows, key=lambda row: -row.speed.tokens_per_second)
    columns = [key for key in found.rows[0].as_dict() if key != "refill"]
    table = Table(*columns, box=None)
    for row in tried:
        cells = row.as_dict()
        table.add_row(*(_cell(cells.get(key, "")) for key in columns))
    console = Console()
    print_table(table, console)
    for line in verdict(found, file):
        console.print(line, highlight=False)


def verdict(found: Tuned, file: str | None) -> list[str]:
    """What to use. Options that are slower than plain decoding are not recommended."""
    options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in found.options.items())
    ratio = found.tokens_per_second / found.plain
    speed = f"{found.tokens_per_second:.0f} tokens/s, {ratio:.2f} times ar ({found.machine})"
    if ratio < 1:
        kept = f"; {escape(file)} keeps them, for another machine or other prompts" if file else ""
        return [
            f"[yellow]Plain decoding is faster here:[/] [bold]--method ar[/], {found.plain:.0f} "
            "tokens/s",
            f"the best of {found.method}: {options}: {speed}{kept}",
        ]
    lines = [f"[bold]--method {found.method} {escape(options)}[/]", speed]
    if file:
        lines.append(f"[dim]use it with: forerun generate PROMPT --tuned {escape(file)}[/]")
    return lines


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
