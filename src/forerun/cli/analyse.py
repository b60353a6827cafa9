"""`forerun analyse`: what limits a method on a model."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from forerun.cli.generate import aside, load, read_prompts
from forerun.errors import unknown

ANALYSES = ("ssd-limit",)


def run(analysis: str, model: str, prompts: str | None, how: dict[str, Any], as_json: bool) -> None:
    from forerun.evaluate.analyse import ssd_limit
    from forerun.evaluate.prompts import CODE

    if analysis not in ANALYSES:
        raise unknown("analysis", analysis, ANALYSES)
    texts = read_prompts(prompts) if prompts else CODE
    loaded = load(model)
    with aside.status("decoding stepwise …"):
        found = ssd_limit(loaded, texts, **how)
    if as_json:
        typer.echo(json.dumps([{**limit.__dict__, "reduction": limit.reduction, "bound": limit.bound} for limit in found]))
        return
    tops = sorted({limit.top for limit in found})
    table = Table(
        "N", *(f"k = {top}" for top in tops), "bound", box=None, title="forwards saved, were any of the k likeliest a draft"
    )
    for drafts in sorted({limit.drafts for limit in found}):
        own = [limit for limit in found if limit.drafts == drafts]
        table.add_row(str(drafts), *(f"{limit.reduction:.1%}" for limit in own), f"{own[0].bound:.1%}")
    Console().print(table)
