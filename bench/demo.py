"""The demonstration behind `make demo`: decode with every method on the embedded models, compare, prove, and look at a trace."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table

import forerun
from forerun.cli.trace import show
from forerun.evaluate.enumerate import standard_cases
from forerun.jobs import trace_lines

PROMPTS = [
    """import os


def read_lines(path):
    with open(path) as f:
        return f.read().splitlines()


def write_lines(path, lines):""",
    """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):""",
    """import argparse


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--verbose", action="store_true", help="Verbose output")
    parser.add_argument("--""",
]
METHODS: dict[str, dict] = {"ar": {}, "lookup": {}, "speculative": {"draft": "zoo:drafter", "k": 4}}
ROUNDS = 3


def main() -> None:
    console = Console()
    model = forerun.load("zoo:ar")
    results: dict[str, list] = {}
    speeds: dict[str, list[float]] = {method: [] for method in METHODS}
    with console.status("decoding …"):
        for _ in range(ROUNDS):  # methods take turns, so that noise falls on all of them
            for method, options in METHODS.items():
                results[method] = [model.generate(prompt, method=method, max_tokens=64, **options) for prompt in PROMPTS]
                seconds = sum(r.stats.seconds for r in results[method])
                speeds[method].append(sum(r.stats.tokens for r in results[method]) / seconds)
    console.print("\n[bold]zoo:ar[/], a small model of Python code, goes on:\n", highlight=False)
    console.print(PROMPTS[0], end="", markup=False, highlight=False)
    console.print(results["ar"][0].text, style="green", markup=False, highlight=False)
    console.print("\n[bold]What it cost[/], three prompts at temperature 0:")
    console.print(costs(results, speeds))
    console.print("\n[bold]How speculative decoding did it[/], a line per forward of the target:\n")
    show(trace_lines(results["speculative"][0], 0, model.decode), console)
    console.print("\n[bold]Is it the model's own output?[/] Every random outcome enumerated on small models:")
    for method in ("ar", "lookup"):
        with console.status(f"enumerating {method} …"):
            found = [case() for case in standard_cases(method)]
        worst = max(certificate.distance for certificate in found)
        verdict = "[green]holds[/]" if all(certificate.holds for certificate in found) else "[red]fails[/]"
        console.print(f"  {method}: {verdict}, {len(found)} cases, total variation from the reference at most {worst:.0e}")
    console.print("\nNext: forerun --help, forerun methods, forerun certify --method speculative")


def costs(results: dict[str, list], speeds: dict[str, list[float]]) -> Table:
    table = Table(
        "method", "guarantee", "forwards", "of the draft", "tokens/forward", "tokens/s (least to most)", "equals ar", box=None
    )
    reference = [r.token_ids for r in results["ar"]]
    for method, found in results.items():
        tokens, forwards = sum(r.stats.tokens for r in found), sum(r.stats.forwards for r in found)
        speed = f"{statistics.median(speeds[method]):.0f} ({min(speeds[method]):.0f} to {max(speeds[method]):.0f})"
        same = "yes" if [r.token_ids for r in found] == reference else "NO"
        drafts = sum(r.stats.draft_forwards for r in found)
        table.add_row(method, found[0].guarantee, str(forwards), str(drafts), f"{tokens / forwards:.2f}", speed, same)
    return table


if __name__ == "__main__":
    main()
