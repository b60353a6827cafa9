"""Write what the README shows, the table from `forerun compare` and the picture from a real trace:  python bench/readme.py [DATA]

DATA is a folder of .py files or a .jsonl[.xz] corpus: prompts are then held-out text of it, whose true ends are known. And with
`--speed FILE` the table of docs/speed.md, from what `bench/core.py --json FILE` measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from demo import SPECULATIVE
from page import write_tables

import forerun
from forerun.cli.compare import caption, cells, zoo_models
from forerun.cli.trace import run as show_trace
from forerun.evaluate.compare import Entry, as_dicts, compare, entries, machine
from forerun.evaluate.prompts import CODE
from forerun.jobs import trace_lines
from forerun.train.data import held_out_windows

ROOT = Path(__file__).parents[1]
START, END = "<!-- table: bench/readme.py writes this part -->", "<!-- end of table -->"
COLUMNS = (
    "model",
    "method",
    "guarantee",
    "tokens/forward",
    "tokens/s",
    "speed-up",
    "over ar",
    "reference's",
    "perplexity",
    "exact",
)
GIVEN, HOW = 64, dict(max_tokens=64, temperature=0.0, rounds=3, batch=1)


def contestants(loaded: dict[str, Any]) -> list[Entry]:
    """Of every family its reference and what saves forwards, with the options that pay on a CPU."""
    ar, consistency, masked, filler, blocks = (
        loaded[f"zoo:{name}"] for name in ("ar", "consistency", "masked", "any-subset", "block")
    )
    return [
        *entries(ar, ["ar", "lookup", "speculative"], "zoo:drafter"),
        *(Entry(ar, "specdiff", {"draft": draft}) for draft in (masked, blocks)),
        *entries(consistency, ["ar", "jacobi", "multiblock"]),
        *entries(filler, ["sequential", "assd"]),
        *(Entry(masked, method, {"cache": "dual"}) for method in ("stepwise", "threshold")),
        Entry(masked, "ssd", {"cache": "dual", "tree": "chain"}),
        *entries(blocks, ["ar", "lookup"]),
        Entry(blocks, "s2d2-exact", {"k": 4}),
        *(Entry(blocks, method, {"block": 16}) for method in ("s2d2", "block-stepwise", "block")),
        Entry(blocks, "block-ssd", {"block": 16, "tree": "chain"}),
    ]


def compared(data: str | None, count: int) -> dict[str, Any]:
    loaded = {name: forerun.load(name) for name in zoo_models()}
    prompts: list[Any] = CODE
    truths = None
    if data is not None:
        windows = held_out_windows(data, loaded["zoo:ar"].tokenizer, count, GIVEN + HOW["max_tokens"])
        prompts, truths = windows[:, :GIVEN].tolist(), windows[:, GIVEN:].tolist()
    rows = compare(contestants(loaded), prompts, judge=loaded["zoo:ar"], truths=truths, **HOW)
    return {"machine": machine(), "prompts": len(prompts), **HOW, "rows": as_dicts(rows)}


def table(report: dict[str, Any]) -> str:
    words = [cells(row) for row in report["rows"]]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    previous = None
    for row in words:
        name = f"`{row['model']}`" if row["model"] != previous else ""
        lines.append(f"| {name} | {' | '.join(row[column] for column in COLUMNS[1:])} |")
        previous = row["model"]
    return "\n".join([*lines, "", f"`make readme`: {caption(report)}."])


def speed(report: dict[str, Any]) -> str:
    lines = ["| on the same weights and prompts, float32 | tokens/s | least to most | ratio |", "|---|---|---|---|"]
    previous = None
    for row in report["rows"]:
        if row["what"] != previous:
            lines.append(f"| **{row['what']}** | | | |")
            previous = row["what"]
        lines.append(f"| {row['who']} | {row['rate']:.1f} | {row['least']:.1f} to {row['most']:.1f} | {row['ratio']:.2f} |")
    facts = "; ".join(f"{name}: {_plain(value)}" for name, value in report["facts"].items())
    return "\n".join([*lines, "", f"`make bench` on {report['machine']}, medians of turns. {facts}."])


def _plain(value: object) -> str:
    return ", ".join(f"{v} at {k} tokens" for k, v in value.items()) if isinstance(value, dict) else str(value)


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
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(START)
    readme.write_text(f"{before}{START}\n\n{table(compared(arguments.data, arguments.count))}\n\n{END}{rest.split(END)[1]}")
    draw_trace()


if __name__ == "__main__":
    main()
