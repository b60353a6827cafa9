"""The numbers of docs/masked.md:  python bench/masked.py DATA [--count N]

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out
documents, 64 more are decoded. Writes docs/masked.json, the tables of the page and its picture.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from page import DOCS, write_tables

import forerun
from forerun import zoo
from forerun.evaluate.ssd_limit import ssd_limit
from forerun.profile.machine import machine
from forerun.train.data import held_out_windows

Row = dict[str, Any]  # as docs/masked.json holds it


def measure(
    model: forerun.Model, prompts: list[list[int]], timed: bool = False, **options: Any
) -> Row:
    """Tokens per forward on all prompts, decoded together; with `timed`, tokens per second on a few
    of them, one by one."""
    results = model.generate_all(prompts, max_tokens=64, ignore_eos=True, **options)
    tokens = sum(r.stats.tokens for r in results)
    forwards = sum(r.stats.forwards for r in results)
    lengths: Counter[int] = Counter()
    for result in results:
        lengths.update(result.stats.acceptance_histogram)
    row = {
        **{
            name: value.name if isinstance(value, forerun.Model) else value
            for name, value in options.items()
        },
        "tokens/forward": tokens / forwards,
        "saved": 1 - forwards / tokens,
        "draft forwards": sum(r.stats.draft_forwards for r in results),
        "accepted": dict(sorted(lengths.items())),
        "outputs": [r.token_ids for r in results],
    }
    if timed:
        row["tokens/s"] = tokens_per_second(model, prompts[:4], **options)
    return row


def tokens_per_second(model: forerun.Model, prompts: list[list[int]], **options: Any) -> float:
    """At batch 1; the median of three turns."""
    rates = []
    for _ in range(3):
        tokens = 0
        began = time.perf_counter()
        for prompt in prompts:
            [result] = model.generate_all([prompt], max_tokens=48, ignore_eos=True, **options)
            tokens += result.stats.tokens
        rates.append(tokens / (time.perf_counter() - began))
    return statistics.median(rates)


def add_speedups(rows: list[Row], reference: Row) -> None:
    """Of the rows that were timed, over the reference."""
    for row in rows:
        timed = "tokens/s" in row
        row["speed-up"] = row["tokens/s"] / reference["tokens/s"] if timed else None


def self_speculation(prompts: list[list[int]]) -> list[Row]:
    model = forerun.load("zoo:masked", lanes=len(prompts))
    rows = []
    for cache in ("none", "dual"):
        common = dict(block=8, cache=cache, refresh=8)
        reference = measure(model, prompts, timed=True, method="stepwise", **common)
        variants = [dict(drafts=n, tree=tree) for tree in ("chain", "mixed") for n in (3, 4, 5)]
        variants.append(dict(drafts=4, worth=0.3))
        measured = [reference]
        for variant in variants:
            timed = variant["drafts"] == 4
            measured.append(measure(model, prompts, timed, method="ssd", **variant, **common))
        for row in measured:
            row["same"] = row["outputs"] == reference["outputs"]
        add_speedups(measured, reference)
        rows += measured
    for options in (
        dict(method="threshold"),
        dict(method="steps", steps=4),
        dict(method="entropy-bounded"),
    ):
        rows.append(measure(model, prompts, block=8, **options))
    return rows


def drafting(prompts: list[list[int]]) -> list[Row]:
    target = forerun.load("zoo:ar", lanes=len(prompts))
    masked = forerun.load("zoo:masked", lanes=len(prompts))
    filler = forerun.load("zoo:any-subset", lanes=len(prompts))
    rows = []
    for temperature in (0.0, 1.0):
        measured = []
        for timed, options in drafting_options(masked, filler, temperature):
            measured.append(measure(target, prompts, timed, temperature=temperature, **options))
        add_speedups(measured, reference=measured[0])
        rows += measured
    return rows


def drafting_options(
    masked: forerun.Model, filler: forerun.Model, temperature: float
) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Whether seconds are taken, and the options; plain decoding first."""
    yield True, dict(method="ar")
    for draft in (masked, filler):
        for k in (4, 8, 15, 20):
            for steps in (1, 2, 4):
                timed = steps == 1 and k <= 8
                yield timed, dict(method="specdiff", draft=draft, k=k, steps=steps)
    best = dict(method="specdiff", draft=masked, k=8)
    yield True, dict(best, adapt=True)
    yield True, dict(best, keep=True)
    if temperature:
        for draft_temperature in (0.8, 1.2):
            yield False, dict(best, draft_temperature=draft_temperature)
    yield True, dict(method="speculative", draft="zoo:drafter", k=8)
    yield True, dict(method="lookup")


def limits(prompts: list[list[int]]) -> list[Row]:
    reached = ssd_limit(forerun.load("zoo:masked", lanes=1), prompts[:6], max_tokens=64)
    return [
        {
            "drafts": limit.drafts,
            "top": limit.top,
            "reduction": limit.reduction,
            "bound": limit.bound,
        }
        for limit in reached
    ]


def draw(rows: list[Row]) -> None:
    """Accepted lengths of one-step drafts (figures 3 and 4 of SpecDiff)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for panel, temperature in zip(panels, (0.0, 1.0)):
        for row in rows:
            if (
                row["method"] == "specdiff"
                and row["temperature"] == temperature
                and (row.get("k"), row.get("steps")) == (8, 1)
            ):
                total = sum(row["accepted"].values())
                panel.plot(
                    list(row["accepted"]),
                    [n / total for n in row["accepted"].values()],
                    "o-",
                    label=row["draft"],
                )
        panel.set(xlabel="accepted tokens of 8", title=f"temperature {temperature:g}")
        panel.legend()
    panels[0].set_ylabel("share of drafts")
    figure.savefig(DOCS / "masked.png", dpi=120)


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def ssd_table(rows: Sequence[Row]) -> list[str]:
    head = (
        "method",
        "cache",
        "N",
        "tree",
        "tokens/forward",
        "forwards saved",
        "tokens/s",
        "speed-up",
        "same output",
    )
    cells = []
    for row in rows:
        tree = row.get("tree", "mixed") if row["method"] == "ssd" else ""
        if "worth" in row:
            tree += ", worth 0.3"
        cells.append(
            [
                row["method"],
                row.get("cache", "none"),
                row.get("drafts", ""),
                tree,
                f"{row['tokens/forward']:.2f}",
                f"{row['saved']:.0%}",
                number(row.get("tokens/s"), ".0f"),
                number(row.get("speed-up"), ".2f"),
                {None: "", True: "yes", False: "no"}[row.get("same")],
            ]
        )
    return table(head, cells)


def limits_table(limits: Sequence[Row]) -> list[str]:
    head = ("forwards saved at most, N", *(f"k = {k}" for k in range(1, 6)), "bound")
    cells = []
    for drafts in (3, 4, 5):
        of_drafts = [limit for limit in limits if limit["drafts"] == drafts]
        shares = [f"{limit['reduction']:.1%}" for limit in of_drafts]
        cells.append([drafts, *shares, f"{of_drafts[0]['bound']:.1%}"])
    return table(head, cells)


def specdiff_table(rows: Sequence[Row]) -> list[str]:
    head = (
        "temperature",
        "method",
        "drafter",
        "γ",
        "T",
        "tokens/target forward",
        "draft forwards",
        "tokens/s",
        "over ar",
    )
    cells = []
    for row in rows:
        extras = [key for key in ("adapt", "keep", "draft_temperature") if key in row]
        cells.append(
            [
                f"{row['temperature']:g}",
                row["method"] + "".join(f", {key} {row[key]:g}" for key in extras),
                row.get("draft", ""),
                row.get("k", ""),
                row.get("steps", ""),
                f"{row['tokens/forward']:.2f}",
                row["draft forwards"] or "",
                number(row.get("tokens/s"), ".0f"),
                number(row.get("speed-up"), ".2f"),
            ]
        )
    return table(head, cells)


def tables(report: dict[str, Any]) -> str:
    note = (
        "tokens/forward on all prompts, tokens/s on four of them at batch 1, median of three turns"
    )
    lines = [
        *ssd_table(report["ssd"]),
        "",
        *limits_table(report["limits"]),
        "",
        *specdiff_table(report["specdiff"]),
        "",
        f"`python bench/masked.py DATA --count {report['count']}`: {report['machine']}; {note}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--only-ssd", action="store_true", help="measure only SSD anew")
    arguments = parser.parse_args()
    tokenizer = zoo.tokenizer()
    prompts = held_out_windows(arguments.data, tokenizer, arguments.count, 64).tolist()
    report: dict[str, Any] = (
        json.loads((DOCS / "masked.json").read_text()) if arguments.only_ssd else {}
    )
    report |= {"machine": machine(), "count": arguments.count, "ssd": self_speculation(prompts[:8])}
    if not arguments.only_ssd:
        report |= {"limits": limits(prompts), "specdiff": drafting(prompts)}
        draw(report["specdiff"])
    for row in (*report["ssd"], *report["specdiff"]):
        row.pop("outputs", None)
    (DOCS / "masked.json").write_text(json.dumps(report, indent=1))
    write_tables("masked.md", tables(report))


if __name__ == "__main__":
    main()
