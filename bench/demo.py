"""The demonstration behind `make demo`: every method on the embedded models side by side, a trace, and a proof."""

from __future__ import annotations

from rich.console import Console

import forerun
from forerun.cli.compare import show as show_table
from forerun.cli.infill import picture
from forerun.cli.trace import show as show_trace
from forerun.evaluate.compare import Entry, as_dicts, compare, entries, machine
from forerun.evaluate.enumerate import standard_cases
from forerun.evaluate.prompts import CODE
from forerun.jobs import trace_lines

HOW = dict(max_tokens=48, temperature=0.0, rounds=2, batch=1)
HOLES = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append<|fill:3|>

    def pop(self):
        return<|fill:6|>
"""
SPECULATIVE = dict(method="speculative", draft="zoo:drafter", k=4)


def main() -> None:
    console = Console()
    model = forerun.load("zoo:ar")
    result = model.generate(CODE[0], max_tokens=64, **SPECULATIVE)
    console.print("[bold]zoo:ar[/], a small model of Python code, goes on:\n", highlight=False)
    console.print(CODE[0], end="", markup=False, highlight=False)
    console.print(result.text, style="green", markup=False, highlight=False)
    console.print("\n[bold]How speculative decoding wrote that[/], a line per forward of the model:\n")
    show_trace(trace_lines(result, 0, model.decode), console)
    console.print("\n[bold]zoo:any-subset[/] looks at both sides of a hole (forerun infill):\n", highlight=False)
    filler = forerun.load("zoo:any-subset")
    console.print(picture(filler.infill(HOLES)), highlight=False)
    console.print("\n[bold]What each method costs[/] (forerun compare):\n")
    with console.status("taking turns …"):
        diffusion, distilled, blocks = (forerun.load(name) for name in ("zoo:masked", "zoo:consistency", "zoo:block"))
        contestants = [
            *entries(model, ["ar", "lookup", "lookahead", "speculative"], "zoo:drafter"),
            Entry(model, "specdiff", {"draft": diffusion}),
            *entries(distilled, ["ar", "jacobi", "multiblock"]),
            *entries(filler, ["sequential", "assd"]),
            *(Entry(diffusion, method, {"cache": "dual"}) for method in ("stepwise", "ssd")),
            *entries(blocks, ["ar", "s2d2-exact"]),
            *(Entry(blocks, method, {"block": 16}) for method in ("block", "s2d2")),
        ]
        rows = compare(contestants, CODE[:4], judge=model, **HOW)
    show_table({"machine": machine(), "prompts": 4, **HOW, "rows": as_dicts(rows)}, console)
    console.print("\n[bold]Is it the model's own output?[/] Every random outcome enumerated on small models (forerun certify):\n")
    for method in ("ar", "lookup", "sequential"):
        with console.status(f"enumerating {method} …"):
            found = [case() for case in standard_cases(method)]
        worst = max(certificate.distance for certificate in found)
        verdict = "[green]holds[/]" if all(certificate.holds for certificate in found) else "[red]fails[/]"
        console.print(f"  {method}: {verdict}, {len(found)} cases, total variation from the reference at most {worst:.0e}")
    console.print("\nNext: .venv/bin/forerun --help")


if __name__ == "__main__":
    main()
