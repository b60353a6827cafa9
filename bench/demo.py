"""The demonstration behind `make demo`: every method on the embedded models side by side, a trace,
and a proof."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

import forerun
from forerun.certify.cases import broad_cases
from forerun.cli.compare_report import Report
from forerun.cli.compare_report import show as show_table
from forerun.cli.infill import picture
from forerun.cli.trace import read_commit
from forerun.cli.trace import show as show_trace
from forerun.evaluate.compare import (
    ComparisonSettings,
    Contestant,
    compare,
    contestants_for,
)
from forerun.evaluate.prompts import CODE
from forerun.profile.machine import machine
from forerun.requests.traces import trace_lines

SETTINGS = ComparisonSettings(max_tokens=48, rounds=2)
HOLES = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append<|fill:3|>

    def pop(self):
        return<|fill:6|>
"""
SPECULATIVE: dict[str, Any] = dict(method="speculative", draft="zoo:drafter", k=4)


def main() -> None:
    console = Console()
    model = forerun.load("zoo:ar")
    any_subset = forerun.load("zoo:any-subset")
    show_decoding(model, console)
    console.print(
        "\n[bold]zoo:any-subset[/] looks at both sides of a hole (forerun infill):\n",
        highlight=False,
    )
    console.print(picture(any_subset.infill(HOLES)), highlight=False)
    show_costs(model, any_subset, console)
    show_proofs(console)
    console.print("\nNext: .venv/bin/forerun --help")


def show_decoding(model: forerun.Model, console: Console) -> None:
    """A text that speculative decoding writes, and its trace."""
    result = model.generate(CODE[0], max_tokens=64, **SPECULATIVE)
    console.print("[bold]zoo:ar[/], a small model of Python code, goes on:\n", highlight=False)
    console.print(CODE[0], end="", markup=False, highlight=False)
    console.print(result.text, style="green", markup=False, highlight=False)
    console.print(
        "\n[bold]How speculative decoding wrote that[/], one line per forward of the model:\n"
    )
    lines = trace_lines(result, 0, model.decode)
    show_trace([read_commit(line) for line in lines], console)


def show_costs(model: forerun.Model, any_subset: forerun.Model, console: Console) -> None:
    """Methods of every family, on the same prompts."""
    console.print("\n[bold]What each method costs[/] (forerun compare):\n")
    prompts = CODE[:4]
    with console.status("taking turns …"):
        masked = forerun.load("zoo:masked")
        consistency = forerun.load("zoo:consistency")
        block = forerun.load("zoo:block")
        contestants = [
            *contestants_for(model, ["ar", "lookup", "lookahead", "speculative"], "zoo:drafter"),
            Contestant(model, "specdiff", {"draft": masked}),
            *contestants_for(consistency, ["ar", "jacobi", "multiblock"]),
            *contestants_for(any_subset, ["sequential", "assd"]),
            *(Contestant(masked, method, {"cache": "dual"}) for method in ("stepwise", "ssd")),
            *contestants_for(block, ["ar", "s2d2-exact"]),
            *(Contestant(block, method, {"block": 16}) for method in ("block", "s2d2")),
        ]
        rows = compare(contestants, prompts, SETTINGS, judge=model)
    report = Report(machine=machine(), prompts=len(prompts), rows=rows, **asdict(SETTINGS))
    show_table(report, console)


def show_proofs(console: Console) -> None:
    """Some methods, enumerated."""
    console.print(
        "\n[bold]Is it the model's own output?[/] Three methods, every random outcome enumerated "
        "on small models (forerun certify):\n"
    )
    for method in ("ar", "lookup", "sequential"):
        with console.status(f"enumerating {method} …"):
            certificates = [case() for case in broad_cases(method)]
        worst = max(certificate.distance for certificate in certificates)
        holds = all(certificate.holds for certificate in certificates)
        verdict = "[green]holds[/]" if holds else "[red]fails[/]"
        console.print(
            f"  {method}: {verdict}, {len(certificates)} cases, total variation from the reference "
            f"at most {worst:.0e}"
        )


if __name__ == "__main__":
    main()
