"""Methods over their references on small trained models, in seconds: tokens per second on one GPU
at batch 1, 8 and 32, in float32 and bfloat16, and whether exact methods write the same text.

    python bench/gpu_methods.py --json FILE [--model DIR ...]      (needs a CUDA device)
    python bench/gpu_methods.py --publish FILE                    (writes docs/gpu-methods.md)

`--model` adds causal checkpoints, such as SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from page import write_tables

import forerun
from forerun.evaluate.prompts import CODE

TOKENS = 96
TURNS = 3
BATCHES = (1, 8, 32)
CAUSAL: list[tuple[str, dict[str, Any]]] = [
    ("lookup", {}),
    ("jacobi", {}),
    ("multiblock", {}),
    ("lookahead", {}),
]
# model: the reference, and the methods beside it
ZOO: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "zoo:ar": (
        "ar",
        [
            ("lookup", {}),
            ("lookahead", {}),
            ("speculative", {"draft": "zoo:drafter"}),
            ("specdiff", {"draft": "zoo:block"}),
        ],
    ),
    "zoo:consistency": ("ar", CAUSAL),
    "zoo:any-subset": ("sequential", [("assd", {}), ("assd", {"ahead": "every"})]),
    "zoo:block": ("ar", [("s2d2-exact", {}), ("s2d2-exact", {"ahead": "every"})]),
    "zoo:masked": ("stepwise", [("ssd", {}), ("ssd", {"tree": "chain"})]),
}


def timed(
    model: forerun.Model, method: str, options: dict[str, Any], batch: int
) -> tuple[float, list[forerun.Result]]:
    """Seconds of the median turn, and what was written."""
    prompts = [CODE[i % len(CODE)] for i in range(batch)]
    seconds = []
    for _ in range(TURNS + 2):  # the first two capture
        torch.cuda.synchronize()
        began = time.perf_counter()
        results = model.generate_all(
            prompts, method=method, max_tokens=TOKENS, ignore_eos=True, **options
        )
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:]), results


def measure(name: str, reference: str, methods: list[tuple[str, dict[str, Any]]], dtype: str):
    """One row for each method and batch."""
    model = forerun.load(name, device="cuda", dtype=dtype, lanes=max(BATCHES), max_context=1024)
    rows = []
    for batch in BATCHES:
        slow, expected = timed(model, reference, {}, batch)
        for method, options in [(reference, {}), *methods]:
            taken, results = (slow, expected)
            if method != reference:
                taken, results = timed(model, method, options, batch)
            tokens = sum(result.stats.tokens for result in results)
            pairs = zip(results, expected)
            row = dict(
                model=Path(name).name,
                dtype=dtype,
                batch=batch,
                method=", ".join([method, *(f"{k} = {v}" for k, v in options.items())]),
                speed=tokens / taken,
                over=slow / taken,
                found=tokens / sum(result.stats.forwards for result in results),
                same=sum(one.token_ids == other.token_ids for one, other in pairs) / batch,
            )
            print(row, flush=True)
            rows.append(row)
    model.close()
    return rows


def table(report: dict[str, Any]) -> str:
    """Rows are methods, columns are batches."""
    lines = [
        "| model, numbers | method | tokens per forward | tokens/s at batch 1, 8, 32 "
        "| over the first row | same text |",
        "|---|---|---|---|---|---|",
    ]
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        cells.setdefault((row["model"], row["dtype"], row["method"]), []).append(row)
    for (model, dtype, method), rows in cells.items():
        speeds = ", ".join(f"{row['speed']:,.0f}" for row in rows)
        over = ", ".join(f"{row['over']:.2f}" for row in rows)
        found = statistics.mean(row["found"] for row in rows)
        same = min(row["same"] for row in rows)
        cell = f"{model}, {dtype} | `{method}` | {found:.2f} | {speeds} | {over} | {same:.0%}"
        lines.append(f"| {cell} |")
    made = (
        f"`python bench/gpu_methods.py` on one {report['device']}, torch {report['torch']}, "
        f"{report['date']}; greedy, {TOKENS} tokens after code, "
        f"the median of {TURNS} turns."
    )
    return "\n".join([*lines, "", made])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--publish", type=Path, help="write the page from this file")
    parser.add_argument("--model", nargs="*", default=[], help="causal checkpoints to add")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--only", help="only models whose name holds this")
    arguments = parser.parse_args()
    if arguments.publish:
        report = json.loads(arguments.publish.read_text())
        write_tables("gpu-methods.md", table(report))
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    models = {**ZOO, **dict.fromkeys(arguments.model, ("ar", CAUSAL))}
    report = dict(
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        date=date.today().isoformat(),
        rows=[],
    )
    for name, (reference, methods) in models.items():
        if arguments.only and arguments.only not in name:
            continue
        for dtype in arguments.dtype:
            report["rows"] += measure(name, reference, methods, dtype)
            if arguments.json:
                arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
