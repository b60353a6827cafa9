"""The constants behind `forerun plan` on this machine, and how well they foretell what they were
not made from:

    python bench/plan.py --shape qwen2.5-7b --out src/forerun/scale/measured/qwen2.5-7b.json
    python bench/plan.py --model PATH --text docs --out FILE         (a trained model, on a text)
    python bench/plan.py --measured FILE --counted docs/gpu.json --out FILE    (measured elsewhere)
    python bench/plan.py --publish FILE...                           (the tables of docs/scale.md)

Tokens per forward of random weights mean nothing for real text: --counted docs/gpu.json takes them
from trained models, as `bench/gpu.py` counted them. The check uses those that were measured with
the times.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from page import write_part

from forerun.api import load
from forerun.profile.shapes import random_model
from forerun.scale.measure import CONTEXT, ROWS, TRIAL, Bench, measure
from forerun.scale.plan import Load, Measured, row_at

ROOT = Path(__file__).parents[1]
METHODS: dict[str, dict[str, Any]] = {"ar": {}, "lookup": {}, "jacobi": {"block": 16}}
REAL_WAVES = 4  # requests of a real text end at different times: the last ones count less
IN_FLIGHT = (1, 8, 32)
COLUMNS = ("of", "method", "in flight", "prompt + answer", "tokens per forward")
COLUMNS += ("requests/s foretold", "measured", "off by")


def counted(file: str | None) -> dict[str, dict[str, Any]]:
    """Rows and tokens per forward of methods with their default options, and on which model."""
    if file is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for row in json.loads(Path(file).read_text())["methods"]:
        rows = {1: row["rows"]}
        told = {"rows": rows, "tokens_per_forward": row["tokens"], "text": row["model"]}
        found.setdefault(row["method"], told)
    return found


def random_bench(shape: str) -> Bench:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    kind = torch.bfloat16 if on_gpu else torch.float32
    return Bench(random_model(shape, device, kind, TRIAL.lanes, CONTEXT + max(ROWS)))


def real_bench(name: str, folder: str) -> Bench:
    """Prompts are pieces of a folder's pages."""
    model = load(name, lanes=TRIAL.lanes, max_context=CONTEXT + max(ROWS))
    pages = sorted(Path(folder).glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    return Bench(model, model.tokenizer.encode(text), f"{folder}/*.md")


def measured_here(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    methods = {name: METHODS.get(name, {}) for name in arguments.methods}
    if arguments.model:
        bench = real_bench(arguments.model, arguments.text)
        name = arguments.name or Path(arguments.model).name
        trial = replace(TRIAL, waves=REAL_WAVES)
    else:
        bench = random_bench(arguments.shape)
        name = arguments.shape
        trial = TRIAL
    found, checks = measure(bench, name, methods, trial)
    write(found, [check.as_dict() for check in checks], arguments)
    print(f"{time.perf_counter() - began:.0f} s")


def measured_elsewhere(arguments: argparse.Namespace) -> None:
    """Constants of another machine, with tokens per forward that were counted."""
    checks = json.loads(Path(arguments.measured).read_text())["checks"]
    write(Measured.read(arguments.measured), checks, arguments)


def write(measured: Measured, checks: Sequence[Any], arguments: argparse.Namespace) -> None:
    known = counted(arguments.counted)
    costs = [replace(one, **known.get(one.method, {})) for one in measured.methods]
    told = {**replace(measured, methods=costs).as_dict(), "checks": checks}
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(told, indent=1) + "\n")
    print(table([arguments.out]))


def table(files: Sequence[str]) -> str:
    """What was foretold beside what came."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for file in files:
        told = json.loads(Path(file).read_text())
        for check in told["checks"]:
            lines.append(
                f"| {told['shape']} | `{check['method']}` | {check['in_flight']} "
                f"| {check['prompt']} + {check['tokens']} | {check['tokens_per_forward']:.2f} "
                f"| {check['predicted']:.2f} | {check['measured']:.2f} | {check['error']:+.1%} |"
            )
    machines = {json.loads(Path(file).read_text())["machine"] for file in files}
    return "\n".join([*lines, "", f"`bench/plan.py`, {'; '.join(sorted(machines))}."])


def costs(file: str) -> str:
    """Break-evens, and what a million tokens cost."""
    measured = Measured.read(file)
    load = Load(1.0)
    columns = ("method", "in flight", "ms a step", "break-even", "tokens per forward")
    columns += ("tokens/s a GPU", "GPU hours a million tokens")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for method, batch in product(measured.methods, IN_FLIGHT):
        row = row_at(measured, method, load, batch)
        lines.append(
            f"| `{row.method}` | {batch} | {1e3 * row.step:.2f} | {row.break_even:.2f} "
            f"| {row.tokens_per_forward:.2f} | {row.tokens_per_second:,.0f} "
            f"| {row.gpu_hours:.3f} |"
        )
    asked = f"{load.prompt} + {load.tokens} tokens a request, {load.busy:.0%} busy"
    texts = sorted({one.text for one in measured.methods if one.text})
    told = (
        f"{measured.shape}, {asked}; {measured.machine}; tokens per forward of {', '.join(texts)}."
    )
    return "\n".join([*lines, "", told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen2.5-7b", help="random weights")
    parser.add_argument("--model", help="instead: a trained model")
    parser.add_argument("--name", help="of the model, in the table")
    parser.add_argument("--text", default="docs", help="a folder of pages, with --model")
    parser.add_argument("--methods", nargs="+", default=[*METHODS])
    parser.add_argument("--out", help="the file to write")
    parser.add_argument("--counted", metavar="FILE", help="tokens per forward, by bench/gpu.py")
    parser.add_argument("--measured", metavar="FILE", help="instead of measuring: what --out wrote")
    parser.add_argument("--publish", nargs="+", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.publish:
        page = ROOT / "docs" / "scale.md"
        write_part(page, costs(arguments.publish[0]), "<!-- costs -->", "<!-- end costs -->")
        write_part(page, table(arguments.publish), "<!-- plan -->", "<!-- end plan -->")
    elif arguments.out and arguments.measured:
        measured_elsewhere(arguments)
    elif arguments.out:
        measured_here(arguments)
    else:
        parser.error("--out FILE or --publish FILE")


if __name__ == "__main__":
    main()
