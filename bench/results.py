"""Measure all methods once on the zoo, and write the table of docs/results.md and the picture of a
real trace: python bench/results.py [DATA]

DATA is a folder of .py files or a .jsonl[.xz] corpus: prompts are then held-out text of it, whose
true continuations are known. And with `--speed FILE` the table of docs/speed.md, from what
`bench/core.py --json FILE` measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo import SPECULATIVE
from page import write_tables

import forerun
from forerun.api import Prompt
from forerun.cli.compare import zoo_models
from forerun.cli.compare_report import Report, caption, cells
from forerun.cli.trace import trace as show_trace
from forerun.evaluate.compare import (
    ComparisonSettings,
    Contestant,
    compare,
    contestants_for,
)
from forerun.evaluate.prompts import CODE
from forerun.profile.machine import machine
from forerun.requests.traces import trace_lines
from forerun.train.data import held_out_windows

ROOT = Path(__file__).parents[1]
GIVEN_TOKENS = 64
SETTINGS = ComparisonSettings(max_tokens=64, rounds=3)

# Columns of `forerun compare` -> what the page calls them.
COLUMNS = {
    "model": "model",
    "method": "method",
    "guarantee": "guarantee",
    "tokens/forward": "tokens/forward",
    "tokens/s": "tokens/s",
    "over ar": "over ar",
    "speed-up": "over reference",
    "reference's": "same as reference",
    "perplexity": "perplexity",
    "first line right": "first line right",
}
Cells = dict[str, str]


def contestants(loaded: dict[str, forerun.Model]) -> list[Contestant]:
    """Of every family its reference and what saves forwards, with the options that pay on a CPU."""
    ar = loaded["zoo:ar"]
    consistency = loaded["zoo:consistency"]
    masked = loaded["zoo:masked"]
    any_subset = loaded["zoo:any-subset"]
    block = loaded["zoo:block"]
    return [
        *contestants_for(ar, ["ar", "auto", "lookup"]),
        Contestant(ar, "speculative", {"draft": "zoo:drafter"}),
        *(Contestant(ar, "specdiff", {"draft": draft}) for draft in ("auto", block, masked)),
        *contestants_for(consistency, ["ar", "jacobi", "multiblock"]),
        *contestants_for(any_subset, ["sequential", "assd"]),
        *(Contestant(masked, method, {"cache": "dual"}) for method in ("stepwise", "threshold")),
        Contestant(masked, "ssd", {"cache": "dual", "tree": "chain"}),
        *contestants_for(block, ["ar", "lookup", "s2d2-exact"]),
        *(
            Contestant(block, method, {"block": 16})
            for method in ("s2d2", "block-stepwise", "block")
        ),
        Contestant(block, "block-ssd", {"block": 16, "tree": "chain"}),
    ]


def measured(data: str | None, count: int) -> Report:
    """All contestants on the same prompts, as a report."""
    loaded = {name: forerun.load(name) for name in zoo_models()}
    prompts: list[Prompt] = [*CODE]
    truths = None
    if data is not None:
        length = GIVEN_TOKENS + SETTINGS.max_tokens
        windows = held_out_windows(data, loaded["zoo:ar"].tokenizer, count, length)
        prompts = windows[:, :GIVEN_TOKENS].tolist()
        truths = windows[:, GIVEN_TOKENS:].tolist()
    rows = compare(contestants(loaded), prompts, SETTINGS, judge=loaded["zoo:ar"], truths=truths)
    return Report(machine=machine(), prompts=len(prompts), rows=rows, **asdict(SETTINGS))


def table(rows: list[Cells]) -> str:
    lines = [f"| {' | '.join(COLUMNS.values())} |", "|---" * len(COLUMNS) + "|"]
    previous = None
    for row in rows:
        model = f"`{row['model']}`" if row["model"] != previous else ""
        others = [row[column] for column in COLUMNS if column != "model"]
        lines.append(f"| {' | '.join([model, *others])} |")
        previous = row["model"]
    return "\n".join(lines)


def speed(report: dict[str, Any]) -> str:
    """The table of docs/speed.md."""
    lines = [
        "| on the same weights and prompts, float32 | tokens/s | least to most | ratio |",
        "|---|---|---|---|",
    ]
    previous = None
    for row in report["rows"]:
        if row["what"] != previous:
            lines.append(f"| **{row['what']}** | | | |")
            previous = row["what"]
        lines.append(
            f"| {row['who']} | {row['rate']:.1f} | {row['least']:.1f} to {row['most']:.1f} | "
            f"{row['ratio']:.2f} |"
        )
    facts = "; ".join(f"{name}: {_plain(value)}" for name, value in report["facts"].items())
    return "\n".join(
        [*lines, "", f"`make bench` on {report['machine']}, medians of turns. {facts}."]
    )


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{number} at {size} tokens" for size, number in value.items())
    return str(value)


def draw_trace() -> None:
    model = forerun.load("zoo:ar")
    result = model.generate(CODE[0], max_tokens=64, **SPECULATIVE)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as file:
        file.writelines(json.dumps(line) + "\n" for line in trace_lines(result, 0, model.decode))
    show_trace(file.name, str(ROOT / "docs" / "trace.svg"), as_json=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="?")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--speed", type=Path, help="write only docs/speed.md, from this file")
    arguments = parser.parse_args()
    if arguments.speed:
        write_tables("speed.md", speed(json.loads(arguments.speed.read_text())))
        return
    report = measured(arguments.data, arguments.count)
    rows = table([cells(row) for row in report.rows])
    write_tables("results.md", f"{rows}\n\n`make results`: {caption(report)}.")
    draw_trace()


if __name__ == "__main__":
    main()
