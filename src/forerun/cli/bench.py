"""`forerun bench`: where the time of a forward and of decoding goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from forerun.cli.common import (
    check_picture,
    load,
    print_json,
    print_table,
    progress_bar,
    prompts_or_code,
    stderr_console,
)
from forerun.cli.flags import (
    Batch,
    Device,
    Dtype,
    Json,
    MaxTokens,
    PromptFile,
    Quantize,
    Quiet,
    model_option,
    takes_flags,
)
from forerun.errors import BadOption, unknown
from forerun.options import check_whole

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.profile.decoding import TimeSplit
    from forerun.profile.forward import Ceilings, TimedForward

LEAST_LANES = 8

app = typer.Typer(
    help="Measure where the time of a forward, or of decoding, goes.",
    no_args_is_help=True,
    add_completion=False,
)


@dataclass(frozen=True)
class ForwardFlags:
    shape: Annotated[
        str, typer.Option(help="A shape with random weights: zoo, smollm2-135m, qwen2.5-7b …")
    ] = "zoo"
    model: Annotated[str | None, model_option("A model instead of a shape.")] = None
    tokens: Annotated[str, typer.Option(help="Rows per sequence, with commas between them.")] = (
        "1,2,4,8,16,32,64,128,256,512"
    )
    batch: Annotated[str, typer.Option(help="Sequences, with commas between them.")] = "1,8,32"
    context: Annotated[
        str, typer.Option(help="Tokens in slots already, with commas between them.")
    ] = "128,1024,8192"
    device: Device = None
    dtype: Annotated[
        str | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on cuda.")
    ] = None
    turns: Annotated[int, typer.Option(help="Timed runs of each forward.")] = 5
    plot: Annotated[str | None, typer.Option(help="Also draw the curve into this file.")] = None
    quiet: Quiet = False
    as_json: Json = False


@dataclass(frozen=True)
class Sizes:
    """The forwards to time: every combination."""

    tokens: list[int]
    batch: list[int]
    context: list[int]

    def __len__(self) -> int:
        return math.prod((len(self.tokens), len(self.batch), len(self.context)))


@dataclass(frozen=True)
class ForwardReport:
    """Forwards that were timed on one model, in groups of one batch and context."""

    model: str
    ceilings: Ceilings
    forwards: Sequence[TimedForward]
    tokens: Sequence[int]  # numbers of tokens that were asked for

    @cached_property
    def groups(self) -> dict[tuple[int, int], list[TimedForward]]:
        found: dict[tuple[int, int], list[TimedForward]] = {}
        for one in self.forwards:
            found.setdefault((one.batch, one.context), []).append(one)
        return found

    @cached_property
    def knees(self) -> dict[tuple[int, int], int]:
        """For each group the most tokens that ride along."""
        from forerun.profile.latency import knee

        return {
            key: knee({one.tokens: one.seconds for one in group})
            for key, group in self.groups.items()
        }

    @cached_property
    def break_even(self) -> dict[TimedForward, float]:
        """For each forward the tokens that it must yield to beat the smallest of its group."""
        return {
            one: one.seconds / group[0].seconds * group[0].tokens
            for group in self.groups.values()
            for one in group
        }


@app.command()
@takes_flags(ForwardFlags)
def forward(flags: ForwardFlags) -> None:
    """Time a forward by tokens, batch and context.

    Times are also given as multiples of what reading and arithmetic must take on this machine.
    """
    from forerun.profile.forward import forwards
    from forerun.profile.plots import plot_forwards

    sizes = Sizes(
        numbers("tokens", flags.tokens),
        numbers("batch", flags.batch),
        numbers("context", flags.context),
    )
    check_whole("turns", flags.turns)
    check_picture(flags.plot)
    model = _model(flags, sizes)
    with progress_bar("timing forwards") as progress:
        ceilings, timed = forwards(
            model, sizes.tokens, sizes.batch, sizes.context, turns=flags.turns, progress=progress
        )
    _check_any_fits(model, len(timed), len(sizes))
    if flags.plot:
        plot_forwards(timed, flags.plot)
    report = ForwardReport(model.name, ceilings, timed, sizes.tokens)
    if flags.as_json:
        print_json(_as_dict(report))
    else:
        _show(report)


def numbers(name: str, text: str) -> list[int]:
    """'1,8,32' as whole numbers."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise BadOption(
            f"{name}={text!r} must be whole numbers, 1 or more, with commas between them."
        )
    return sorted({int(part) for part in parts})


def _model(flags: ForwardFlags, sizes: Sizes) -> Model:
    """The model named, or one of the shape with random weights."""
    import torch

    from forerun.checkpoints.placement import device_named, dtype_named
    from forerun.profile.shapes import SHAPES, random_model

    if flags.model is None and flags.shape not in SHAPES:
        raise unknown("shape", flags.shape, SHAPES)
    device = device_named(flags.device)
    dtype = dtype_named(flags.dtype, device) or torch.bfloat16
    lanes = max(sizes.batch)
    if flags.model is not None:
        return load(flags.model, device=flags.device, dtype=flags.dtype, lanes=lanes)
    context = max(sizes.context) + max(sizes.tokens)
    with stderr_console.status(f"making {flags.shape} …"):
        return random_model(flags.shape, device, dtype, lanes, context)


def _check_any_fits(model: Model, timed: int, asked: int) -> None:
    if timed == 0:
        raise BadOption(
            f"nothing fits: '{model.name}' holds {model.context} tokens, less than the context and "
            "tokens asked for."
        )
    if timed < asked:
        stderr_console.print(
            f"{asked - timed} of {asked} left out: '{model.name}' holds {model.context} tokens.",
            style="yellow",
        )


def _as_dict(report: ForwardReport) -> dict[str, object]:
    from forerun.profile.machine import machine

    return {
        "model": report.model,
        "machine": machine(),
        **report.ceilings.as_dict(),
        "cells": [
            {**one.as_dict(), "break_even": tokens} for one, tokens in report.break_even.items()
        ],
        "knees": [
            {"batch": batch, "context": context, "tokens": tokens}
            for (batch, context), tokens in report.knees.items()
        ],
    }


def _show(report: ForwardReport) -> None:
    from forerun.profile.machine import machine

    console = Console()
    times = {one: f"{1e3 * one.seconds:.3g} ({one.times:.1f})" for one in report.forwards}
    title = "ms per forward (times its floor), by tokens"
    print_table(by_tokens(title, report.groups, times, report.knees), console)
    if len(report.tokens) > 1:
        title = f"break-even: tokens per forward to beat {report.tokens[0]} at a time"
        even = {one: f"{tokens:.2f}" for one, tokens in report.break_even.items()}
        print_table(by_tokens(title, report.groups, even), console)
    copied = report.ceilings.bytes_per_second / 1e9
    multiplied = report.ceilings.flops_per_second / 1e12
    console.print(
        f"{copied:.1f} GB/s copied, {multiplied:.2f} TFLOP/s multiplied; {report.model}; "
        f"{machine()}",
        style="dim",
        highlight=False,
    )


def by_tokens(
    title: str,
    groups: Mapping[tuple[int, int], Sequence[TimedForward]],
    words: Mapping[TimedForward, str],
    knees: Mapping[tuple[int, int], int] | None = None,
) -> Table:
    """A line for each batch and context, a column for each number of tokens."""
    counts = sorted({one.tokens for group in groups.values() for one in group})
    table = Table("batch", "context", *map(str, counts), box=None, title=title)
    if knees:
        table.add_column("knee")
    for (batch, context), group in groups.items():
        by_count = {one.tokens: words[one] for one in group}
        row = [str(batch), str(context), *(by_count.get(count, "") for count in counts)]
        if knees:
            row.append(str(knees[batch, context]))
        table.add_row(*row)
    return table


@dataclass(frozen=True)
class DecodeFlags:
    model: Annotated[str, model_option("A model.")] = "zoo:ar"
    methods: Annotated[
        str | None,
        typer.Option(help="Names with commas between them; default: all that need no draft model."),
    ] = None
    prompts: PromptFile = None
    max_tokens: MaxTokens = 64
    batch: Batch = 1
    turns: Annotated[int, typer.Option(help="Turns that each method takes.")] = 3
    device: Device = None
    dtype: Dtype = None
    quantize: Quantize = None
    quiet: Quiet = False
    as_json: Json = False


@app.command()
@takes_flags(DecodeFlags)
def decode(flags: DecodeFlags) -> None:
    """Time whole methods, and split it into forward, rules, host and idle."""
    from forerun.evaluate.compare import contestants_for
    from forerun.profile.decoding import time_splits

    check_whole("max_tokens", flags.max_tokens)
    check_whole("batch", flags.batch)
    check_whole("turns", flags.turns)
    prompts = prompts_or_code(flags.prompts)
    lanes = max(LEAST_LANES, flags.batch)
    model = load(
        flags.model, device=flags.device, dtype=flags.dtype, lanes=lanes, quantize=flags.quantize
    )
    contestants = contestants_for(model, flags.methods.split(",") if flags.methods else None)
    with stderr_console.status("taking turns …"):
        splits = time_splits(
            model,
            [(contestant.method, contestant.options) for contestant in contestants],
            prompts,
            batch=flags.batch,
            turns=flags.turns,
            max_tokens=flags.max_tokens,
        )
    if flags.as_json:
        print_json([split.as_dict() for split in splits])
    else:
        print_table(_split_table(splits))


def _split_table(splits: Sequence[TimeSplit]) -> Table:
    columns = ("method", "tokens/forward", "tokens/s", "forward", "rules", "host", "idle")
    table = Table(*columns, box=None, title="where the time goes")
    for split in splits:
        seconds = (split.forward, split.rules, split.host, split.idle)
        table.add_row(
            split.method,
            f"{split.tokens / split.forwards:.2f}",
            f"{split.tokens / split.total:.0f}",
            *(f"{part / split.total:.0%}" for part in seconds),
        )
    return table
