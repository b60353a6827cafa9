"""`forerun analyse`: what limits a method on a model, and how a block model decodes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from forerun.cli.generate import aside, check_picture, load, read_prompts
from forerun.errors import BadOption, unknown
from forerun.parameters import check_whole


def run(analysis: str, model: str | None, prompts: str | None, how: dict[str, Any], more: dict[str, Any], as_json: bool) -> None:
    if analysis not in ANALYSES:
        raise unknown("analysis", analysis, ANALYSES)
    from forerun.evaluate.prompts import CODE

    check_picture(more["plot"])
    if more["plot"] and analysis not in DRAWN:
        raise BadOption(f"plot={more['plot']!r}: there is no picture of {analysis}, only of {' and '.join(DRAWN)}.")
    texts = read_prompts(prompts) if prompts else CODE
    default, default_block, show = ANALYSES[analysis]
    found = show(model or default, texts, {**how, "block": default_block if how["block"] is None else how["block"]}, more, as_json)
    if as_json:
        typer.echo(json.dumps(_finite(found)))


def _finite(found: Any) -> Any:
    """Numbers that are none, such as the error of a single sample, as JSON knows them."""
    if isinstance(found, dict):
        return {key: _finite(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def ssd_limit(model: str, texts: list[Any], how: dict[str, Any], more: dict[str, Any], quiet: bool) -> Any:
    from forerun.evaluate.analyse import ssd_limit

    loaded = load(model)
    with aside.status("decoding stepwise …"):
        found = ssd_limit(loaded, texts, block=how["block"], cache=more["cache"], max_tokens=how["max_tokens"])
    tops = sorted({limit.top for limit in found})
    table = Table(
        "N", *(f"k = {top}" for top in tops), "bound", box=None, title="forwards saved, were any of the k likeliest a draft"
    )
    for drafts in sorted({limit.drafts for limit in found}):
        own = [limit for limit in found if limit.drafts == drafts]
        table.add_row(str(drafts), *(f"{limit.reduction:.1%}" for limit in own), f"{own[0].bound:.1%}")
    show(table, quiet)
    return [{**limit.__dict__, "reduction": limit.reduction, "bound": limit.bound} for limit in found]


def ar_ness(model: str, texts: list[Any], how: dict[str, Any], more: dict[str, Any], quiet: bool) -> Any:
    from forerun.evaluate.blocks import check_fills_blocks, draw_habits, habits

    loaded = load(model)
    check_fills_blocks(loaded, "ar-ness")
    own = dict(max_tokens=how["max_tokens"], temperature=how["temperature"], ignore_eos=True, logprobs=0, block=how["block"])
    found = []
    for name, options in (
        ("static", dict(method="block-stepwise")),
        ("dynamic", dict(method="block")),
        ("s2d2", dict(method="s2d2")),
    ):
        with aside.status(f"decoding, {name} …"):
            found.append(habits(loaded.generate(texts, **own, **options), name, how["block"]))
    ks = range(1, len(found[0].local) + 1)
    table = Table("decoding", "AR-ness", *(f"@{k}" for k in ks), box=None, title="how nearly from left to right: 1 is entirely")
    sure = Table("decoding", "", *(f"{10 * i}%" for i in range(10)), box=None, title="from a block's first forward to its last")
    for one in found:
        table.add_row(one.how, "local", *(f"{x:.2f}" for x in one.local))
        table.add_row("", "global", *(f"{x:.2f}" for x in one.overall))
        sure.add_row(one.how, "confidence", *("" if x is None else f"{x:.2f}" for x in one.confidence))
        sure.add_row("", "tokens/forward", *("" if x is None else f"{x:.1f}" for x in one.tokens_per_forward))
    show(table, quiet)
    show(sure, quiet)
    if more["plot"]:
        draw_habits(found, more["plot"])
    return [asdict(one) for one in found]


def estimators(model: str, texts: list[Any], how: dict[str, Any], more: dict[str, Any], quiet: bool) -> Any:
    from forerun.evaluate.blocks import estimator_errors

    loaded = load(model)
    with aside.status("verifying every draft …"):
        found = estimator_errors(loaded, texts, **how)
    table = Table("estimator", "strength", "mean error", "spread", "mean absolute", box=None, title="expected less accepted tokens")
    for one in found:
        table.add_row(one.estimator, f"{one.strength:g}", f"{one.bias:+.2f}", f"{one.spread:.2f}", f"{one.absolute:.2f}")
    show(table, quiet)
    return [asdict(one) for one in found]


def frontier(model: str, texts: list[Any], how: dict[str, Any], more: dict[str, Any], quiet: bool) -> Any:
    from forerun.evaluate.blocks import draw, frontier, ways
    from forerun.train.data import held_out_windows

    given = 64
    check_whole("count", more["count"])
    loaded, judge = load(model, lanes=more["count"]), load(more["judge"], lanes=1)
    windows = held_out_windows(more["data"], loaded.tokenizer, more["count"], given + how["max_tokens"])
    with Progress(console=aside, transient=True) as bar:
        task = bar.add_task(f"completing {more['count']} texts", total=None)
        found = frontier(
            loaded, judge, windows, ways(how["block"]), given=given, temperature=how["temperature"],
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    table = Table("decoding", "tokens/forward", "nats", "entropy", "exact line", box=None, title=f"blocks of {how['block']}")
    for point in found:
        table.add_row(point.how, *map(str, (point.tokens_per_forward, point.nats, point.entropy, point.exact)))
    show(table, quiet)
    if more["plot"]:
        draw({f"blocks of {how['block']}": found}, more["plot"])
    return [point.as_dict() for point in found]


def show(table: Table, quiet: bool) -> None:
    if not quiet:
        Console().print(table)


# For each analysis the model and the block size that it takes unless told, and the function that runs and prints it.
ANALYSES: dict[str, tuple[str, int, Callable[..., Any]]] = {
    "ssd-limit": ("zoo:masked", 8, ssd_limit),
    "ar-ness": ("zoo:block", 16, ar_ness),
    "estimators": ("zoo:block", 16, estimators),
    "frontier": ("zoo:block", 16, frontier),
}
DRAWN = ("ar-ness", "frontier")
