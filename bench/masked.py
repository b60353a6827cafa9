"""The numbers of docs/masked.md:  python bench/masked.py DATA [--count N]

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out documents, 64 more are decoded. Writes
docs/masked.json, the tables of the page and its picture.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from typing import Any

from page import DOCS, write_tables

import forerun
from forerun import zoo
from forerun.evaluate.analyse import ssd_limit
from forerun.evaluate.compare import machine
from forerun.train.data import held_out_windows


def measure(model: Any, prompts: list[list[int]], timed: bool = False, **how: Any) -> dict[str, Any]:
    """Tokens per forward on all prompts, decoded together; with `timed`, tokens per second on a few of them, one by one."""
    results = model.generate(prompts, max_tokens=64, ignore_eos=True, **how)
    tokens, forwards = sum(r.stats.tokens for r in results), sum(r.stats.forwards for r in results)
    lengths = Counter(n for r in results for n, times in r.stats.acceptance_histogram.items() for _ in range(times))
    row = {
        **{key: getattr(value, "name", value) for key, value in how.items()},
        "tokens/forward": tokens / forwards,
        "saved": 1 - forwards / tokens,
        "draft forwards": sum(r.stats.draft_forwards for r in results),
        "accepted": dict(sorted(lengths.items())),
        "outputs": [r.token_ids for r in results],
    }
    if timed:
        rates = []
        for _ in range(3):
            began = time.perf_counter()
            some = [model.generate(prompt, max_tokens=48, ignore_eos=True, **how) for prompt in prompts[:4]]
            rates.append(sum(r.stats.tokens for r in some) / (time.perf_counter() - began))
        row["tokens/s"] = statistics.median(rates)
    return row


def self_speculation(prompts: list[list[int]]) -> list[dict[str, Any]]:
    model = forerun.load("zoo:masked", lanes=len(prompts))
    rows = []
    for cache in ("none", "dual"):
        own = dict(block=8, cache=cache, refresh=8)
        reference = measure(model, prompts, timed=True, method="stepwise", **own)
        ways = [dict(drafts=n, tree=tree) for tree in ("chain", "mixed") for n in (3, 4, 5)] + [dict(drafts=4, worth=0.3)]
        found = [measure(model, prompts, timed=way["drafts"] == 4, method="ssd", **way, **own) for way in ways]
        for row in (reference, *found):
            row["same"] = row["outputs"] == reference["outputs"]
            row["speed-up"] = row["tokens/s"] / reference["tokens/s"] if "tokens/s" in row else None
        rows += [reference, *found]
    for how in (dict(method="threshold"), dict(method="steps", steps=4), dict(method="entropy-bounded")):
        rows.append(measure(model, prompts, block=8, **how))
    return rows


def drafting(prompts: list[list[int]]) -> list[dict[str, Any]]:
    target = forerun.load("zoo:ar", lanes=len(prompts))
    masked, filler = (forerun.load(name, lanes=len(prompts)) for name in ("zoo:masked", "zoo:any-subset"))
    rows = []
    for temperature in (0.0, 1.0):
        plain = measure(target, prompts, timed=True, method="ar", temperature=temperature)
        found = [plain]
        for draft in (masked, filler):
            for k in (4, 8, 15, 20):
                for steps in (1, 2, 4):
                    how = dict(method="specdiff", draft=draft, k=k, steps=steps, temperature=temperature)
                    found.append(measure(target, prompts, timed=steps == 1 and k <= 8, **how))
        own = dict(method="specdiff", draft=masked, temperature=temperature)
        found.append(measure(target, prompts, timed=True, **own, k=8, adapt=True))
        found.append(measure(target, prompts, timed=True, **own, k=8, keep=True))
        if temperature:
            found += [measure(target, prompts, **own, k=8, draft_temperature=t) for t in (0.8, 1.2)]
        found.append(measure(target, prompts, True, method="speculative", draft="zoo:drafter", k=8, temperature=temperature))
        found.append(measure(target, prompts, timed=True, method="lookup", temperature=temperature))
        for row in found:
            row["speed-up"] = row["tokens/s"] / plain["tokens/s"] if "tokens/s" in row else None
        rows += found
    return rows


def limits(prompts: list[list[int]]) -> list[dict[str, Any]]:
    found = ssd_limit(forerun.load("zoo:masked", lanes=1), prompts[:6], max_tokens=64)
    return [{"drafts": f.drafts, "top": f.top, "reduction": f.reduction, "bound": f.bound} for f in found]


def draw(rows: list[dict[str, Any]]) -> None:
    """Accepted lengths of one-step drafts (figures 3 and 4 of SpecDiff)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for panel, temperature in zip(panels, (0.0, 1.0)):
        for row in rows:
            if row["method"] == "specdiff" and row["temperature"] == temperature and (row.get("k"), row.get("steps")) == (8, 1):
                total = sum(row["accepted"].values())
                panel.plot(list(row["accepted"]), [n / total for n in row["accepted"].values()], "o-", label=row["draft"])
        panel.set(xlabel="accepted tokens of 8", title=f"temperature {temperature:g}")
        panel.legend()
    panels[0].set_ylabel("share of drafts")
    figure.savefig(DOCS / "masked.png", dpi=120)


def tables(report: dict[str, Any]) -> str:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    head = ("method", "cache", "N", "tree", "tokens/forward", "forwards saved", "tokens/s", "speed-up", "same output")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in report["ssd"]:
        same = "" if "same" not in row else "yes" if row["same"] else "no"
        tree = f"{row.get('tree', 'mixed')}{', worth 0.3' if 'worth' in row else ''}" if row["method"] == "ssd" else ""
        cells = [row["method"], row.get("cache", "none"), row.get("drafts", ""), tree, f"{row['tokens/forward']:.2f}"]
        cells += [f"{row['saved']:.0%}", number(row.get("tokens/s"), ".0f"), number(row.get("speed-up"), ".2f"), same]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| forwards saved at most, N | " + " | ".join(f"k = {k}" for k in range(1, 6)) + " | bound |", "|---" * 7 + "|"]
    for n in (3, 4, 5):
        own = [f for f in report["limits"] if f["drafts"] == n]
        shares = " | ".join(f"{f['reduction']:.1%}" for f in own)
        lines.append(f"| {n} | {shares} | {own[0]['bound']:.1%} |")
    head = ("temperature", "method", "drafter", "γ", "T", "tokens/target forward", "draft forwards", "tokens/s", "over ar")
    lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in report["specdiff"]:
        told = "".join(f", {key} {row[key]:g}" for key in ("adapt", "keep", "draft_temperature") if key in row)
        cells = [f"{row['temperature']:g}", row["method"] + told, row.get("draft", ""), row.get("k", ""), row.get("steps", "")]
        cells += [f"{row['tokens/forward']:.2f}", row["draft forwards"] or ""]
        cells += [number(row.get("tokens/s"), ".0f"), number(row.get("speed-up"), ".2f")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    said = "tokens/forward on all prompts, tokens/s on four of them at batch 1, median of three turns"
    return "\n".join([*lines, "", f"`python bench/masked.py DATA --count {report['count']}`: {report['machine']}; {said}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--only-ssd", action="store_true", help="measure only SSD anew")
    arguments = parser.parse_args()
    tokenizer = zoo.tokenizer()
    prompts = held_out_windows(arguments.data, tokenizer, arguments.count, 64).tolist()
    report: dict[str, Any] = json.loads((DOCS / "masked.json").read_text()) if arguments.only_ssd else {}
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
