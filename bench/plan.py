"""The constants behind `forerun plan` for a shape on this machine, and how well they foretell
what they were not made from:

    python bench/plan.py --shape qwen2.5-7b --out src/forerun/scale/measured/qwen2.5-7b.json
    python bench/plan.py --shape qwen2.5-7b --out FILE --counted docs/gpu.json

Tokens per forward of random weights mean nothing for real text: --counted takes them from trained
models, as `bench/gpu.py` counted them. The check uses those that were measured with the times.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from forerun.profile.shapes import random_model
from forerun.scale.measure import CONTEXT, ROWS, TRIAL, measure

METHODS = {"ar": {}, "lookup": {}, "jacobi": {"block": 16}}


def counted(file: str | None) -> dict[str, tuple[float, str]]:
    """Tokens per forward of methods with their default options, and on which model."""
    if file is None:
        return {}
    found: dict[str, tuple[float, str]] = {}
    for row in json.loads(Path(file).read_text())["methods"]:
        found.setdefault(row["method"], (row["tokens"], row["model"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--out", required=True)
    parser.add_argument("--counted")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    kind = torch.bfloat16 if on_gpu else torch.float32
    lanes = max(TRIAL.checked)
    model = random_model(arguments.shape, device, kind, lanes, CONTEXT + max(ROWS))
    measured, checks = measure(model, arguments.shape, METHODS)
    known = counted(arguments.counted)
    methods = []
    for one in measured.methods:
        tokens, where = known.get(one.method, (one.tokens_per_forward, one.text))
        methods.append(replace(one, tokens_per_forward=tokens, text=where))
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
    print(f"\n`bench/plan.py`, random weights of {arguments.shape}, {measured.machine}.")


if __name__ == "__main__":
    main()
