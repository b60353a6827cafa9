"""`forerun bench`: where the time of a forward and of decoding goes."""

from __future__ import annotations

import json
import math
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from forerun.cli.generate import aside, check_picture, load, read_prompts
from forerun.errors import BadOption
from forerun.parameters import check_whole


def numbers(name: str, text: str) -> list[int]:
    """'1,8,32' as whole numbers."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise BadOption(f"{name}={text!r} must be whole numbers, 1 or more, with commas between them.")
    return sorted({int(part) for part in parts})


def forward(
    shape: str,
    model: str | None,
    sizes: dict[str, str],
    device: str | None,
    dtype: str | None,
    turns: int,
    plot: str | None,
    as_json: bool,
) -> None:
    import torch

    from forerun.api import device_named, dtype_named
    from forerun.errors import unknown
    from forerun.evaluate.bench import SHAPES, draw, forwards, random_model
    from forerun.evaluate.compare import machine
    from forerun.evaluate.latency import knee

    wanted = {name: numbers(name, text) for name, text in sizes.items()}
    check_whole("turns", turns)
    check_picture(plot)
    if model is None and shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    where = device_named(device)
    kind = dtype_named(dtype, where) or torch.bfloat16
    lanes, context = max(wanted["batch"]), max(wanted["context"]) + max(wanted["tokens"])
    if model is not None:
        loaded = load(model, device=device, dtype=dtype, lanes=lanes)
    else:
        with aside.status(f"making {shape} …"):
            loaded = random_model(shape, where, kind, lanes, context)
    with Progress(console=aside, transient=True) as bar:
        task = bar.add_task("timing forwards", total=None)
        here, cells = forwards(
            loaded, wanted["tokens"], wanted["batch"], wanted["context"], turns=turns,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    if not cells:
        raise BadOption(f"nothing fits: '{loaded.name}' holds {loaded.context} tokens, less than the context and tokens asked for.")
    asked = math.prod(len(some) for some in wanted.values())
    if len(cells) < asked:
        aside.print(f"{asked - len(cells)} of {asked} left out: '{loaded.name}' holds {loaded.context} tokens.", style="yellow")
    if plot:
        draw(cells, plot)
    groups = {key: [c for c in cells if (c.batch, c.context) == key] for key in dict.fromkeys((c.batch, c.context) for c in cells)}
    knees = {key: knee({cell.tokens: cell.seconds for cell in own}) for key, own in groups.items()}
    evens = {cell: cell.seconds / own[0].seconds * own[0].tokens for own in groups.values() for cell in own}
    if as_json:
        report = {"model": loaded.name, "machine": machine(), **here}
        report["cells"] = [{**cell.as_dict(), "break_even": even} for cell, even in evens.items()]
        typer.echo(json.dumps(report | {"knees": [dict(batch=b, context=c, tokens=n) for (b, c), n in knees.items()]}))
        return
    times = {cell: f"{1e3 * cell.seconds:.3g} ({cell.times:.1f})" for cell in cells}
    Console().print(by_tokens("ms per forward (times its floor), by tokens", groups, times, knees))
    if len(wanted["tokens"]) > 1:
        title = f"break-even: tokens per forward to beat {wanted['tokens'][0]} at a time"
        Console().print(by_tokens(title, groups, {cell: f"{even:.2f}" for cell, even in evens.items()}))
    said = f"{here['bytes/s'] / 1e9:.1f} GB/s copied, {here['flop/s'] / 1e12:.2f} TFLOP/s multiplied; {loaded.name}; {machine()}"
    Console().print(said, style="dim", highlight=False)


def by_tokens(title: str, groups: dict[Any, list[Any]], said: dict[Any, str], knees: dict[Any, int] | None = None) -> Table:
    """A line for each batch and context, a column for each number of tokens."""
    counts = sorted({cell.tokens for own in groups.values() for cell in own})
    table = Table("batch", "context", *map(str, counts), *(["knee"] if knees else []), box=None, title=title)
    for (batch, context), own in groups.items():
        by = {cell.tokens: said[cell] for cell in own}
        last = [str(knees[batch, context])] if knees else []
        table.add_row(str(batch), str(context), *(by.get(n, "") for n in counts), *last)
    return table


def decode(model: str, methods: str | None, prompts: str | None, how: dict[str, Any], as_json: bool) -> None:
    from forerun.evaluate.bench import decoding
    from forerun.evaluate.compare import entries
    from forerun.evaluate.prompts import CODE

    for name in how:
        check_whole(name, how[name])
    texts = read_prompts(prompts) if prompts else CODE
    loaded = load(model, lanes=max(8, how["batch"]))
    chosen = entries(loaded, methods.split(",") if methods else None)
    with aside.status("taking turns …"):
        found = decoding(loaded, [(entry.method, entry.options) for entry in chosen], texts, **how)
    if as_json:
        typer.echo(json.dumps([split.as_dict() for split in found]))
        return
    table = Table("method", "tokens/forward", "tokens/s", "forward", "rules", "host", "idle", box=None, title="where the time goes")
    for split in found:
        shares = [f"{getattr(split, part) / split.total:.0%}" for part in ("forward", "rules", "host", "idle")]
        table.add_row(split.method, f"{split.tokens / split.forwards:.2f}", f"{split.tokens / split.total:.0f}", *shares)
    Console().print(table)
