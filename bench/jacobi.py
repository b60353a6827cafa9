"""The numbers of docs/jacobi.md:  python bench/jacobi.py DATA [--of BASE MODEL ...] [--device cuda]

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out
documents, 96 more are decoded greedily. `--of` names a model and what was made of it, as
LABEL=MODEL or MODEL, and may be given again:

    python bench/jacobi.py DATA --of zoo:ar zoo:consistency \\
        --of smollm progressive=smollm+ADAPTERS CLLM=smollm+ADAPTERS

where ADAPTERS are what `bench/consistency.py --start smollm --lora 16` left. Writes
docs/jacobi.json, replacing what it had of these models, and the tables of the page. With `--times`
only the seconds are taken, and stand beside those of another machine.
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
from forerun.evaluate.judge import surprises
from forerun.profile.machine import machine
from forerun.requests.result import Result
from forerun.train.data import Corpus, held_out_corpus

GIVEN = 64
WRITTEN = 96
MATCHED = 4
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
    "multi-block + recycling, K = 3, r = 0.25, 7 runs": dict(
        method="multiblock", block=16, blocks=3, spawn=0.25, candidates=7
    ),
    "lookahead": dict(method="lookahead"),
    "lookup": dict(method="lookup"),
}
NAMES = {"cuda": "GPU", "cpu": "CPU"}
# of the models that are there to compare with
FEW = ("ar", "jacobi, n = 16", "+ recycling", "multi-block + recycling")


def loss(model: forerun.Model, corpus: Corpus, count: int) -> float:
    """Nats per token on held-out windows of 256 tokens."""
    windows = corpus.held_out(count, 256).tolist()
    return float(np.mean(surprises(model, [(window[:1], window[1:]) for window in windows])))


def decode(
    model: forerun.Model,
    prompts: Sequence[Sequence[int]],
    batch: int,
    tokens: int = WRITTEN,
    **options: Any,
) -> tuple[list[Result], float]:
    """The results, and the seconds they took."""
    results: list[Result] = []
    began = time.perf_counter()
    for i in range(0, len(prompts), batch):
        group = prompts[i : i + batch]
        results += model.generate_all(group, max_tokens=tokens, ignore_eos=True, **options)
    return results, time.perf_counter() - began


def per_forward(results: Sequence[Result]) -> tuple[float, float]:
    """Tokens per forward over all, and the standard error of its mean over prompts."""
    tokens = sum(r.stats.tokens for r in results)
    forwards = sum(r.stats.forwards for r in results)
    by_prompt = [r.stats.tokens / r.stats.forwards for r in results]
    return tokens / forwards, float(np.std(by_prompt) / math.sqrt(len(by_prompt)))


def entropy(result: Result) -> float:
    """Of the tokens that were written: low where a text repeats itself."""
    shares = np.array(list(Counter(result.token_ids).values())) / len(result.token_ids)
    return float(-(shares * np.log(shares)).sum())


def quality(model: forerun.Model, results: Sequence[Result], corpus: Corpus) -> dict[str, float]:
    windows = corpus.held_out(MATCHES, GIVEN + MATCHED).tolist()
    written, _ = decode(model, [w[:GIVEN] for w in windows], 24, MATCHED, method="ar")
    matched = [r.token_ids == w[GIVEN:] for r, w in zip(written, windows)]
    return {
        "entropy": float(np.mean([entropy(r) for r in results])),
        "match": float(np.mean(matched)),
    }


def measure(
    model: forerun.Model, judge: forerun.Model, corpus: Corpus, count: int, ways: Sequence[str]
) -> dict[str, Any]:
    """What every way finds per forward, and how good the text is that all of them write; `judge` is
    the model before."""
    prompts = corpus.held_out(count, GIVEN).tolist()
    rows = []
    before = [entropy(r) for r in decode(judge, prompts, 24, method="ar")[0]]
    for label in ways:
        results, _ = decode(model, prompts, 24, **WAYS[label])
        tokens, error = per_forward(results)
        rows.append(
            {
                "way": label,
                "tokens/forward": tokens,
                "error": error,
                "adjusted for repetition": adjusted_for_repetition(results, before),
            }
        )
        if label == "ar":
            nats = float(np.mean(surprises(judge, [(r.prompt_ids, r.token_ids) for r in results])))
            rows[-1] |= {"nats": nats, **quality(model, results, corpus)}
        print(model.name, rows[-1], flush=True)
    return {"prompts": count, "loss": loss(model, corpus, 8 * count), "rows": rows}


def adjusted_for_repetition(results: Sequence[Result], before: list[float]) -> float:
    """Tokens per forward, had the texts been as varied as those of the model before: repetition is
    easy to foresee. Forwards per token are fitted by a line in the entropy of a text, which is read
    at the entropies of the texts before."""
    forwards = [r.stats.forwards / r.stats.tokens for r in results]
    slope, constant = np.polyfit([entropy(r) for r in results], forwards, 1)
    return float(1 / np.mean(slope * np.array(before) + constant))


def time_in_turns(
    model: forerun.Model, corpus: Corpus, rows: list[dict[str, Any]], turns: int
) -> None:
    """Tokens per second of every way, in turns, so that what disturbs the machine disturbs all:
    medians."""
    prompts = corpus.held_out(8, GIVEN).tolist()
    kind = model.backbone.device.type
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    for turn in range(turns + 1):
        for row in rows:
            for batch in (1, 8):
                results, seconds = decode(model, prompts, batch, 32, **WAYS[row["way"]])
                if turn:  # the first warms up
                    tokens = sum(r.stats.tokens for r in results)
                    rates[row["way"], batch].append(tokens / seconds)
    for row in rows:
        row[kind] = {str(batch): float(np.median(rates[row["way"], batch])) for batch in (1, 8)}
        print(model.name, row["way"], row[kind], flush=True)


def label_of(name: str) -> str:
    """What LABEL=MODEL is called, or MODEL."""
    return name.partition("=")[0]


def loaded(names: Sequence[str], device: str) -> dict[str, forerun.Model]:
    """Models by their labels."""
    models = {}
    for name in names:
        source = name.partition("=")[2] or name
        models[label_of(name)] = forerun.load(
            source, device=device, dtype="float32", lanes=24, max_context=512
        )
    return models


def before_and_after(names: Sequence[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A model, what was made of it, and what else was, which is decoded in a few ways only."""
    models = loaded(names, arguments.device)
    reports = []
    judge = next(iter(models.values()))
    corpus = held_out_corpus(arguments.data, judge.tokenizer)
    for place, (label, model) in enumerate(models.items()):
        ways = [way for way in WAYS if way in FEW or (place < 2 and way in arguments.ways)]
        reports.append({"model": label, **measure(model, judge, corpus, arguments.count, ways)})
        time_in_turns(model, corpus, reports[-1]["rows"], arguments.turns)
    return reports


def models_table(models: list[dict[str, Any]]) -> list[str]:
    """A model, and those that were made of it."""
    head = [
        "model",
        "prompts",
        "held-out loss",
        *(f"{way} (adjusted for repetition)" for way in FEW[1:3]),
        "its text's nats",
    ]
    head += ["entropy", f"next {MATCHED} tokens right"]
    kinds = [kind for kind in NAMES if all(kind in model["rows"][1] for model in models)]
    head += [f"{FEW[1]}: {NAMES[kind]} tokens/s, batch 1, 8" for kind in kinds]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for place, model in enumerate(models):
        rows = {row["way"]: row for row in model["rows"]}
        cells = [
            f"{rows[way]['tokens/forward']:.2f} ± {rows[way]['error']:.2f}" for way in FEW[1:3]
        ]
        if place:
            cells = [
                f"{cell} ({rows[way]['adjusted for repetition']:.2f})"
                for cell, way in zip(cells, FEW[1:3])
            ]
        plain = rows["ar"]
        cells += [
            f"{plain['nats']:.2f}",
            f"{plain['entropy']:.2f}",
            f"{plain['match']:.0%}",
        ]
        cells += [
            ", ".join(f"{rate:.0f}" for rate in rows[FEW[1]][kind].values()) for kind in kinds
        ]
        lines.append(
            f"| {model['model']} | {model['prompts']} | {model['loss']:.3f} | {' | '.join(cells)} |"
        )
    return [*lines, ""]


def ways_table(models: list[dict[str, Any]]) -> list[str]:
    """Every way on what was made of a model, beside the model and the others."""
    by_way = [{row["way"]: row for row in model["rows"]} for model in models]
    rows = models[1]["rows"]
    kinds = [kind for kind in NAMES if kind in rows[0]]
    head = [
        models[1]["model"],
        "tokens/forward",
        *(f"{model['model']}'s" for model in (models[0], *models[2:])),
    ]
    head += [
        column
        for kind in kinds
        for batch in (1, 8)
        for column in (f"{NAMES[kind]} tokens/s, batch {batch}", "over ar")
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        others = [
            f"{other[row['way']]['tokens/forward']:.2f}" if row["way"] in other else ""
            for other in (by_way[0], *by_way[2:])
        ]
        cells = [row["way"], f"{row['tokens/forward']:.2f} ± {row['error']:.2f}", *others]
        for kind in kinds:
            for batch in ("1", "8"):
                cells += [
                    f"{row[kind][batch]:.0f}",
                    f"{row[kind][batch] / rows[0][kind][batch]:.2f}",
                ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def tables(report: dict[str, Any]) -> str:
    lines = [line for models in report["groups"] for line in models_table(models)]
    for models in report["groups"]:
        lines += ways_table(models) if len(models) > 1 else []
    groups = [[model["model"] for model in models] for models in report["groups"]]
    flags = " ".join(
        f"--of {' '.join([first, *(n if ':' in n else f'{n}=MODEL' for n in others)])}"
        for first, *others in groups
    )
    made_on = "; ".join(f"{NAMES[kind]}: {words}" for kind, words in report["machines"].items())
    return "\n".join([*lines, f"`python bench/jacobi.py DATA {flags}`, float32. {made_on}."])


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", help="without it, only the tables are written anew")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument(
        "--of", nargs="+", action="append", metavar="MODEL", help="a model, and what was made of it"
    )
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
    parser.add_argument(
        "--times", action="store_true", help="only the seconds, of what was measured before"
    )
    return parser


def main() -> None:
    parser = argument_parser()
    arguments = parser.parse_args()
    file = DOCS / "jacobi.json"
    groups = arguments.of or [["zoo:ar", "zoo:consistency"]]
    report = json.loads(file.read_text()) if file.exists() else {"machines": {}, "groups": []}
    if arguments.data is None:
        write_tables("jacobi.md", tables(report))
        return
    for names in groups:
        known = [models[0]["model"] for models in report["groups"]]
        if arguments.times and label_of(names[0]) not in known:
            parser.error(
                f"--times: {file} has nothing of {names[0]}; measure it first, without --times"
            )
        if arguments.times:
            retime(report, names, arguments)
        else:
            remeasure(report, names, arguments)
        report["machines"][arguments.device.split(":")[0]] = machine()
        file.write_text(json.dumps(report, indent=1))
        write_tables("jacobi.md", tables(report))


def remeasure(report: dict[str, Any], names: list[str], arguments: argparse.Namespace) -> None:
    """Put a group of models in place of what the report had of it."""
    models = before_and_after(names, arguments)
    first = models[0]["model"]
    others = [group for group in report["groups"] if group[0]["model"] != first]
    # ours first
    report["groups"] = sorted([*others, models], key=lambda group: group[0]["model"], reverse=True)


def retime(report: dict[str, Any], names: list[str], arguments: argparse.Namespace) -> None:
    """The seconds are short and easily disturbed; what takes long need not be decoded again for
    them."""
    [group] = [models for models in report["groups"] if models[0]["model"] == label_of(names[0])]
    for label, model in loaded(names, arguments.device).items():
        for rows in (known["rows"] for known in group if known["model"] == label):
            time_in_turns(
                model, held_out_corpus(arguments.data, model.tokenizer), rows, arguments.turns
            )


if __name__ == "__main__":
    main()
