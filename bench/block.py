"""The numbers of docs/block.md:  python bench/block.py DATA [--count N] [--times-only | --redraw]

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out
documents, 64 more are decoded. Writes docs/block.json, the tables of the page and its pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from typing import Any

from page import DOCS, write_tables

import forerun
from forerun import zoo
from forerun.evaluate.ar_ness import order_report
from forerun.evaluate.estimators import estimator_errors
from forerun.evaluate.frontier import (
    FrontierPoint,
    FrontierSetting,
    HeldOutText,
    frontier,
    frontier_settings,
)
from forerun.evaluate.metrics import Mean
from forerun.evaluate.plots import plot_frontier, plot_order
from forerun.profile.machine import machine
from forerun.train.data import held_out_windows

BLOCKS = (4, 8, 16, 32)
TIMED = [
    FrontierSetting("ar", "ar", {}),
    FrontierSetting("static", "block-stepwise", {"block": 16}),
    FrontierSetting("dynamic", "block", {"block": 16, "threshold": 0.9}),
    FrontierSetting("dynamic", "block", {"block": 16, "threshold": 0.5}),
    FrontierSetting("s2d2", "s2d2", {"block": 16}),
    FrontierSetting("s2d2, causal text", "s2d2", {"block": 16, "causal": "text"}),
    FrontierSetting("s2d2-exact", "s2d2-exact", {"k": 4}),
    FrontierSetting("s2d2-exact", "s2d2-exact", {"k": 4, "ahead": "every"}),
    FrontierSetting("s2d2-exact", "s2d2-exact", {"k": 8}),
    FrontierSetting("block-ssd", "block-ssd", {"block": 16, "tree": "chain"}),
    FrontierSetting(
        "s2d2-canvases", "s2d2-canvases", {"block": 16, "tree": "chain", "router": "score"}
    ),
]


ORDERS = {"static": "block-stepwise", "dynamic": "block", "s2d2": "s2d2"}


def timed(prompts: list[list[int]], rounds: int = 3) -> list[dict[str, Any]]:
    """Seconds for eight prompts, one after the other and together, all settings in turns; medians,
    and the speed over `ar`."""
    model = forerun.load("zoo:block", lanes=8)
    seconds: dict[tuple[int, int], list[float]] = {}
    for turn in range(rounds + 1):
        for i, setting in enumerate(TIMED):
            for batch in (1, 8):
                taken = seconds_of(model, prompts, setting, batch)
                if turn:  # the first turn warms up
                    seconds.setdefault((i, batch), []).append(taken)
    rows = []
    for i, setting in enumerate(TIMED):
        row: dict[str, Any] = {"label": setting.label}
        for batch in (1, 8):
            plain = statistics.median(seconds[0, batch])
            taken = statistics.median(seconds[i, batch])
            row |= {f"seconds, batch {batch}": taken, f"over ar, batch {batch}": plain / taken}
        rows.append(row)
    return rows


def seconds_of(
    model: forerun.Model, prompts: list[list[int]], setting: FrontierSetting, batch: int
) -> float:
    began = time.perf_counter()
    for first in range(0, 8, batch):
        model.generate_all(
            prompts[first : first + batch],
            method=setting.method,
            max_tokens=48,
            ignore_eos=True,
            **setting.options,
        )
    return time.perf_counter() - began


def drafting(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """A block model as a drafter for zoo:ar, beside the masked model that was distilled for that:
    its keys of the text are kept exactly."""
    target = forerun.load("zoo:ar", lanes=len(prompts))
    rows = []
    for temperature in (0.0, 1.0):
        for name in ("zoo:masked", "zoo:block"):
            results = target.generate_all(
                prompts,
                method="specdiff",
                draft=forerun.load(name, lanes=len(prompts)),
                k=8,
                max_tokens=64,
                ignore_eos=True,
                temperature=temperature,
            )
            tokens = sum(r.stats.tokens for r in results)
            forwards = sum(r.stats.forwards for r in results)
            rows.append(
                {"draft": name, "temperature": temperature, "tokens/forward": tokens / forwards}
            )
    return rows


def measured(data: str, count: int) -> dict[str, Any]:
    text = HeldOutText(held_out_windows(data, zoo.tokenizer(), count, 128), given=64)
    model = forerun.load("zoo:block", lanes=count)
    judge = forerun.load("zoo:ar", lanes=1)
    panels = {}
    for block in BLOCKS:
        points = frontier(model, judge, text, frontier_settings(block))
        panels[f"blocks of {block}"] = [point.as_dict() for point in points]
    hot = frontier(model, judge, text, frontier_settings(16), temperature=1.0)
    reports = []
    for name, method in ORDERS.items():
        results = model.generate_all(
            text.prompts, method=method, max_tokens=64, ignore_eos=True, logprobs=0, block=16
        )
        reports.append(order_report(results, name, 16))
    plot_order(reports, str(DOCS / "ar-ness.png"))
    errors = estimator_errors(model, text.prompts[: min(count, 12)], block=16)
    return {
        "frontier": panels,
        "hot": {"blocks of 16": [point.as_dict() for point in hot]},
        "habits": [asdict(report) for report in reports],
        "estimators": [asdict(error) for error in errors],
        "drafting": drafting(text.prompts[:16]),
        "editing": editing(model, judge, text),
    }


def editing(model: forerun.Model, judge: forerun.Model, text: HeldOutText) -> list[dict[str, Any]]:
    """Token editing: unmask early, correct later."""
    settings = []
    for method, method_options in (("block", {}), ("s2d2", {"router": "score"})):
        for threshold in (0.5, 0.7):
            for edit in (None, 0.7, 0.9):
                edits = {} if edit is None else {"edit": edit, "post_edits": 2}
                options = {"block": 16, "threshold": threshold, **edits, **method_options}
                settings.append(FrontierSetting("", method, options))
    return [point.as_dict() for point in frontier(model, judge, text, settings)]


def as_point(row: dict[str, Any]) -> FrontierPoint:
    names = ("tokens_per_forward", "nats", "entropy", "first_line_right")
    means = {name: Mean(**row[name]) for name in names}
    return FrontierPoint(**{**row, **means})


def table(head: tuple[str, ...], rows: list[list[Any]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
        "",
    ]


def quality(points: list[dict[str, Any]]) -> list[list[Any]]:
    rows = []
    for point in map(as_point, points):
        right = point.first_line_right
        rows.append(
            [
                point.label,
                point.tokens_per_forward,
                point.nats,
                f"{point.entropy.mean:.2f}",
                f"{right.mean:.0%} ± {right.error:.0%}",
            ]
        )
    return rows


def quality_tables(report: dict[str, Any]) -> list[str]:
    head = ("decoding", "tokens/forward", "nats under zoo:ar", "entropy, bits", "first line right")
    lines = []
    for title, points in report["frontier"].items():
        lines += [f"**{title.capitalize()}, temperature 0**", "", *table(head, quality(points))]
    for title, points in report["hot"].items():
        lines += [f"**{title.capitalize()}, temperature 1**", "", *table(head, quality(points))]
    title = "**Token editing, blocks of 16, temperature 0**"
    return [*lines, title, "", *table(head, quality(report["editing"]))]


def times_table(rows: list[dict[str, Any]]) -> list[str]:
    head = ("decoding", "seconds, batch 1", "over ar", "seconds, batch 8", "over ar")
    cells = [[r["label"], *(f"{r[key]:.2f}" for key in r if key != "label")] for r in rows]
    return ["**Time, eight prompts of 48 tokens, in turns**", "", *table(head, cells)]


def estimators_table(rows: list[dict[str, Any]]) -> list[str]:
    head = ("estimator", "strength", "mean error", "spread", "mean absolute error")
    cells = []
    for row in rows:
        errors = [f"{row[key]:.2f}" for key in ("bias", "spread", "absolute")]
        cells.append([row["estimator"], f"{row['strength']:g}", *errors])
    title = "**Expected less accepted tokens, blocks of 16** (Table 4)"
    return [title, "", *table(head, cells)]


def order_table(rows: list[dict[str, Any]]) -> list[str]:
    local = range(1, len(rows[0]["local"]) + 1)
    overall = range(1, len(rows[0]["overall"]) + 1)
    head = ("decoding", *(f"local@{k}" for k in local), *(f"global@{k}" for k in overall))
    cells = [[r["label"], *(f"{x:.2f}" for x in (*r["local"], *r["overall"]))] for r in rows]
    return ["**AR-ness, blocks of 16**", "", *table(head, cells)]


def drafting_table(rows: list[dict[str, Any]]) -> list[str]:
    head = ("drafter", "temperature", "tokens/target forward")
    cells = [[r["draft"], f"{r['temperature']:g}", f"{r['tokens/forward']:.2f}"] for r in rows]
    return ["**As a drafter for zoo:ar** (`specdiff`, 8 tokens)", "", *table(head, cells)]


def tables(report: dict[str, Any]) -> str:
    count = report["count"]
    lines = [
        *quality_tables(report),
        *times_table(report["times"]),
        *estimators_table(report["estimators"]),
        *order_table(report["habits"]),
        *drafting_table(report["drafting"]),
        f"`python bench/block.py DATA --count {count}`: {report['machine']}; {count} held-out "
        f"prompts of 64 tokens, 64 decoded, seed 0; ± is a standard error over prompts; times are "
        f"of one run of eight prompts, without an error.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="?")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--times-only", action="store_true", help="measure only seconds anew")
    parser.add_argument(
        "--redraw",
        action="store_true",
        help="measure nothing: write the page anew from docs/block.json",
    )
    arguments = parser.parse_args()
    kept = arguments.times_only or arguments.redraw
    report: dict[str, Any] = json.loads((DOCS / "block.json").read_text()) if kept else {}
    if not kept:
        report |= {"count": arguments.count, **measured(arguments.data, arguments.count)}
    if not arguments.redraw:
        report |= {
            "machine": machine(),
            "times": timed(held_out_windows(arguments.data, zoo.tokenizer(), 8, 64).tolist()),
        }
    (DOCS / "block.json").write_text(json.dumps(report, indent=1))
    panels = {
        title: [point for point in map(as_point, points) if point.nats.mean < 1.4]
        for title, points in report["frontier"].items()
    }
    plot_frontier(panels, str(DOCS / "block.png"))
    write_tables("block.md", tables(report))


if __name__ == "__main__":
    main()
