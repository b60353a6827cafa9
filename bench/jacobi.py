"""The numbers of docs/jacobi.md:  python bench/jacobi.py DATA [--count N] [--of BASE MODEL ...] [--device cuda]

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out documents, 96 more are decoded
greedily. `--of` names a model and what was made of it, as LABEL=MODEL or MODEL, and may be given again:

    python bench/jacobi.py DATA --of zoo:ar zoo:consistency --of smollm progressive=smollm+ADAPTERS CLLM=smollm+ADAPTERS

where ADAPTERS are what `bench/consistency.py --start smollm --lora 16` left. Writes docs/jacobi.json and the tables of the page.
With `--times` only the seconds are taken, and stand beside those of the machine that measured the rest.
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

GIVEN, WRITTEN, MATCHED = 64, 96, 4
MATCHES = 256  # prompts, so that a few of their continuations come out right
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
NAMES = {"cuda": "GPU", "cpu": "CPU"}
FEW = ("ar", "jacobi, n = 16", "+ recycling", "multi-block + recycling")  # of the models that are there to compare with


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


def quality(model: Any, results: list[Any], corpus: Corpus) -> dict[str, float]:
    entropies = []
    for r in results:
        counts = np.array(list(Counter(r.token_ids).values())) / len(r.token_ids)
        entropies.append(float(-(counts * np.log(counts)).sum()))
    windows = corpus.held_out(MATCHES, GIVEN + MATCHED).tolist()
    written, _ = decode(model, [w[:GIVEN] for w in windows], 24, MATCHED, method="ar")
    matched = [r.token_ids == w[GIVEN:] for r, w in zip(written, windows)]
    # Held-out windows begin anywhere; whether what follows parses shows only after pieces of code that are whole.
    whole = model.generate(CODE, max_tokens=WRITTEN, ignore_eos=True)
    text = [model.decode([*r.prompt_ids, *r.token_ids]) for r in whole]
    found = {"entropy": np.mean(entropies), "parses": np.mean([parses(t) for t in text]), "match": np.mean(matched)}
    return {name: float(value) for name, value in found.items()}


def measure(model: forerun.Model, judge: forerun.Model, corpus: Corpus, count: int, ways: Sequence[str]) -> dict[str, Any]:
    """What every way finds per forward, and how good the text is that all of them write."""
    prompts, rows = corpus.held_out(count, GIVEN).tolist(), []
    for label in ways:
        results, _ = decode(model, prompts, 24, **WAYS[label])
        tokens, error = per_forward(results)
        rows.append({"way": label, "tokens/forward": tokens, "error": error})
        if label == "ar":
            nats = float(np.mean(surprises(judge, [(r.prompt_ids, r.token_ids) for r in results])))
            rows[-1] |= {"nats": nats, **quality(model, results, corpus)}
        print(model.name, rows[-1], flush=True)
    return {"loss": loss(model, corpus, 8 * count), "rows": rows}


def time_in_turns(model: forerun.Model, corpus: Corpus, rows: list[dict[str, Any]], turns: int) -> None:
    """Tokens per second of every way, in turns, so that what disturbs the machine disturbs all: medians."""
    prompts, kind = corpus.held_out(8, GIVEN).tolist(), model.backbone.device.type
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    for turn in range(turns + 1):
        for row in rows:
            for batch in (1, 8):
                some, seconds = decode(model, prompts, batch, 32, **WAYS[row["way"]])
                if turn:  # the first of all makes what is made once
                    rates[row["way"], batch].append(sum(r.stats.tokens for r in some) / seconds)
    for row in rows:
        row[kind] = {str(batch): float(np.median(rates[row["way"], batch])) for batch in (1, 8)}
        print(model.name, row["way"], row[kind], flush=True)


def loaded(names: Sequence[str], device: str) -> dict[str, forerun.Model]:
    """Models by their labels: LABEL=MODEL, or MODEL."""
    pairs = [name.split("=", 1) if "=" in name else (name, name) for name in names]
    return {label: forerun.load(name, device=device, dtype="float32", lanes=24, max_context=512) for label, name in pairs}


def before_and_after(names: Sequence[str], data: str, count: int, device: str, turns: int) -> list[dict[str, Any]]:
    """A model, what was made of it, and what else was, which is decoded in a few ways only."""
    models, found = loaded(names, device), []
    judge = next(iter(models.values()))
    corpus = held_out_corpus(data, judge.tokenizer)
    for place, (label, model) in enumerate(models.items()):
        found.append({"model": label, **measure(model, judge, corpus, count, FEW if place > 1 else list(WAYS))})
        time_in_turns(model, corpus, found[-1]["rows"], turns)
    return found


def models_table(models: list[dict[str, Any]]) -> list[str]:
    head = ["model", "held-out loss", "jacobi, n = 16", "+ recycling", "its text's nats", "entropy", "parse"]
    head.append(f"next {MATCHED} tokens right")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for found in models:
        rows = {row["way"]: row for row in found["rows"]}
        cells = [f"{rows[way]['tokens/forward']:.2f} ± {rows[way]['error']:.2f}" for way in ("jacobi, n = 16", "+ recycling")]
        own = rows["ar"]
        cells += [f"{own['nats']:.2f}", f"{own['entropy']:.2f}", f"{own['parses']:.0%}", f"{own['match']:.0%}"]
        lines.append(f"| {found['model']} | {found['loss']:.3f} | {' | '.join(cells)} |")
    return lines


def ways_table(models: list[dict[str, Any]]) -> list[str]:
    """Every way on what was made of a model, beside the model and the others."""
    found = [{row["way"]: row for row in model["rows"]} for model in models]
    rows = models[1]["rows"]
    kinds = [kind for kind in ("cuda", "cpu") if kind in rows[0]]
    head = [models[1]["model"], "tokens/forward", *(f"{model['model']}'s" for model in (models[0], *models[2:]))]
    head += [column for kind in kinds for batch in (1, 8) for column in (f"{NAMES[kind]} tokens/s, batch {batch}", "over ar")]
    lines = ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        others = [f"{own[row['way']]['tokens/forward']:.2f}" if row["way"] in own else "" for own in (found[0], *found[2:])]
        cells = [row["way"], f"{row['tokens/forward']:.2f} ± {row['error']:.2f}", *others]
        for kind in kinds:
            for batch in ("1", "8"):
                cells += [f"{row[kind][batch]:.0f}", f"{row[kind][batch] / rows[0][kind][batch]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def tables(report: dict[str, Any]) -> str:
    lines = models_table([model for models in report["groups"] for model in models])
    for models in report["groups"]:
        lines += ways_table(models) if len(models) > 1 else []
    made_on = "; ".join(f"{NAMES[kind]}: {words}" for kind, words in report["machines"].items())
    return "\n".join([*lines, "", f"`python bench/jacobi.py DATA --count {report['count']}`, float32. {made_on}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--of", nargs="+", action="append", metavar="MODEL", help="a model, and what was made of it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--times", action="store_true", help="measure only the seconds, of what docs/jacobi.json has")
    arguments = parser.parse_args()
    groups = arguments.of or [["zoo:ar", "zoo:consistency"]]
    kind = arguments.device.split(":")[0]
    if arguments.times:
        report = json.loads((DOCS / "jacobi.json").read_text())
        retime(report, groups, arguments)
    else:
        found = [before_and_after(names, arguments.data, arguments.count, arguments.device, arguments.turns) for names in groups]
        report = {"count": arguments.count, "machines": {}, "groups": found}
    report["machines"][kind] = machine()
    (DOCS / "jacobi.json").write_text(json.dumps(report, indent=1))
    write_tables("jacobi.md", tables(report))


def retime(report: dict[str, Any], groups: list[list[str]], arguments: argparse.Namespace) -> None:
    """The seconds are short and easily disturbed; what takes long need not be decoded again for them."""
    rows = {model["model"]: model["rows"] for models in report["groups"] for model in models}
    for names in groups:
        for label, model in loaded(names[1:2], arguments.device).items():
            time_in_turns(model, held_out_corpus(arguments.data, model.tokenizer), rows[label], arguments.turns)


if __name__ == "__main__":
    main()
