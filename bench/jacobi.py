"""The numbers of docs/jacobi.md:  python bench/jacobi.py DATA [--of BASE MODEL ...] [--device cuda]

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out documents, 96 more are decoded
greedily. `--of` names a model and what was made of it, as LABEL=MODEL or MODEL, and may be given again:

    python bench/jacobi.py DATA --of zoo:ar zoo:consistency --of smollm progressive=smollm+ADAPTERS CLLM=smollm+ADAPTERS

where ADAPTERS are what `bench/consistency.py --start smollm --lora 16` left. Writes docs/jacobi.json, replacing what it had of
these models, and the tables of the page. With `--times` only the seconds are taken, and stand beside those of another machine.
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


def entropy(result: Any) -> float:
    """Of the tokens that were written: low where a text repeats itself."""
    shares = np.array(list(Counter(result.token_ids).values())) / len(result.token_ids)
    return float(-(shares * np.log(shares)).sum())


def quality(model: Any, results: list[Any], corpus: Corpus) -> dict[str, float]:
    windows = corpus.held_out(MATCHES, GIVEN + MATCHED).tolist()
    written, _ = decode(model, [w[:GIVEN] for w in windows], 24, MATCHED, method="ar")
    matched = [r.token_ids == w[GIVEN:] for r, w in zip(written, windows)]
    # Held-out windows begin anywhere; whether what follows parses shows only after pieces of code that are whole.
    whole = model.generate(CODE, max_tokens=WRITTEN, ignore_eos=True)
    text = [model.decode([*r.prompt_ids, *r.token_ids]) for r in whole]
    found = {
        "entropy": np.mean([entropy(r) for r in results]),
        "parses": np.mean([parses(t) for t in text]),
        "match": np.mean(matched),
    }
    return {name: float(value) for name, value in found.items()}


def measure(model: forerun.Model, judge: forerun.Model, corpus: Corpus, count: int, ways: Sequence[str]) -> dict[str, Any]:
    """What every way finds per forward, and how good the text is that all of them write; `judge` is the model before."""
    prompts, rows = corpus.held_out(count, GIVEN).tolist(), []
    before = [entropy(r) for r in decode(judge, prompts, 24, method="ar")[0]]
    for label in ways:
        results, _ = decode(model, prompts, 24, **WAYS[label])
        tokens, error = per_forward(results)
        rows.append({"way": label, "tokens/forward": tokens, "error": error, "as varied as before": evened(results, before)})
        if label == "ar":
            nats = float(np.mean(surprises(judge, [(r.prompt_ids, r.token_ids) for r in results])))
            rows[-1] |= {"nats": nats, **quality(model, results, corpus)}
        print(model.name, rows[-1], flush=True)
    return {"prompts": count, "loss": loss(model, corpus, 8 * count), "rows": rows}


def evened(results: list[Any], before: list[float]) -> float:
    """Tokens per forward, had the texts been as varied as those of the model before: what repeats itself is easily foreseen.
    Forwards per token as a line in a text's entropy, read at the entropies of the texts before."""
    forwards = [r.stats.forwards / r.stats.tokens for r in results]
    slope, constant = np.polyfit([entropy(r) for r in results], forwards, 1)
    return float(1 / np.mean(slope * np.array(before) + constant))


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


def label_of(name: str) -> str:
    """What LABEL=MODEL is called, or MODEL."""
    return name.partition("=")[0]


def loaded(names: Sequence[str], device: str) -> dict[str, forerun.Model]:
    """Models by their labels."""
    place = dict(device=device, dtype="float32", lanes=24, max_context=512)
    return {label_of(name): forerun.load(name.partition("=")[2] or name, **place) for name in names}


def before_and_after(names: Sequence[str], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A model, what was made of it, and what else was, which is decoded in a few ways only."""
    models, found = loaded(names, asked.device), []
    judge = next(iter(models.values()))
    corpus = held_out_corpus(asked.data, judge.tokenizer)
    for place, (label, model) in enumerate(models.items()):
        ways = [way for way in WAYS if way in FEW or (place < 2 and way in asked.ways)]
        found.append({"model": label, **measure(model, judge, corpus, asked.count, ways)})
        time_in_turns(model, corpus, found[-1]["rows"], asked.turns)
    return found


def models_table(models: list[dict[str, Any]]) -> list[str]:
    """A model, and those that were made of it."""
    head = ["model", "prompts", "held-out loss", *(f"{way} (as varied as before)" for way in FEW[1:3]), "its text's nats"]
    head += ["entropy", "parse", f"next {MATCHED} tokens right"]
    kinds = [kind for kind in NAMES if all(kind in model["rows"][1] for model in models)]
    head += [f"{FEW[1]}: {NAMES[kind]} tokens/s, batch 1, 8" for kind in kinds]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for place, found in enumerate(models):
        rows = {row["way"]: row for row in found["rows"]}
        cells = [f"{rows[way]['tokens/forward']:.2f} ± {rows[way]['error']:.2f}" for way in FEW[1:3]]
        if place:
            cells = [f"{cell} ({rows[way]['as varied as before']:.2f})" for cell, way in zip(cells, FEW[1:3])]
        own = rows["ar"]
        cells += [f"{own['nats']:.2f}", f"{own['entropy']:.2f}", f"{own['parses']:.0%}", f"{own['match']:.0%}"]
        cells += [", ".join(f"{rate:.0f}" for rate in rows[FEW[1]][kind].values()) for kind in kinds]
        lines.append(f"| {found['model']} | {found['prompts']} | {found['loss']:.3f} | {' | '.join(cells)} |")
    return [*lines, ""]


def ways_table(models: list[dict[str, Any]]) -> list[str]:
    """Every way on what was made of a model, beside the model and the others."""
    found = [{row["way"]: row for row in model["rows"]} for model in models]
    rows = models[1]["rows"]
    kinds = [kind for kind in NAMES if kind in rows[0]]
    head = [models[1]["model"], "tokens/forward", *(f"{model['model']}'s" for model in (models[0], *models[2:]))]
    head += [column for kind in kinds for batch in (1, 8) for column in (f"{NAMES[kind]} tokens/s, batch {batch}", "over ar")]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        others = [f"{own[row['way']]['tokens/forward']:.2f}" if row["way"] in own else "" for own in (found[0], *found[2:])]
        cells = [row["way"], f"{row['tokens/forward']:.2f} ± {row['error']:.2f}", *others]
        for kind in kinds:
            for batch in ("1", "8"):
                cells += [f"{row[kind][batch]:.0f}", f"{row[kind][batch] / rows[0][kind][batch]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def tables(report: dict[str, Any]) -> str:
    lines = [line for models in report["groups"] for line in models_table(models)]
    for models in report["groups"]:
        lines += ways_table(models) if len(models) > 1 else []
    groups = [[model["model"] for model in models] for models in report["groups"]]
    asked = " ".join(f"--of {' '.join([first, *(n if ':' in n else f'{n}=MODEL' for n in others)])}" for first, *others in groups)
    made_on = "; ".join(f"{NAMES[kind]}: {words}" for kind, words in report["machines"].items())
    return "\n".join([*lines, f"`python bench/jacobi.py DATA {asked}`, float32. {made_on}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--of", nargs="+", action="append", metavar="MODEL", help="a model, and what was made of it")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=list(WAYS),
        choices=list(WAYS),
        metavar="WAY",
        help="which ways besides the few that tables need",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=5, help="in which seconds are taken")
    parser.add_argument("--times", action="store_true", help="only the seconds, of what was measured before")
    asked = parser.parse_args()
    file, groups = DOCS / "jacobi.json", asked.of or [["zoo:ar", "zoo:consistency"]]
    report = json.loads(file.read_text()) if file.exists() else {"machines": {}, "groups": []}
    for names in groups:
        if asked.times:
            if not any(models[0]["model"] == label_of(names[0]) for models in report["groups"]):
                parser.error(f"--times: {file} has nothing of {names[0]}; measure it first, without --times")
            retime(report, names, asked)
        else:
            found = before_and_after(names, asked)
            others = [models for models in report["groups"] if models[0]["model"] != found[0]["model"]]
            report["groups"] = sorted([*others, found], key=lambda models: models[0]["model"], reverse=True)  # ours first
        report["machines"][asked.device.split(":")[0]] = machine()
        file.write_text(json.dumps(report, indent=1))
        write_tables("jacobi.md", tables(report))


def retime(report: dict[str, Any], names: list[str], asked: argparse.Namespace) -> None:
    """The seconds are short and easily disturbed; what takes long need not be decoded again for them."""
    [group] = [models for models in report["groups"] if models[0]["model"] == label_of(names[0])]
    for label, model in loaded(names, asked.device).items():
        for rows in (found["rows"] for found in group if found["model"] == label):
            time_in_turns(model, held_out_corpus(asked.data, model.tokenizer), rows, asked.turns)


if __name__ == "__main__":
    main()
