"""The numbers of docs/jacobi.md:  python bench/jacobi.py DATA [--count N] [--smollm [ADAPTERS]]

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out documents, 96 more are decoded
greedily. `--smollm` measures SmolLM2-135M, too; ADAPTERS, a folder that `bench/consistency.py --start smollm --lora 16` left, that
model distilled. Writes docs/jacobi.json and the tables of the page.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from page import DOCS, write_tables

import forerun
from forerun.evaluate.compare import machine, parses, surprises
from forerun.evaluate.prompts import CODE
from forerun.train.data import Corpus, held_out_corpus

GIVEN, WRITTEN, MATCHED = 64, 96, 8
WAYS: dict[str, dict[str, Any]] = {
    "ar": dict(method="ar"),
    "jacobi, n = 16": dict(method="jacobi", block=16),
    "jacobi, n = 4": dict(method="jacobi", block=4),
    "jacobi, n = 32": dict(method="jacobi", block=32),
    "+ recycling": dict(method="multiblock", block=16, blocks=1, refill=True),
    "+ recycling, n = 4": dict(method="multiblock", block=4, blocks=1, refill=True),
    "multi-block, K = 2": dict(method="multiblock", block=16, candidates=0),
    "multi-block + recycling": dict(method="multiblock", block=16),
    "multi-block + recycling, K = 3, r = 0.25, 7 runs": dict(method="multiblock", block=16, blocks=3, spawn=0.25, candidates=7),
    "lookahead": dict(method="lookahead"),
    "lookup": dict(method="lookup"),
}
LARGER = ("ar", "jacobi, n = 16", "+ recycling", "multi-block + recycling", "lookahead", "lookup")  # for models that take longer


def loss(model: forerun.Model, corpus: Corpus, count: int) -> float:
    """Nats per token on held-out windows of 256 tokens."""
    return float(np.mean(surprises(model, ((w[:1], w[1:]) for w in corpus.held_out(count, 256).tolist()))))


def decode(model: Any, prompts: list[Any], batch: int, tokens: int = WRITTEN, **how: Any) -> tuple[list[Any], float]:
    began, results = time.perf_counter(), []
    for i in range(0, len(prompts), batch):
        results += model.generate(prompts[i : i + batch], max_tokens=tokens, ignore_eos=True, **how)
    return results, time.perf_counter() - began


def per_forward(results: list[Any]) -> tuple[float, float]:
    """Tokens per forward over all, and the standard error of its mean over prompts."""
    own = [r.stats.tokens / r.stats.forwards for r in results]
    return sum(r.stats.tokens for r in results) / sum(r.stats.forwards for r in results), float(np.std(own) / math.sqrt(len(own)))


def quality(model: Any, results: list[Any], truth: list[list[int]]) -> dict[str, float]:
    entropies = []
    for r in results:
        counts = np.array(list(Counter(r.token_ids).values())) / len(r.token_ids)
        entropies.append(float(-(counts * np.log(counts)).sum()))
    matched = [r.token_ids[:MATCHED] == t[:MATCHED] for r, t in zip(results, truth)]
    # Held-out windows begin anywhere; whether what follows parses shows only after pieces of code that are whole.
    whole = model.generate(CODE, max_tokens=WRITTEN, ignore_eos=True)
    text = [model.decode([*r.prompt_ids, *r.token_ids]) for r in whole]
    return {"entropy": np.mean(entropies), "parses": np.mean([parses(t) for t in text]), "match": np.mean(matched)}


def measure(model: forerun.Model, judge: forerun.Model, corpus: Corpus, count: int, ways: Sequence[str]) -> dict[str, Any]:
    """What every way finds per forward, and how good the text is that all of them write."""
    windows = corpus.held_out(count, GIVEN + MATCHED).tolist()
    prompts, truth = [w[:GIVEN] for w in windows], [w[GIVEN:] for w in windows]
    rows = []
    for label in ways:
        results, _ = decode(model, prompts, 24, **WAYS[label])
        tokens, error = per_forward(results)
        rows.append({"way": label, "tokens/forward": tokens, "error": error})
        if label == "ar":
            nats = float(np.mean(surprises(judge, [(r.prompt_ids, r.token_ids) for r in results])))
            rows[-1] |= {"nats": nats, **quality(model, results, truth)}
        print(model.name, rows[-1], flush=True)
    return {"model": model.name, "loss": loss(model, corpus, 8 * count), "rows": rows}


def time_in_turns(model: forerun.Model, corpus: Corpus, rows: list[dict[str, Any]], turns: int = 5) -> None:
    """Tokens per second of every way, in turns, so that what disturbs the machine disturbs all: medians."""
    prompts = corpus.held_out(8, GIVEN).tolist()
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(turns):
        for row in rows:
            for batch in (1, 8):
                some, seconds = decode(model, prompts, batch, 32, **WAYS[row["way"]])
                rates[row["way"], batch].append(sum(r.stats.tokens for r in some) / seconds)
    for row in rows:
        row |= {f"tokens/s at {batch}": float(np.median(rates[row["way"], batch])) for batch in (1, 8)}


def before_and_after(names: Sequence[str], data: str, count: int, ways: Sequence[str], turns: int) -> list[dict[str, Any]]:
    """A model, and what was made of it, if there is such a one. Of the last the seconds are taken, too."""
    models = [forerun.load(name, device="cpu", dtype="float32", lanes=24, max_context=512) for name in names]
    corpus = held_out_corpus(data, models[0].tokenizer)
    found = [measure(model, models[0], corpus, count, ways) for model in models]
    time_in_turns(models[-1], corpus, found[-1]["rows"], turns)
    return found


def models_table(models: list[dict[str, Any]]) -> list[str]:
    head = ("model", "held-out loss", "jacobi, n = 16", "+ recycling", "its text's nats", "entropy", "parse", "next 8 tokens right")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for found in models:
        rows = {row["way"]: row for row in found["rows"]}
        cells = [f"{rows[way]['tokens/forward']:.2f} ± {rows[way]['error']:.2f}" for way in ("jacobi, n = 16", "+ recycling")]
        own = rows["ar"]
        cells += [f"{own['nats']:.2f}", f"{own['entropy']:.2f}", f"{own['parses']:.0%}", f"{own['match']:.0%}"]
        lines.append(f"| {found['model']} | {found['loss']:.3f} | {' | '.join(cells)} |")
    return lines


def ways_table(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Every way on what was made of a model, beside the model."""
    plain, first = {row["way"]: row for row in before["rows"]}, after["rows"][0]
    head = (after["model"], "tokens/forward", f"{before['model']}'s", "tokens/s, batch 1", "over ar", "batch 8", "over ar")
    lines = ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in after["rows"]:
        cells = [row["way"], f"{row['tokens/forward']:.2f} ± {row['error']:.2f}", f"{plain[row['way']]['tokens/forward']:.2f}"]
        for key in ("tokens/s at 1", "tokens/s at 8"):
            cells += [f"{row[key]:.0f}", f"{row[key] / first[key]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def tables(report: dict[str, Any]) -> str:
    ours, theirs = report["models"], report["smollm"]
    lines = [*models_table([*ours, *theirs]), *ways_table(*ours)]
    if theirs:
        lines += ways_table(theirs[0], theirs[-1])
    return "\n".join(
        [*lines, "", f"`python bench/jacobi.py DATA --count {report['count']} --smollm ADAPTERS`: {report['machine']}."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--smollm", nargs="?", const="", metavar="ADAPTERS", help="SmolLM2-135M, and with these adapters")
    parser.add_argument("--times", action="store_true", help="measure only the seconds of zoo:consistency anew")
    arguments = parser.parse_args()
    if arguments.times:
        return retime(arguments.data)
    ours = before_and_after(("zoo:ar", "zoo:consistency"), arguments.data, arguments.count, list(WAYS), turns=5)
    theirs = []
    if arguments.smollm is not None:
        names = ["smollm", *([f"smollm+{arguments.smollm}"] if arguments.smollm else [])]
        theirs = before_and_after(names, arguments.data, arguments.count // 2, LARGER, turns=2)
        theirs[-1]["model"] = "smollm, distilled" if arguments.smollm else "smollm"
    publish({"machine": machine(), "count": arguments.count, "models": ours, "smollm": theirs})


def retime(data: str) -> None:
    """The seconds are short and easily disturbed; what takes long need not be decoded again for them."""
    report = json.loads((DOCS / "jacobi.json").read_text())
    model = forerun.load("zoo:consistency", lanes=24, max_context=512)
    time_in_turns(model, held_out_corpus(data, model.tokenizer), report["models"][1]["rows"])
    publish({**report, "machine": machine()})


def publish(report: dict[str, Any]) -> None:
    (DOCS / "jacobi.json").write_text(json.dumps(report, indent=1))
    write_tables("jacobi.md", tables(report))


if __name__ == "__main__":
    main()
