"""The numbers of docs/block.md:  python bench/block.py DATA [--count N] [--times-only | --redraw]

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out documents, 64 more are decoded. Writes
docs/block.json, the tables of the page and its pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from typing import Any

import numpy as np
from page import DOCS, write_tables

import forerun
from forerun import zoo
from forerun.evaluate.blocks import Point, Way, draw, draw_habits, estimator_errors, frontier, habits, ways
from forerun.evaluate.compare import machine
from forerun.evaluate.metrics import Mean
from forerun.train.data import held_out_windows

BLOCKS = (4, 8, 16, 32)
TIMED = [
    Way("ar", "ar", {}),
    Way("static", "block-stepwise", {"block": 16}),
    Way("dynamic", "block", {"block": 16, "threshold": 0.9}),
    Way("dynamic", "block", {"block": 16, "threshold": 0.5}),
    Way("s2d2", "s2d2", {"block": 16}),
    Way("s2d2, causal text", "s2d2", {"block": 16, "causal": "text"}),
    Way("s2d2-exact", "s2d2-exact", {"k": 4}),
    Way("s2d2-exact", "s2d2-exact", {"k": 4, "ahead": "every"}),
    Way("s2d2-exact", "s2d2-exact", {"k": 8}),
    Way("block-ssd", "block-ssd", {"block": 16, "tree": "chain"}),
    Way("s2d2-canvases", "s2d2-canvases", {"block": 16, "tree": "chain", "router": "score"}),
]


def timed(prompts: list[list[int]], rounds: int = 3) -> list[dict[str, Any]]:
    """Seconds for eight prompts, one after the other and together, all ways in turns; medians, and the speed over `ar`."""
    model = forerun.load("zoo:block", lanes=8)
    seconds: dict[tuple[int, int], list[float]] = {}
    for turn in range(rounds + 1):
        for i, way in enumerate(TIMED):
            for batch in (1, 8):
                began = time.perf_counter()
                for first in range(0, 8, batch):
                    some = prompts[first : first + batch]
                    model.generate(some, method=way.method, max_tokens=48, ignore_eos=True, **way.options)
                if turn:  # the first turn warms up
                    seconds.setdefault((i, batch), []).append(time.perf_counter() - began)
    rows = []
    for i, way in enumerate(TIMED):
        row: dict[str, Any] = {"how": way.label}
        for batch in (1, 8):
            own, plain = (statistics.median(seconds[j, batch]) for j in (i, 0))
            row |= {f"seconds, batch {batch}": own, f"over ar, batch {batch}": plain / own}
        rows.append(row)
    return rows


def drafting(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """A block model as a drafter for zoo:ar, beside the masked model that was distilled for that: its keys of the text are kept
    exactly."""
    target = forerun.load("zoo:ar", lanes=len(prompts))
    rows = []
    for temperature in (0.0, 1.0):
        for name in ("zoo:masked", "zoo:block"):
            draft = forerun.load(name, lanes=len(prompts))
            results = target.generate(
                prompts, method="specdiff", draft=draft, k=8, max_tokens=64, ignore_eos=True, temperature=temperature
            )
            tokens, forwards = sum(r.stats.tokens for r in results), sum(r.stats.forwards for r in results)
            rows.append({"draft": name, "temperature": temperature, "tokens/forward": tokens / forwards})
    return rows


def measured(data: str, count: int) -> dict[str, Any]:
    windows = held_out_windows(data, zoo.tokenizer(), count, 128)
    prompts = windows[:, :64].tolist()
    model, judge = forerun.load("zoo:block", lanes=count), forerun.load("zoo:ar", lanes=1)
    panels = {f"blocks of {block}": frontier(model, judge, windows, ways(block)) for block in BLOCKS}
    hot = {f"blocks of {block}": frontier(model, judge, windows, ways(block), temperature=1.0) for block in (16,)}
    found = []
    for name, way in (("static", dict(method="block-stepwise")), ("dynamic", dict(method="block")), ("s2d2", dict(method="s2d2"))):
        results = model.generate(prompts, max_tokens=64, ignore_eos=True, logprobs=0, block=16, **way)
        found.append(habits(results, name, 16))
    draw_habits(found, str(DOCS / "ar-ness.png"))
    return {
        "frontier": {title: [p.as_dict() for p in own] for title, own in panels.items()},
        "hot": {title: [p.as_dict() for p in own] for title, own in hot.items()},
        "habits": [asdict(one) for one in found],
        "estimators": [asdict(one) for one in estimator_errors(model, prompts[: min(count, 12)], block=16)],
        "drafting": drafting(prompts[:16]),
        "editing": editing(model, judge, windows),
    }


def editing(model: Any, judge: Any, windows: np.ndarray) -> list[dict[str, Any]]:
    """Token editing: unmask early, correct later."""
    decode = [
        Way("", method, {"block": 16, "threshold": t, **({"edit": e, "post_edits": 2} if e else {}), **more})
        for method, more in (("block", {}), ("s2d2", {"router": "score"}))
        for t in (0.5, 0.7)
        for e in (None, 0.7, 0.9)
    ]
    return [p.as_dict() for p in frontier(model, judge, windows, decode)]


def as_point(row: dict[str, Any]) -> Point:
    means = {key: Mean(**row[key]) for key in ("tokens_per_forward", "nats", "entropy", "exact")}
    return Point(**{**row, **means})


def table(head: tuple[str, ...], rows: list[list[Any]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


def quality(points: list[dict[str, Any]]) -> list[list[Any]]:
    rows = []
    for point in map(as_point, points):
        rows.append(
            [
                point.how,
                point.tokens_per_forward,
                point.nats,
                f"{point.entropy.mean:.2f}",
                f"{point.exact.mean:.0%} ± {point.exact.error:.0%}",
            ]
        )
    return rows


def tables(report: dict[str, Any]) -> str:
    head = ("decoding", "tokens/forward", "nats under zoo:ar", "entropy, bits", "first line exact")
    lines = []
    for title, points in report["frontier"].items():
        lines += [f"**{title.capitalize()}, temperature 0**", "", *table(head, quality(points))]
    for title, points in report["hot"].items():
        lines += [f"**{title.capitalize()}, temperature 1**", "", *table(head, quality(points))]
    lines += ["**Token editing, blocks of 16, temperature 0**", "", *table(head, quality(report["editing"]))]
    head = ("decoding", "seconds, batch 1", "over ar", "seconds, batch 8", "over ar")
    rows = [[r["how"], *(f"{r[key]:.2f}" for key in r if key != "how")] for r in report["times"]]
    lines += ["**Time, eight prompts of 48 tokens, in turns**", "", *table(head, rows)]
    head = ("estimator", "strength", "mean error", "spread", "mean absolute error")
    rows = [
        [e["estimator"], f"{e['strength']:g}", *(f"{e[k]:.2f}" for k in ("bias", "spread", "absolute"))]
        for e in report["estimators"]
    ]
    lines += ["**Expected less accepted tokens, blocks of 16** (Table 4)", "", *table(head, rows)]
    head = ("decoding", *(f"local@{k}" for k in range(1, 6)), *(f"global@{k}" for k in range(1, 6)))
    rows = [[h["how"], *(f"{x:.2f}" for x in (*h["local"], *h["overall"]))] for h in report["habits"]]
    lines += ["**AR-ness, blocks of 16**", "", *table(head, rows)]
    rows = [[d["draft"], f"{d['temperature']:g}", f"{d['tokens/forward']:.2f}"] for d in report["drafting"]]
    lines += [
        "**As a drafter for zoo:ar** (`specdiff`, 8 tokens)",
        "",
        *table(("drafter", "temperature", "tokens/target forward"), rows),
    ]
    said = f"{report['count']} held-out prompts of 64 tokens, 64 decoded; ± is a standard error over prompts"
    return "\n".join([*lines, f"`python bench/block.py DATA --count {report['count']}`: {report['machine']}; {said}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--times-only", action="store_true", help="measure only seconds anew")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: write the page anew from docs/block.json")
    arguments = parser.parse_args()
    kept = arguments.times_only or arguments.redraw
    report: dict[str, Any] = json.loads((DOCS / "block.json").read_text()) if kept else {}
    if not kept:
        report |= {"count": arguments.count, **measured(arguments.data, arguments.count)}
    if not arguments.redraw:
        report |= {"machine": machine(), "times": timed(held_out_windows(arguments.data, zoo.tokenizer(), 8, 64).tolist())}
    (DOCS / "block.json").write_text(json.dumps(report, indent=1))
    panels = {title: [p for p in map(as_point, own) if p.nats.mean < 1.4] for title, own in report["frontier"].items()}
    draw(panels, str(DOCS / "block.png"))
    write_tables("block.md", tables(report))


if __name__ == "__main__":
    main()
