"""The counts of docs/masked.md:  python bench/masked.py DATA [--count N]

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out
documents, 64 more are decoded. Writes docs/masked.json, the tables of the page and its picture.
Without DATA, the tables are written anew from docs/masked.json. SSD and all speeds are measured by
`bench/papers.py`, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
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


def measure(model: forerun.Model, prompts: list[list[int]], **options: Any) -> Row:
    """Tokens per forward on all prompts, decoded together."""
    results = model.generate_all(prompts, max_tokens=64, ignore_eos=True, **options)
    tokens = sum(r.stats.tokens for r in results)
    forwards = sum(r.stats.forwards for r in results)
    by_prompt = [r.stats.tokens_per_forward for r in results]
    lengths: Counter[int] = Counter()
    for result in results:
        lengths.update(result.stats.acceptance_histogram)
    return {
        **{
            name: value.name if isinstance(value, forerun.Model) else value
            for name, value in options.items()
        },
        "tokens/forward": tokens / forwards,
        "error": statistics.stdev(by_prompt) / len(by_prompt) ** 0.5,
        "draft forwards": sum(r.stats.draft_forwards for r in results),
        "accepted": dict(sorted(lengths.items())),
    }


def drafting(prompts: list[list[int]]) -> list[Row]:
    target = forerun.load("zoo:ar", lanes=len(prompts))
    masked = forerun.load("zoo:masked", lanes=len(prompts))
    filler = forerun.load("zoo:any-subset", lanes=len(prompts))
    return [
        measure(target, prompts, temperature=temperature, **options)
        for temperature in (0.0, 1.0)
        for options in drafting_options(masked, filler, temperature)
    ]


def drafting_options(
    masked: forerun.Model, filler: forerun.Model, temperature: float
) -> Iterator[dict[str, Any]]:
    """Plain decoding first."""
    yield dict(method="ar")
    for draft in (masked, filler):
        for k in (4, 8, 15, 20):
            for steps in (1, 2, 4):
                yield dict(method="specdiff", draft=draft, k=k, steps=steps)
    best = dict(method="specdiff", draft=masked, k=8)
    yield dict(best, adapt=True)
    yield dict(best, keep=True)
    if temperature:
        for draft_temperature in (0.8, 1.2):
            yield dict(best, draft_temperature=draft_temperature)
    yield dict(method="speculative", draft="zoo:drafter", k=8)
    yield dict(method="lookup")


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


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def limits_table(limits: Sequence[Row]) -> list[str]:
    head = ("forwards saved at most, N", *(f"k = {k}" for k in range(1, 6)), "bound")
    cells = []
    for drafts in (3, 4, 5):
        of_drafts = [limit for limit in limits if limit["drafts"] == drafts]
        shares = [f"{limit['reduction']:.1%}" for limit in of_drafts]
        cells.append([drafts, *shares, f"{of_drafts[0]['bound']:.1%}"])
    return table(head, cells)


def error_words(row: Row) -> str:
    return f" ± {row['error']:.2f}" if "error" in row else ""


def specdiff_table(rows: Sequence[Row]) -> list[str]:
    head = (
        "temperature",
        "method",
        "drafter",
        "γ",
        "T",
        "tokens/target forward",
        "draft forwards",
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
                f"{row['tokens/forward']:.2f}" + error_words(row),
                row["draft forwards"] or "",
            ]
        )
    return table(head, cells)


def tables(report: dict[str, Any]) -> str:
    count = report["count"]
    about = f"{report['machine']}; {count} prompts of 64 tokens, 64 decoded, seed 0"
    few = f"the first table: {min(count, 6)} of them"
    lines = [
        *limits_table(report["limits"]),
        "",
        *specdiff_table(report["specdiff"]),
        "",
        f"`python bench/masked.py DATA --count {count}`: {about}; {few}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="?")
    parser.add_argument("--count", type=int, default=16)
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    if arguments.data is None:
        report = json.loads((DOCS / "masked.json").read_text())
    else:
        windows = held_out_windows(arguments.data, zoo.tokenizer(), arguments.count, 64)
        prompts = windows.tolist()
        report = {"machine": machine(), "count": arguments.count}
        report |= {"limits": limits(prompts), "specdiff": drafting(prompts)}
        draw(report["specdiff"])
        (DOCS / "masked.json").write_text(json.dumps(report, indent=1))
    write_tables("masked.md", tables(report))


if __name__ == "__main__":
    main()
