"""Write what the README shows: the picture from a real trace, the table from `bench/core.py`'s own numbers.

python bench/core.py --json bench/core.json && python bench/readme.py bench/core.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from demo import SPECULATIVE

import forerun
from forerun.cli.trace import run as show_trace
from forerun.evaluate.prompts import CODE
from forerun.jobs import trace_lines

ROOT = Path(__file__).parents[1]
START, END = "<!-- table: bench/readme.py writes this part -->", "<!-- end of table -->"


def table(report: dict) -> str:
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


def main() -> None:
    report = json.loads(Path(sys.argv[1]).read_text())
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(START)
    readme.write_text(f"{before}{START}\n\n{table(report)}\n\n{END}{rest.split(END)[1]}")
    model = forerun.load("zoo:ar")
    result = model.generate(CODE[0], max_tokens=64, **SPECULATIVE)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as file:
        file.writelines(json.dumps(line) + "\n" for line in trace_lines(result, 0, model.decode))
    show_trace(file.name, str(ROOT / "docs" / "trace.svg"), as_json=False)


if __name__ == "__main__":
    main()
