"""The numbers of docs/structured-holes.md:  python bench/structured_holes.py [--count N]
[--only holes|drafts|masks]

Holes are cut into the code of this repository, which the zoo was not trained on: a name that is in
scope, a number, an operator. Writes docs/structured-holes.json as it goes, and the tables into the
page.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from page import DOCS, write_tables

import forerun
from forerun.constraints.automaton import token_automaton
from forerun.constraints.base import tokens_of
from forerun.constraints.canvas import OPEN, OnCanvas, Stretch
from forerun.constraints.schema import language_of_schema
from forerun.constraints.spelling import spelling_of
from forerun.probability import logits
from forerun.profile.machine import machine

REPORT = DOCS / "structured-holes.json"
SOURCE = Path(__file__).parents[1] / "src" / "forerun"
OPERATORS = ["+", "-", "*", "/", "//", "%", "==", "!=", "<", ">", "<=", ">="]
METHODS = {
    "zoo:any-subset": ("assd", "sequential"),
    "zoo:masked": ("ssd", "stepwise", "threshold"),
}
WITHOUT_LENGTH = ("assd", "ssd")
UNTOLD = "length not told"
BEFORE, AFTER = 400, 150  # characters around a hole
MOST_NAMES = 40
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["new", "paid"]}},
    },
    "required": ["name", "age"],
}
TITLES = ("user", "data", "config", "result", "item", "person", "options", "entry")


@dataclass(frozen=True)
class Case:
    """A text with one hole, what was there, and what it must hold."""

    kind: str
    before: str
    after: str
    truth: str
    constraint: dict[str, Any]

    def text(self, size: str) -> str:
        escaped = [part.replace("<|fill", "\\<|fill") for part in (self.before, self.after)]
        return f"{escaped[0]}<|fill{size}|>{escaped[1]}"

    def is_valid(self, fill: str) -> bool:
        """Is the fill what it must be?"""
        if "choices" in self.constraint:
            return fill in self.constraint["choices"]
        if "schema" in self.constraint:
            return is_json(fill, self.constraint["schema"])
        return fill.strip().isdecimal() and fill.isascii()


def is_json(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def cases(count: int) -> list[Case]:
    """So many holes of every kind, spread over all files."""
    found: dict[str, list[Case]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        for case in cases_of(file.read_text()):
            found.setdefault(case.kind, []).append(case)
    rng = np.random.default_rng(0)
    chosen: list[Case] = []
    for of_kind in found.values():
        picked = rng.permutation(len(of_kind))[:count]
        chosen += [of_kind[i] for i in sorted(picked.tolist())]
    return chosen


def cases_of(source: str) -> Iterator[Case]:
    """All holes of a file. A hole holds the space before its word, as tokens do."""
    starts = np.cumsum([0, *(len(line) for line in source.splitlines(keepends=True))])

    def cut(kind: str, node: ast.expr, truth: str, constraint: dict[str, Any]) -> Iterator[Case]:
        at = int(starts[node.lineno - 1]) + node.col_offset
        if source[at : at + len(truth)] != truth:
            return  # a line with characters of several bytes
        space = " " if source[at - 1] == " " else ""
        if "choices" in constraint:
            constraint = {"choices": [space + choice for choice in constraint["choices"]]}
        else:
            constraint = {"regex": space + constraint["regex"]}
        first = at - len(space)
        end = at + len(truth)
        before = source[max(0, first - BEFORE) : first]
        yield Case(kind, before, source[end : end + AFTER], space + truth, constraint)

    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = names_in(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in names and len(names) > 2:
                yield from cut("name in scope", node, node.id, {"choices": names})
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                yield from cut("number", node, str(node.value), {"regex": "[0-9]+"})
            elif isinstance(node, ast.BinOp | ast.Compare):
                yield from operators(source, starts, node)


def operators(source: str, starts: np.ndarray, node: ast.BinOp | ast.Compare) -> Iterator[Case]:
    left = node.left
    right = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    line = int(starts[right.lineno - 1])
    first = line + left.end_col_offset
    truth = source[first : line + right.col_offset].rstrip()
    if truth.strip() in OPERATORS and truth.startswith(" "):
        choices = [" " + operator for operator in OPERATORS]
        before = source[max(0, first - BEFORE) : first]
        after = source[first + len(truth) :][:AFTER]
        yield Case("operator", before, after, truth, {"choices": choices})


def names_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Arguments and variables of a function: its identifiers in scope."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = {argument.arg for argument in every}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return sorted(names)[:MOST_NAMES]


def json_cases() -> list[Case]:
    return [Case("JSON", f"{title} = ", "\n", "", {"schema": PERSON}) for title in TITLES]


def holes(count: int) -> Iterator[dict[str, Any]]:
    """Validity, exact match and cost of every method, without a constraint and with it. The length
    of the hole is that of what was there, or it is not told."""
    texts = cases(count)
    for name, methods in METHODS.items():
        model = forerun.load(name, lanes=8)
        assert model.vocabulary is not None
        sized = [(case, len(model.vocabulary.encode(case.truth))) for case in texts]
        sized += [(case, 24) for case in json_cases()]
        for method in methods:
            yield from measured(model, method, "free", sized)
            yield from measured(model, method, "constrained", sized)
            if method in WITHOUT_LENGTH:
                yield from measured(model, method, UNTOLD, sized)


def measured(
    model: forerun.Model, method: str, how: str, sized: list[tuple[Case, int]]
) -> list[dict[str, Any]]:
    by_kind: dict[str, list[tuple[Case, Any]]] = {}
    for case, size in sized:
        told = f":{size}"
        if how == UNTOLD:
            told = "" if "choices" in case.constraint else f":1-{max(size, 4)}"
        if how != "free" and case.kind == "JSON" and told != ":24":
            continue
        options = {} if how == "free" else case.constraint
        result = model.infill(case.text(told), method=method, **options)
        by_kind.setdefault(case.kind, []).append((case, result))
    return [summary(model.name, method, how, kind, found) for kind, found in by_kind.items()]


def summary(
    model: str, method: str, how: str, kind: str, found: list[tuple[Case, Any]]
) -> dict[str, Any]:
    tokens = sum(result.stats.tokens for _, result in found)
    forwards = sum(result.stats.forwards for _, result in found)
    return {
        "model": model,
        "method": method,
        "how": how,
        "kind": kind,
        "holes": len(found),
        "valid": sum(case.is_valid(result.fills[0]) for case, result in found),
        "exact": sum(case.truth == result.fills[0] for case, result in found),
        "tokens/forward": tokens / forwards,
    }


@contextmanager
def drafts_that_know_only_masks() -> Iterator[None]:
    """Without sum-product."""
    right = logits.drafted
    logits.drafted = lambda logits_LV, chain: logits_LV
    try:
        yield
    finally:
        logits.drafted = right


def drafts() -> Iterator[dict[str, Any]]:
    """What drafts that know the whole language are worth to `assd`."""
    model = forerun.load("zoo:any-subset", lanes=8)
    for temperature in (0.0, 1.0):
        for how in ("masks", "sum-product"):
            tokens = forwards = accepted = drafted = 0
            for case in json_cases():
                for seed in range(1 if temperature == 0 else 6):
                    options = {"method": "assd", "temperature": temperature, "seed": seed}
                    if how == "masks":
                        with drafts_that_know_only_masks():
                            result = model.infill(case.text(":24"), **options, **case.constraint)
                    else:
                        result = model.infill(case.text(":24"), **options, **case.constraint)
                    assert is_json(result.fills[0], PERSON), result.fills
                    tokens += result.stats.tokens
                    forwards += result.stats.forwards
                    events = [event for event in result.trace if event.drafted]
                    accepted += sum(event.accepted for event in events)
                    drafted += sum(len(event.drafted) for event in events)
            yield {
                "temperature": temperature,
                "drafts": how,
                "tokens/forward": tokens / forwards,
                "accepted": accepted / drafted,
            }


def masks() -> list[dict[str, Any]]:
    """Milliseconds of reachability and bitmasks on the host: a whole canvas, and once more after a
    decision. Of this thread's own time, as the machine may be shared."""
    model = forerun.load("zoo:masked")
    assert model.vocabulary is not None
    spelling = spelling_of(model.vocabulary)
    automaton = token_automaton(language_of_schema(json.dumps(PERSON)), spelling)
    rng = np.random.default_rng(0)
    whole, again = [], []
    for _ in range(20):
        stretch = Stretch(0, 24, automaton)
        began = time.thread_time()
        constraint = OnCanvas([stretch], [OPEN] * 24, model.vocab)
        constraint.masks((), (), [0] * 24, range(24))
        whole.append(1e3 * (time.thread_time() - began))
        left = list(range(24))
        while left:
            place = int(rng.choice(left))
            [mask_W] = constraint.masks((), (), [0], [place])
            token = int(rng.choice(tokens_of(mask_W)))
            left.remove(place)
            began = time.thread_time()
            constraint.add(place, token)
            constraint.masks((), (), [0] * len(left), left)
            again.append(1e3 * (time.thread_time() - began))
    return [
        {
            "states": automaton.states,
            "classes": automaton.next_SC.shape[1],
            "places": 24,
            "whole, ms": statistics.median(whole),
            "after a decision, ms": statistics.median(again),
            "after a decision, 99 %, ms": float(np.quantile(again, 0.99)),
        }
    ]


def markdown(report: dict[str, Any]) -> str:
    parts = []
    if "holes" in report:
        parts.append(holes_table(report["holes"]["rows"]))
    if "drafts" in report:
        lines = ["| temperature | drafts | tokens/forward | accepted |", "|---|---|---|---|"]
        lines += [
            f"| {row['temperature']:g} | {row['drafts']} | {row['tokens/forward']:.2f} | "
            f"{row['accepted']:.0%} |"
            for row in report["drafts"]["rows"]
        ]
        parts.append("\n".join(lines))
    if "masks" in report:
        [row] = report["masks"]["rows"]
        parts.append(
            f"Reachability and bitmasks of {row['places']} places, {row['states']} states and "
            f"{row['classes']} classes of 4,096 tokens, CPU time: {row['whole, ms']:.1f} ms for "
            f"the whole canvas, {row['after a decision, ms']:.2f} ms after a decision (99 % within "
            f"{row['after a decision, 99 %, ms']:.1f} ms)."
        )
    parts.append(
        f"`python bench/structured_holes.py --count {report['count']}`: {report['machine']}; "
        f"the machine was shared."
    )
    return "\n\n".join(parts)


def holes_table(rows: list[dict[str, Any]]) -> str:
    """A line for every method and kind of hole: without the constraint, with it, and with it where
    the length is not told."""
    lines = [
        "| model | method | hole | valid, free | constrained | exact match, free | constrained | "
        "length not told | tokens/forward, free | constrained |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    by_line: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_line.setdefault((row["model"], row["method"], row["kind"]), {})[row["how"]] = row
    for (model, method, kind), found in by_line.items():
        free = found["free"]
        held = found["constrained"]
        right = [share(found.get(how), "exact") for how in ("free", "constrained", UNTOLD)]
        if kind == "JSON":  # there is no right answer
            right = ["", "", ""]
        lines.append(
            f"| {model} | {method} | {kind} ({free['holes']}) | {share(free, 'valid')} | "
            f"{share(held, 'valid')} | {' | '.join(right)} | {free['tokens/forward']:.2f} | "
            f"{held['tokens/forward']:.2f} |"
        )
    return "\n".join(lines)


def share(row: dict[str, Any] | None, name: str) -> str:
    return "" if row is None else f"{row[name] / row['holes']:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=16, help="holes of every kind")
    parser.add_argument("--only", choices=["holes", "drafts", "masks"])
    asked = parser.parse_args()
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    report["machine"] = machine()
    report["count"] = asked.count
    work = {"holes": lambda: holes(asked.count), "drafts": drafts, "masks": masks}
    for name, measure in work.items():
        if asked.only in (None, name):
            report[name] = {"rows": []}
            for row in measure():
                print(json.dumps(row), flush=True)
                report[name]["rows"].append(row)
                REPORT.write_text(json.dumps(report, indent=1) + "\n")
    write_tables("structured-holes.md", markdown(report))


if __name__ == "__main__":
    main()
