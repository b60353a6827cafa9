"""The numbers of docs/healing.md:  python bench/healing.py [--count N] [--model NAME ...]

The code of this repository, which the zoo was not trained on, is cut at random places: after a line
break, inside an indentation, inside a word, and where a word ends. Models go on from there, with
and without token healing. Writes docs/healing.json as it goes, and the table into the page.

    python bench/healing.py --holes [--count N]

does the same for passages that are taken out of it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page import DOCS, write_part, write_tables

import forerun
from forerun.profile.machine import machine

REPORT = DOCS / "healing.json"
SOURCE = Path(__file__).parents[1] / "src" / "forerun"
MODELS = ("zoo:ar", "zoo:consistency", "zoo:block", "zoo:any-subset", "zoo:masked")
BEFORE = 400  # characters of text before a cut
LOOKED_AT = 12  # characters behind it
MAX_TOKENS = 10
CUTS = {
    "after a line break": re.compile(r"(?<=[\w):,]\n)(?=    )"),
    "inside an indentation": re.compile(r"(?<=\n  )(?=  \w)"),
    "inside a word": re.compile(r"(?<=[\s(.,]\w\w)(?=\w\w\w)"),
    "at the end of a word": re.compile(r"(?<=\w\w\w)(?=[ (.,:])"),
}
FILLERS = ("zoo:any-subset", "zoo:masked")
PASSAGES = {  # what is taken out, and what must stand around it
    "inside words": re.compile(r"(?<=[\s(.,]\w\w)(\w{2,}[^\n]{5,20}?[\s(.,]\w)(?=\w\w)"),
    "where words end": re.compile(r"(?<=\w\w\w)([ (.,:][^\n]{6,22}?\w)(?=[ (.,:])"),
}
HOLE = "<|fill:1-4|>"


def cuts(kind: str, count: int) -> Iterator[tuple[str, str]]:
    """What comes before and after some places, always the same."""
    chance = random.Random(1)
    files = sorted(SOURCE.rglob("*.py"))
    while count:
        text = chance.choice(files).read_text()
        places = [found.start() for found in CUTS[kind].finditer(text) if found.start() > BEFORE]
        if not places:
            continue
        place = chance.choice(places)
        start = text.rfind("\n", 0, place - BEFORE // 2) + 1
        count -= 1
        yield text[start:place], text[place : place + LOOKED_AT]


def passages(kind: str, count: int) -> Iterator[tuple[str, str, str]]:
    """Some texts before, in and after a hole, always the same."""
    chance = random.Random(2)
    files = sorted(SOURCE.rglob("*.py"))
    while count:
        text = chance.choice(files).read_text()
        found = [one for one in PASSAGES[kind].finditer(text) if one.start() > BEFORE]
        if not found:
            continue
        place = chance.choice(found)
        start = text.rfind("\n", 0, place.start() - BEFORE // 2) + 1
        end = text.find("\n", place.end() + BEFORE // 4)
        parts = text[start : place.start()], place[0], text[place.end() : end]
        if not any("<|fill" in part for part in parts):
            count -= 1
            yield parts


def measure_holes(model: Any, kind: str, count: int, heal: bool) -> dict[str, Any]:
    taken = list(passages(kind, count))
    texts = [
        before.replace("<|", "<") + HOLE + after.replace("<|", "<") for before, _, after in taken
    ]
    results = model.infill(texts, heal=heal)
    fills = [(result.fills[0], passage) for result, (_, passage, _) in zip(results, taken)]
    return {
        "cuts": count,
        "whole": sum(fill == passage for fill, passage in fills),
        "first": round(statistics.fmean(common(*pair) for pair in fills), 2),
        "last": round(statistics.fmean(common(a[::-1], b[::-1]) for a, b in fills), 2),
        "forwards": round(statistics.fmean(r.stats.forwards for r in results), 2),
    }


def table_of_holes(count: int) -> str:
    head = [
        "model", "cut", "passage right", "healed", "first characters right", "healed",
        "last characters right", "healed", "forwards", "healed",
    ]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for name in FILLERS:
        with forerun.load(name) as model:
            for kind in PASSAGES:
                plain = measure_holes(model, kind, count, heal=False)
                healed = measure_holes(model, kind, count, heal=True)
                print(name, kind, plain, healed, flush=True)
                parts = [name, f"{kind} ({count})"]
                for part in ("whole", "first", "last", "forwards"):
                    parts += [f"{plain[part]:g}", f"{healed[part]:g}"]
                lines.append(parts)
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    command = f"`python bench/healing.py --holes --count {count}`"
    return f"{rows}\n\n{command}: {machine()}; the machine was shared."


def measure(model: Any, kind: str, count: int, heal: bool) -> dict[str, Any]:
    pairs = list(cuts(kind, count))
    results = model.generate(
        [before for before, _ in pairs], max_tokens=MAX_TOKENS, heal=heal, raise_errors=True
    )
    agreed = [common(result.text, after) for result, (_, after) in zip(results, pairs)]
    return {
        "cuts": count,
        "agreed": round(statistics.fmean(agreed), 2),
        "whole": sum(length == len(after) for length, (_, after) in zip(agreed, pairs)),
        "none": sum(length == 0 for length in agreed),
        "empty": sum(not result.text for result in results),
        "forwards": round(statistics.fmean(r.stats.forwards for r in results), 2),
    }


def common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def table(report: dict[str, Any]) -> str:
    head = [
        "model", "cut", "characters right", "healed", f"all {LOOKED_AT} right", "healed",
        "first one wrong", "healed", "forwards", "healed",
    ]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for row in report["rows"]:
        plain = row["plain"]
        healed = row["healed"]
        parts = [row["model"], f"{row['cut']} ({plain['cuts']})"]
        for name in ("agreed", "whole", "none", "forwards"):
            parts += [f"{plain[name]:g}", f"{healed[name]:g}"]
        lines.append(parts)
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    command = f"`python bench/healing.py --count {report['count']}`"
    return f"{rows}\n\n{command}: {report['machine']}; the machine was shared."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--holes", action="store_true")
    asked = parser.parse_args()
    if asked.holes:
        part = table_of_holes(asked.count)
        write_part(DOCS / "healing.md", part, "<!-- holes -->", "<!-- end of holes -->")
        return
    report: dict[str, Any] = {"machine": machine(), "count": asked.count, "rows": []}
    before = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    if before.get("count") == asked.count:  # models may be measured one after the other
        report["rows"] = [row for row in before["rows"] if row["model"] not in asked.model]
    for name in asked.model:
        with forerun.load(name) as model:
            for kind in CUTS:
                found = {
                    how: measure(model, kind, asked.count, heal)
                    for how, heal in (("plain", False), ("healed", True))
                }
                report["rows"].append({"model": name, "cut": kind, **found})
                REPORT.write_text(json.dumps(report, indent=1) + "\n")
                print(name, kind, found, flush=True)
    write_tables("healing.md", table(report))


if __name__ == "__main__":
    main()
