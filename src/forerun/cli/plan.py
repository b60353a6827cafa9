"""`forerun plan`: what a load needs, by every method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from forerun.cli.common import print_json, print_table, stderr_console
from forerun.cli.flags import Device, Dtype, Json, Quiet, model_option, takes_flags
from forerun.errors import BadOption

if TYPE_CHECKING:
    from forerun.scale.measure import Check
    from forerun.scale.plan import Measured, Row

MEASURED_METHODS = ("ar", "lookup", "jacobi")

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class PlanFlags:
    model: Annotated[str, model_option("A shape: qwen2.5-7b, smollm2-135m, zoo …")] = "qwen2.5-7b"
    load: Annotated[str, typer.Option(help="Requests: 200/s, 50/min, 1e6/day.")] = "10/s"
    method: Annotated[str, typer.Option(help="A method, or auto: the cheapest.")] = "auto"
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256
    tokens_per_forward: Annotated[
        list[str] | None,
        typer.Option(help="METHOD=NUMBER, as counted on your text (repeat the flag)."),
    ] = None
    reader: Annotated[float, typer.Option(help="Tokens a second that a reader must get.")] = 0.0
    in_flight: Annotated[
        int | None,
        typer.Option(help="Sequences of a GPU at most; default: as many as were measured."),
    ] = None
    busy: Annotated[float, typer.Option(help="Share of a GPU's capacity that may be used.")] = 0.8
    price: Annotated[float | None, typer.Option(help="Of a GPU hour.")] = None
    measured: Annotated[
        str | None, typer.Option(help="What --measure wrote; default: what came with Forerun.")
    ] = None
    measure: Annotated[
        str | None,
        typer.Option(help="Measure the shape on this machine, check the model, write this file."),
    ] = None
    methods: Annotated[
        list[str] | None, typer.Option(help="With --measure: methods (repeat the flag).")
    ] = None
    device: Device = None
    dtype: Dtype = None
    quiet: Quiet = False
    as_json: Json = False


@app.command()
@takes_flags(PlanFlags)
def plan(flags: PlanFlags) -> None:
    """Say how many GPUs a load needs and what a million tokens cost, by method.

    Everything in it is measured; docs/scale.md has the model and how well it foretells.
    """
    from forerun.scale import plan as planning

    load = planning.Load(
        planning.read_load(flags.load),
        flags.prompt_tokens,
        flags.tokens,
        flags.busy,
        flags.price,
        flags.reader,
        flags.in_flight,
    )
    counted = _counted(flags.tokens_per_forward or ())
    if flags.measure:
        measured = _measure(flags)
    else:
        file = flags.measured
        measured = planning.Measured.read(file) if file else planning.shipped(flags.model)
    rows = planning.plan(measured, load, flags.method, counted)
    if flags.as_json:
        print_json([row.as_dict() for row in rows])
    else:
        show(rows, measured, flags)


def _counted(words: Sequence[str]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in (word.split("=", 1) for word in words)}
    except ValueError:
        raise BadOption(
            f"tokens_per_forward={list(words)!r} must be METHOD=NUMBER, as in lookup=2.1."
        ) from None


def _measure(flags: PlanFlags) -> Measured:
    import torch

    from forerun.checkpoints.placement import device_named, dtype_named
    from forerun.profile.shapes import random_model
    from forerun.scale.measure import CONTEXT, ROWS, TRIAL, Bench, measure

    folder = Path(str(flags.measure)).resolve().parent
    if not folder.is_dir():
        raise BadOption(f"measure={flags.measure!r}: there is no folder {str(folder)!r}.")
    where = device_named(flags.device)
    half = torch.bfloat16 if where.type == "cuda" else torch.float32
    kind = dtype_named(flags.dtype, where) or half
    model = random_model(flags.model, where, kind, TRIAL.lanes, CONTEXT + max(ROWS))
    methods = {name: _options(name) for name in flags.methods or MEASURED_METHODS}
    measured, checks = measure(Bench(model), flags.model, methods)
    told = {**measured.as_dict(), "checks": [check.as_dict() for check in checks]}
    Path(str(flags.measure)).write_text(json.dumps(told, indent=1))
    _show_checks(checks)
    return measured


def _options(method: str) -> dict[str, object]:
    return {"block": 16} if method == "jacobi" else {}


def _show_checks(checks: Sequence[Check]) -> None:
    table = Table("method", "in flight", "requests/s foretold", "measured", "off by", box=None)
    for check in checks:
        table.add_row(
            check.method,
            str(check.in_flight),
            f"{check.predicted:.2f}",
            f"{check.measured:.2f}",
            f"{check.error:+.1%}",
        )
    print_table(table, stderr_console)


def show(rows: Sequence[Row], measured: Measured, flags: PlanFlags) -> None:
    heads = ["method", "GPUs", "in flight", "ms a step", "break-even", "tokens/forward"]
    heads += ["tokens/s a GPU", "tokens/s a reader", "GPU hours a million tokens"]
    if flags.price is not None:
        heads.append("cost")
    table = Table(*heads, box=None)
    for row in rows:
        cells = [
            row.method,
            f"{row.gpus}",
            f"{row.in_flight}",
            f"{1e3 * row.step:.2f}",
            f"{row.break_even:.2f}",
            f"{row.tokens_per_forward:.2f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.reader:.0f}",
            f"{row.gpu_hours:.4f}",
        ]
        if row.cost is not None:
            cells.append(f"{row.cost:.3f}")
        table.add_row(*cells)
    console = Console()
    print_table(table, console)
    best = rows[0]
    texts = {one.text for one in measured.methods if one.text}
    console.print(
        f"{flags.load} of {flags.prompt_tokens} + {flags.tokens} tokens: {best.gpus} replicas of "
        f"{measured.shape} by {best.method}, one GPU each; nothing is split. Measured on "
        f"{measured.machine}; tokens per forward counted on {', '.join(sorted(texts))}.",
        style="dim",
        highlight=False,
    )
