"""The numbers and pictures of docs/any-subset.md:  python bench/any_subset.py DATA [--count N]
[--only table|k|length|cache|speed]

DATA is a folder of .py files or a .jsonl[.xz] corpus; held-out documents of it are used. Writes
docs/any-subset.json as it goes, the pictures beside it, and the tables into the page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from page import DOCS, write_tables

import forerun
from forerun.evaluate.scattered import ScatteredTask, scattered, scattered_canvases
from forerun.evaluate.tasks import MethodChoice, TaskSettings, fill
from forerun.profile.machine import machine
from forerun.train.data import held_out_windows

REPORT = DOCS / "any-subset.json"
CHOICES = {
    "sequential": MethodChoice("sequential"),
    "ASSD, Algorithm 1": MethodChoice("assd", None, {"ahead": "none"}),
    "ASSD": MethodChoice("assd"),
    "ASSD, `ahead=every`": MethodChoice("assd", None, {"ahead": "every"}),
    "ASSD, n-grams": MethodChoice("assd", "ngram"),
}
KNOWN = (0.05, 0.3, 0.8)
KS = (2, 3, 4, 5, 6, 8, 10, 15, 20)
LENGTHS = (64, 128, 256, 512)


def measure(
    windows: np.ndarray, choices: dict[str, MethodChoice], known: float, judge: forerun.Model
) -> list[dict[str, Any]]:
    task = ScatteredTask(windows, known, judge)
    rows = scattered(forerun.load("zoo:any-subset"), list(choices.values()), task)
    return [{"name": name, **row.as_dict()} for name, row in zip(choices, rows)]


def table(data: str, count: int) -> list[dict[str, Any]]:
    judge = forerun.load("zoo:ar", lanes=1)
    windows = held_out_windows(data, judge.tokenizer, count, 256)
    return [{"known": known, "rows": measure(windows, CHOICES, known, judge)} for known in KNOWN]


def by_k(data: str, count: int) -> list[dict[str, Any]]:
    judge = forerun.load("zoo:ar", lanes=1)
    windows = held_out_windows(data, judge.tokenizer, count, 128)
    choices = {"sequential": MethodChoice("sequential")}
    for ahead in ("none", "whole", "every"):
        for k in KS:
            choices[f"{ahead} {k}"] = MethodChoice("assd", None, {"k": k, "ahead": ahead})
    return measure(windows, choices, 0.3, judge)


def by_length(data: str, count: int) -> list[dict[str, Any]]:
    judge = forerun.load("zoo:ar", lanes=1)
    rows = []
    for length in LENGTHS:
        windows = held_out_windows(data, judge.tokenizer, count, length)
        rows.append({"length": length, "rows": measure(windows, CHOICES, 0.3, judge)})
    return rows


def cache(device: str) -> list[dict[str, Any]]:
    """Table 7: one parallel query of an XLNet-large (340 M, random weights) on 1,024 tokens, 128 of
    them blank: the library's own forward, which has no cache for this, and ours with everything
    that is decided in slots."""
    from transformers import XLNetConfig, XLNetLMHeadModel

    torch.manual_seed(0)
    network = XLNetLMHeadModel(XLNetConfig()).eval().to(device)
    tokens = torch.randint(10, 32000, (1, 1024), device=device)
    blanks = torch.arange(448, 576)
    seen = torch.ones(1024, dtype=torch.bool)
    seen[blanks] = False
    banned = (~seen).float().expand(1, 1024, 1024).contiguous().to(device)
    wanted = torch.nn.functional.one_hot(blanks[None, :5], 1024).float().to(device)

    def library() -> None:
        network(tokens, perm_mask=banned, target_mapping=wanted, use_mems=False)

    model = forerun.from_network(network, None, name="xlnet-large", lanes=1, max_context=1024)
    canvas = [int(t) if s else None for t, s in zip(tokens[0], seen)]
    times: dict[str, list[float]] = {"transformers, no cache": [], "forerun, slots": []}
    with torch.inference_mode():
        for turn in range(6):
            times["transformers, no cache"].append(_timed(library, device))
            began = time.perf_counter()
            result = model.infill(
                token_ids=canvas, method="assd", ahead="none", temperature=1.0, seed=turn
            )
            # The whole of decoding, rules and first pass included, divided by its forwards.
            times["forerun, slots"].append((time.perf_counter() - began) / result.stats.forwards)
    return [
        {"name": name, "seconds": statistics.median(t[1:]), "device": device}
        for name, t in times.items()
    ]


def speed(data: str, count: int, device: str) -> list[dict[str, Any]]:
    """Tokens per second of every method, 30 % known, batch 1, in turns; the median of three."""
    model = forerun.load("zoo:any-subset", device=device)
    canvases = scattered_canvases(held_out_windows(data, model.tokenizer, count, 256), 0.3)
    rates: dict[str, list[float]] = {name: [] for name in CHOICES}
    per_forward = {}
    for turn in range(4):
        for name, choice in CHOICES.items():
            timed = list(fill(model, choice, canvases, TaskSettings(seed=turn)))
            tokens = sum(one.result.stats.tokens for one in timed)
            if turn:  # the first warms up
                rates[name].append(tokens / sum(one.seconds for one in timed))
            per_forward[name] = tokens / sum(one.result.stats.forwards for one in timed)
    return [
        {
            "name": name,
            "tokens/s": statistics.median(rates[name]),
            "tokens/forward": per_forward[name],
            "device": device,
        }
        for name in CHOICES
    ]


def _timed(work: Callable[[], None], device: str) -> float:
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def draw(report: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    rows = {row["name"]: row for row in report.get("k", {}).get("rows", [])}
    for ahead, label in (("none", "Algorithm 1"), ("whole", "default"), ("every", "ahead=every")):
        if rows:
            values = [rows[f"{ahead} {k}"]["tokens/forward"] for k in KS]
            left.errorbar(
                KS,
                [v["mean"] for v in values],
                [v["error"] for v in values],
                label=label,
                capsize=2,
            )
    left.set(
        xlabel="k, tokens drafted", ylabel="tokens per forward", title="30 % known, 128 tokens"
    )
    for name in list(CHOICES)[1:]:
        lengths = report.get("length", {}).get("rows", [])
        values = [
            next(r for r in entry["rows"] if r["name"] == name)["tokens/forward"]
            for entry in lengths
        ]
        label = name.replace("`", "")
        right.errorbar(
            [e["length"] for e in lengths],
            [v["mean"] for v in values],
            [v["error"] for v in values],
            label=label,
            capsize=2,
        )
    right.set(xlabel="length of the sequence", title="30 % known, k = 5", xscale="log")
    right.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    for axes in (left, right):
        axes.axhline(1, color="grey", linewidth=0.5)
        axes.legend(fontsize=8)
    figure.savefig(DOCS / "any-subset.png", dpi=110)


def cell(value: dict[str, float], digits: int) -> str:
    return f"{value['mean']:.{digits}f} ± {value['error']:.{digits}f}"


def markdown(report: dict[str, Any]) -> str:
    part = report["table"]
    lines = [
        "| known | method | forwards | drafter calls | tokens/forward | perplexity (p) | entropy "
        "(p) | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in part["rows"]:
        for row in entry["rows"]:
            p = {k: f" ({v:.2f})" for k, v in row["p_values"].items()}
            lines.append(
                f"| {entry['known']:.0%} | {row['name']} | {cell(row['forwards'], 1)} | "
                f"{row['drafter calls']['mean']:.1f} "
                f"| {cell(row['tokens/forward'], 2)} | "
                f"{cell(row['perplexity'], 1)}{p.get('perplexity', '')} "
                f"| {cell(row['entropy'], 2)}{p.get('entropy', '')} | {cell(row['seconds'], 2)} |"
            )
    lines += ["", f"`python bench/any_subset.py DATA --count {part['count']}`: {part['machine']}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="?")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument(
        "--only",
        choices=["table", "k", "length", "cache", "speed", "page"],
        help="page: only write the page again",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=REPORT)
    arguments = parser.parse_args()
    parts = {
        "table": table,
        "k": by_k,
        "length": by_length,
        "cache": lambda data, count: cache(arguments.device),
    }
    parts["speed"] = lambda data, count: speed(data, count, arguments.device)
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name, work in parts.items():
        if arguments.only in (None, name):
            report[name] = {
                "machine": machine(),
                "count": arguments.count,
                "rows": work(arguments.data, arguments.count),
            }
            arguments.json.write_text(json.dumps(report, indent=1))
            print(name, "done", flush=True)
    if {"table", "k", "length"} <= report.keys() and arguments.json == REPORT:
        draw(report)
        write_tables("any-subset.md", markdown(report))


if __name__ == "__main__":
    main()
