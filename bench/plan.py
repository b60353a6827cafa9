"""The constants behind `forerun plan` for a shape on this machine, and how well they foretell
what they were not made from:

    python bench/plan.py --shape qwen2.5-7b --out src/forerun/scale/measured/qwen2.5-7b.json
    python bench/plan.py --shape qwen2.5-7b --out FILE --counted docs/gpu.json
    python bench/plan.py --out FILE --counted docs/gpu.json --page docs/gpu.json   (no GPU needed)

Tokens per forward of random weights mean nothing for real text: --counted takes them from trained
models, as `bench/gpu.py` counted them. The check uses those that were measured with the times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.profile.shapes import SHAPES, random_model
from forerun.scale.measure import CONTEXT, ROWS, TRIAL, Check, measure
from forerun.scale.plan import PLAIN, Measured, MethodCost, step_seconds
from forerun.scale.training import weights_of

STEPS = 96  # of the runs on docs/gpu.md
METHODS = {"ar": {}, "lookup": {}, "jacobi": {"block": 16}}


def counted(file: str | None) -> dict[str, dict[str, Any]]:
    """Rows and tokens per forward of methods with their default options, and on which model."""
    if file is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for row in json.loads(Path(file).read_text())["methods"]:
        told = {"rows": row["rows"], "tokens_per_forward": row["tokens"], "text": row["model"]}
        found.setdefault(row["method"], told)
    return found


def from_page(file: str) -> tuple[Measured, list[Check]]:
    """The constants from what docs/gpu.md shows: forwards by rows, and for each method what 96
    steps took outside the forward with 1, 8 and 32 sequences. Prompts were in the slots already.
    The check is of the sum: forwards that were timed alone, and a line through what is outside."""
    page = json.loads(Path(file).read_text())
    shape = SHAPES["qwen2.5-7b"]
    slot = 2 * shape.layers * shape.key_heads * (shape.hidden // shape.heads) * 2
    base = Measured(
        shape="qwen2.5-7b",
        machine=f"{page['device']}, torch {page['torch']}, {page['date']}",
        chain={row["tokens"]: row["seconds"] for row in page["forward"]["chain"]},
        context=page["forward"]["chain"][0]["context"],
        bytes_per_second=page["machine"]["bytes/s"],
        bytes_per_slot=slot,
        weight_bytes=2 * weights_of(shape),
        memory_bytes=139 * 2**30,
        methods=(),
    )
    costs = []
    checks = []
    for method, rows in (("ar", 1.0), ("lookup", 1.0), ("jacobi", 16.0)):
        runs = [row for row in page["shares"] if row["method"] == method]
        outside = [(row["total"] - row["forward"]) / STEPS for row in runs]
        slope, fixed = np.polyfit([row["batch"] for row in runs], outside, 1)
        text = "" if method == PLAIN else "random tokens"
        cost = MethodCost(method, rows, 1.0, float(fixed), float(slope), text)
        costs.append(cost)
        for row in runs:
            if row["batch"] > 1:  # alone, the GPU had not come to speed
                slots = base.context + STEPS / 2
                seconds = STEPS * step_seconds(base, cost, row["batch"], slots)
                told = (row["batch"] / seconds, row["batch"] / row["total"])
                checks.append(Check(method, row["batch"], *told))
    return replace(base, methods=costs), checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--out", required=True)
    parser.add_argument("--counted")
    parser.add_argument("--page", help="instead of measuring: docs/gpu.json")
    arguments = parser.parse_args()
    if arguments.page:
        publish(*from_page(arguments.page), arguments)
        return
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    kind = torch.bfloat16 if on_gpu else torch.float32
    lanes = max(TRIAL.checked)
    model = random_model(arguments.shape, device, kind, lanes, CONTEXT + max(ROWS))
    publish(*measure(model, arguments.shape, METHODS), arguments)


def publish(measured: Measured, checks: Sequence[Check], arguments: argparse.Namespace) -> None:
    known = counted(arguments.counted)
    methods = []
    for one in measured.methods:
        methods.append(replace(one, **known.get(one.method, {})))
    told = asdict(replace(measured, methods=methods))
    told["checks"] = [check.as_dict() for check in checks]
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments.out).write_text(json.dumps(told, indent=1))
    print("| method | in flight | requests/s foretold | measured | off by |")
    print("|---|---|---|---|---|")
    for check in checks:
        print(
            f"| `{check.method}` | {check.in_flight} | {check.predicted:.2f} "
            f"| {check.measured:.2f} | {check.error:+.1%} |"
        )
    print(f"\n`bench/plan.py`, random weights of {measured.shape}, {measured.machine}.")


if __name__ == "__main__":
    main()
