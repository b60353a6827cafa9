"""The numbers of docs/masked.md:  python bench/masked.py DATA [--count N]

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out documents, 64 more are decoded, at
batch 1. Writes docs/masked.json and the tables into the page.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import forerun
from forerun import zoo
from forerun.evaluate.compare import machine
from forerun.train.data import held_out_windows

DOCS = Path(__file__).parents[1] / "docs"


def measure(model: Any, prompts: list[list[int]], **how: Any) -> dict[str, Any]:
    began = time.perf_counter()
    results = [model.generate(prompt, max_tokens=64, ignore_eos=True, **how) for prompt in prompts]
    seconds = time.perf_counter() - began
    tokens, forwards = sum(r.stats.tokens for r in results), sum(r.stats.forwards for r in results)
    lengths = [r.stats.acceptance_length for r in results if r.stats.acceptance_length is not None]
    return {
        **{key: getattr(value, "name", value) for key, value in how.items()},
        "tokens/forward": tokens / forwards,
        "draft forwards": sum(r.stats.draft_forwards for r in results),
        "accepted": sum(lengths) / len(lengths) if lengths else None,
        "tokens/s": tokens / seconds,
        "outputs": [r.token_ids for r in results],
    }


def self_speculation(prompts: list[list[int]]) -> list[dict[str, Any]]:
    model = forerun.load("zoo:masked")
    rows = []
    for cache in ("none", "dual"):
        own = dict(block=8, cache=cache, refresh=8)
        reference = measure(model, prompts, method="stepwise", **own)
        found = [measure(model, prompts, method="ssd", drafts=n, **own) for n in (3, 4, 5)]
        rows += [{**row, "same": row["outputs"] == reference["outputs"], "speed-up": row["tokens/s"] / reference["tokens/s"]}
                 for row in (reference, *found)]  # fmt: skip
    for how in (dict(method="threshold"), dict(method="steps", steps=4), dict(method="entropy-bounded")):
        rows.append(measure(model, prompts, block=8, **how))
    return rows


def drafting(prompts: list[list[int]]) -> list[dict[str, Any]]:
    target = forerun.load("zoo:ar")
    rows = []
    for temperature in (0.0, 1.0):
        plain = measure(target, prompts, method="ar", temperature=temperature)
        found = [plain]
        for name in ("zoo:masked", "zoo:any-subset"):
            draft = forerun.load(name, lanes=1)
            for k in (4, 8, 15, 20):
                for steps in (1, 2, 4):
                    how = dict(method="specdiff", draft=draft, k=k, steps=steps, temperature=temperature)
                    found.append(measure(target, prompts, **how))
        found.append(measure(target, prompts, method="speculative", draft="zoo:drafter", k=8, temperature=temperature))
        found.append(measure(target, prompts, method="lookup", temperature=temperature))
        rows += [{**row, "speed-up": row["tokens/s"] / plain["tokens/s"]} for row in found]
    return rows


def tables(report: dict[str, Any]) -> str:
    lines = ["| method | cache | N | tokens/forward | tokens/s | speed-up | same output |", "|---|---|---|---|---|---|---|"]
    for row in report["ssd"]:
        same = "" if "same" not in row else "yes" if row["same"] else "no"
        up = f"{row['speed-up']:.2f}" if "speed-up" in row else ""
        lines.append(
            f"| {row['method']} | {row.get('cache', 'none')} | {row.get('drafts', '')} | {row['tokens/forward']:.2f} "
            f"| {row['tokens/s']:.0f} | {up} | {same} |"
        )
    head = ("temperature", "method", "drafter", "γ", "T", "tokens/target forward", "draft forwards", "tokens/s", "over ar")
    lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in report["specdiff"]:
        lines.append(
            f"| {row['temperature']:g} | {row['method']} | {row.get('draft', '')} | {row.get('k', '')} | {row.get('steps', '')} "
            f"| {row['tokens/forward']:.2f} | {row['draft forwards']} | {row['tokens/s']:.0f} | {row['speed-up']:.2f} |"
        )
    return "\n".join([*lines, "", f"`python bench/masked.py DATA --count {report['count']}`: {report['machine']}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=8)
    arguments = parser.parse_args()
    tokenizer = zoo.tokenizer()
    prompts = held_out_windows(arguments.data, tokenizer, arguments.count, 64).tolist()
    report: dict[str, Any] = {"machine": machine(), "count": arguments.count, "ssd": self_speculation(prompts)}
    report["specdiff"] = drafting(prompts)
    for row in (*report["ssd"], *report["specdiff"]):
        row.pop("outputs")
    (DOCS / "masked.json").write_text(json.dumps(report, indent=1))
    page = DOCS / "masked.md"
    before, rest = page.read_text().split("<!-- table -->", 1)
    page.write_text(f"{before}<!-- table -->\n\n{tables(report)}\n\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}")


if __name__ == "__main__":
    main()
