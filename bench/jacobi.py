"""The numbers of docs/jacobi.md:  python bench/jacobi.py DATA [--count N] [--smollm]

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out documents, 96 more are decoded
greedily. Writes docs/jacobi.json and the tables of the page.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import torch
from page import DOCS, write_tables

import forerun
from forerun import zoo
from forerun.evaluate.compare import machine, parses
from forerun.evaluate.prompts import CODE
from forerun.train.data import Corpus, held_out_corpus
from forerun.train.objectives import Autoregressive

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


@torch.no_grad()
def loss(network: Any, corpus: Corpus) -> float:
    """Nats per token on 256 windows of 256 tokens."""
    parts = corpus.held_out(256, 256).split(16)
    return float(np.mean([float(Autoregressive().loss(network, part)) for part in parts]))


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


def measure(name: str, network: Any, corpus: Corpus, count: int, ways: dict[str, Any], timed: bool) -> dict[str, Any]:
    windows = corpus.held_out(count, GIVEN + MATCHED).tolist()
    prompts, truth = [w[:GIVEN] for w in windows], [w[GIVEN:] for w in windows]
    model = forerun.from_network(network, zoo.tokenizer(), name=name, lanes=24, max_context=256)
    rows = []
    for label, how in ways.items():
        results, _ = decode(model, prompts, 24, **how)
        tokens, error = per_forward(results)
        rows.append({"way": label, "tokens/forward": tokens, "error": error})
        rows[-1] |= quality(model, results, truth) if label == "ar" else {}
        print(name, rows[-1], flush=True)
    if timed:
        time_in_turns(model, prompts[:8], rows)
    return {"model": name, "loss": loss(network, corpus), "rows": rows}


def time_in_turns(model: Any, prompts: list[Any], rows: list[dict[str, Any]], turns: int = 5) -> None:
    """Tokens per second of every way, in turns, so that what disturbs the machine disturbs all: medians."""
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(turns):
        for row in rows:
            for batch in (1, 8):
                some, seconds = decode(model, prompts, batch, 32, **WAYS[row["way"]])
                rates[row["way"], batch].append(sum(r.stats.tokens for r in some) / seconds)
    for row in rows:
        row |= {f"tokens/s at {batch}": float(np.median(rates[row["way"], batch])) for batch in (1, 8)}


def smollm() -> list[dict[str, Any]]:
    """A real model that nobody distilled, on the pieces of code that `forerun compare` uses."""
    model, rows = forerun.load("smollm", lanes=8, max_context=512), []
    for label in ("ar", "jacobi, n = 16", "+ recycling", "multi-block + recycling", "lookahead", "lookup"):
        results, seconds = decode(model, CODE, 1, 48, **WAYS[label])
        batched, together = decode(model, CODE, 8, 48, **WAYS[label])
        rates = {
            f"tokens/s at {b}": sum(r.stats.tokens for r in x) / s for b, x, s in ((1, results, seconds), (8, batched, together))
        }
        rows.append({"way": label, "tokens/forward": per_forward(results)[0], **rates})
        print("smollm", rows[-1], flush=True)
    return rows


def tables(report: dict[str, Any]) -> str:
    lines = ["| model | held-out loss | jacobi, n = 16 | + recycling | entropy | parse | next 8 tokens right |", "|---" * 7 + "|"]
    for found in report["models"]:
        rows = {row["way"]: row for row in found["rows"]}
        cells = [f"{rows[way]['tokens/forward']:.2f} ± {rows[way]['error']:.2f}" for way in ("jacobi, n = 16", "+ recycling")]
        own = rows["ar"]
        cells += [f"{own['entropy']:.2f}", f"{own['parses']:.0%}", f"{own['match']:.0%}"]
        lines.append(f"| {found['model']} | {found['loss']:.3f} | {' | '.join(cells)} |")
    plain = {row["way"]: row for row in report["models"][0]["rows"]}
    for found in report["models"][1:2]:
        head = (found["model"], "tokens/forward", "zoo:ar's", "tokens/s, batch 1", "over ar", "batch 8", "over ar")
        lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        first = found["rows"][0]
        for row in found["rows"]:
            cells = [row["way"], f"{row['tokens/forward']:.2f} ± {row['error']:.2f}", f"{plain[row['way']]['tokens/forward']:.2f}"]
            for key in ("tokens/s at 1", "tokens/s at 8"):
                cells += [f"{row[key]:.0f}", f"{row[key] / first[key]:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    if report["smollm"]:
        lines += [
            "",
            "| SmolLM2-135M, not distilled | tokens/forward | tokens/s, batch 1 | over ar | batch 8 | over ar |",
            "|---" * 6 + "|",
        ]
        plain = report["smollm"][0]
        for row in report["smollm"]:
            rates = "".join(
                f" {row[f'tokens/s at {b}']:.1f} | {row[f'tokens/s at {b}'] / plain[f'tokens/s at {b}']:.2f} |" for b in (1, 8)
            )
            lines.append(f"| {row['way']} | {row['tokens/forward']:.2f} |{rates}")
    return "\n".join([*lines, "", f"`python bench/jacobi.py DATA --count {report['count']} --smollm`: {report['machine']}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--smollm", action="store_true")
    parser.add_argument("--times", action="store_true", help="measure only the seconds of zoo:consistency anew")
    arguments = parser.parse_args()
    corpus = held_out_corpus(arguments.data, zoo.tokenizer())
    if arguments.times:
        return retime(corpus)
    models = [
        measure(f"zoo:{name}", zoo.load(name, torch.float32, "cpu")[0], corpus, arguments.count, WAYS, timed=name == "consistency")
        for name in ("ar", "consistency")
    ]
    report = {"machine": machine(), "count": arguments.count, "models": models, "smollm": smollm() if arguments.smollm else []}
    publish(report)


def retime(corpus: Corpus) -> None:
    """The seconds are short and easily disturbed; what takes long need not be decoded again for them."""
    report = json.loads((DOCS / "jacobi.json").read_text())
    found = next(m for m in report["models"] if m["model"] == "zoo:consistency")
    prompts = [w[:GIVEN] for w in corpus.held_out(report["count"], GIVEN + MATCHED).tolist()]
    time_in_turns(forerun.load("zoo:consistency", lanes=8, max_context=256), prompts[:8], found["rows"])
    publish({**report, "machine": machine()})


def publish(report: dict[str, Any]) -> None:
    (DOCS / "jacobi.json").write_text(json.dumps(report, indent=1))
    write_tables("jacobi.md", tables(report))


if __name__ == "__main__":
    main()
