"""Forwards against their floors and decoding beside the library, on one GPU, in one run; and the
page that shows it:

    python bench/gpu.py --json FILE [--without-compiled] [--blas cublaslt] [--no-ahead]
    python bench/gpu.py --publish FILE        (writes docs/gpu.md from FILE; needs no GPU)

Models have the shapes of real ones and random weights: only time is measured. How many rows methods
run, and how many tokens they find, is counted on trained models, those of the zoo.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from page import DOCS, write_tables

import forerun
from forerun.engine import graphs
from forerun.engine.engine import Engine
from forerun.engine.pack import Batch
from forerun.evaluate.prompts import CODE
from forerun.families.causal import Tail
from forerun.profile.decoding import time_splits
from forerun.profile.forward import Ceilings, ForwardSize, TimedForward, ceilings, timed_forward
from forerun.profile.latency import seconds_at, verdict_batch
from forerun.profile.shapes import random_network
from forerun.sequence.rows import Plan, TailedText

CUDA = torch.device("cuda")
HALF = torch.bfloat16
CONTEXT = 1024
TURNS = 7  # in which forwards are timed
TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512)
SHARES: dict[str, dict[str, Any]] = {
    "ar": {},
    "jacobi": {"block": 16},
    "lookup": {},
    "lookahead": {},
    "multiblock": {},
}
METHODS: list[tuple[str, str, dict[str, Any]]] = [
    ("zoo:ar", "lookup", {}),
    ("zoo:ar", "speculative", {"draft": "zoo:drafter"}),
    ("zoo:ar", "specdiff", {"draft": "zoo:block"}),
    ("zoo:ar", "lookahead", {}),
    ("zoo:consistency", "jacobi", {}),
    ("zoo:consistency", "multiblock", {}),
    ("zoo:consistency", "multiblock", {"blocks": 3, "spawn": 0.25, "candidates": 7}),
    ("zoo:any-subset", "assd", {}),
    ("zoo:block", "s2d2-exact", {}),
    ("zoo:block", "s2d2-exact", {"ahead": "every"}),
]


def forwards(model: forerun.Model, best: Ceilings) -> dict[str, Any]:
    """Forwards of a chain by its length, of a batch, and of a chain with candidates."""

    def timed(batch: Batch, lanes: int, tokens: int) -> TimedForward:
        return timed_forward(model, batch, ForwardSize(lanes, CONTEXT, tokens), best, TURNS)

    chain = {n: timed(verdict_batch(model, 1, CONTEXT, n), 1, n) for n in TOKENS}
    batched = [
        timed(verdict_batch(model, lanes, CONTEXT, n), lanes, n)
        for lanes, n in ((8, 1), (32, 1), (32, 16))
    ]
    whole = timed(candidates(model, 64, 4), 1, 256)
    short = timed(candidates(model, 64, 4, 16), 1, 112)
    return {
        "chain": [one.as_dict() for one in chain.values()],
        "batch": [one.as_dict() for one in batched],
        "candidates": {
            "64 tokens x 4": whole.seconds / chain[64].seconds,
            "64 tokens, 3 tails of 16": short.seconds / chain[64].seconds,
        },
    }


def by_fastest_kernels(network: Any, best: Ceilings) -> dict[str, Any]:
    """The same forwards where bits may hang on the batch."""
    model = forerun.from_network(
        network, None, name="fastest", lanes=32, max_context=4 * CONTEXT, deterministic=False
    )
    return forwards(model, best)


def candidates(model: forerun.Model, length: int, count: int, tail: int | None = None) -> Batch:
    """A chain after the text, and others that leave it at its first token, as recycling verifies
    them."""
    text = np.arange(CONTEXT, dtype=np.int32)
    tails = [Tail(0, np.full(tail or length, 5 + i).tolist()) for i in range(count - 1)]
    plan = TailedText.of(text, range(length), tails)
    first, *others = plan.reads
    # the text is in slots already
    return model.host.batch([(0, replace(plan, reads=[first[1:], *others]), CONTEXT)])


def canvases(model: forerun.Model, best: Ceilings, block: int = 32) -> dict[str, Any]:
    """A block of a masked model that sees all around it, once and in five copies, as SSD verifies
    them."""

    def packed(copies: int) -> TimedForward:
        index = np.arange(copies * block, dtype=np.int32)
        rows = np.zeros((5, CONTEXT + copies * block), np.int32)
        rows[1, :CONTEXT] = np.arange(CONTEXT)
        rows[2, :CONTEXT] = CONTEXT
        rows[1, CONTEXT:] = CONTEXT // 2 + index % block
        rows[2, CONTEXT:] = CONTEXT
        rows[3, CONTEXT:] = CONTEXT + index // block * block
        rows[4, CONTEXT:] = rows[3, CONTEXT:] + block
        plan = Plan(rows, [CONTEXT + index], CONTEXT)
        batch = model.host.batch([(0, plan, CONTEXT)])
        size = ForwardSize(1, CONTEXT, copies * block)
        return timed_forward(model, batch, size, best, TURNS)

    one = packed(1)
    five = packed(5)
    return {"one": one.as_dict(), "five": five.as_dict(), "ratio": five.seconds / one.seconds}


def per_token(
    generate: Callable[[int], Any], few: int = 8, many: int = 136, turns: int = 3
) -> float:
    """Seconds per token, reading the prompt not counted: long outputs against short ones."""

    def taken(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        generate(count)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for count in (many, few, many):
        generate(count)
    return statistics.median((taken(many) - taken(few)) / (many - few) for _ in range(turns))


def side_by_side(network: Any, model: forerun.Model, compiled: bool) -> dict[str, float]:
    """Greedy decoding after a prompt of 1,024 tokens: the library's ways and ours, on the same
    weights."""
    prompt = np.random.default_rng(0).integers(10, 50_000, CONTEXT).tolist()
    ids = torch.tensor([prompt], device=CUDA)

    def library(**options: Any) -> Callable[[int], Any]:
        return lambda count: network.generate(
            ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, **options
        )

    decoders: dict[str, Callable[[int], Any]] = {
        "forerun ar": lambda count: model.generate(
            prompt, method="ar", max_tokens=count, ignore_eos=True
        ),
        "transformers generate": library(),
    }
    if compiled:
        static = library(cache_implementation="static")
        decoders["transformers generate, compiled static cache"] = static
    found = {}
    for name, decode in decoders.items():
        network.set_attn_implementation("sdpa")
        found[name] = per_token(decode)
        print(f"{name}: {1 / found[name]:.1f} tokens/s", flush=True)
    return found


def shares(model: forerun.Model, methods: Sequence[str] = tuple(SHARES)) -> list[dict[str, Any]]:
    """Where the time of greedy decoding goes, alone and in batches."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(10, 50_000, CONTEXT).tolist() for _ in range(32)]
    rows = []
    for batch in (1, 8, 32):
        for name in methods:
            [split] = time_splits(
                model,
                [(name, SHARES[name])],
                prompts[:batch],
                batch=batch,
                turns=3,
                max_tokens=96,
                ignore_eos=True,
            )
            rows.append(
                {
                    "batch": batch,
                    **split.as_dict(),
                    "outside": (split.total - split.forward) / split.forward,
                }
            )
            print(rows[-1], flush=True)
    return rows


def seven_billion() -> tuple[torch.nn.Module, forerun.Model]:
    network = random_network("qwen2.5-7b", CUDA, HALF)
    settings: dict[str, Any] = dict(lanes=32, max_context=4 * CONTEXT)
    return network, forerun.from_network(network, None, name="qwen2.5-7b", **settings)


@torch.inference_mode()
def measure(compiled: bool, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure everything. `keep` gets the report after every part: a machine may be taken away."""
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
    }
    masked = forerun.from_network(
        random_network("llada-8b", CUDA, HALF),
        None,
        name="llada-8b",
        lanes=2,
        max_context=2 * CONTEXT,
    )
    best = ceilings(masked.backbone)
    report["machine"] = best.as_dict()
    report["canvases"] = canvases(masked, best)
    keep(report)
    del masked
    gc.collect()
    torch.cuda.empty_cache()
    network, model = seven_billion()
    report["forward"] = forwards(model, best)
    report["fastest"] = by_fastest_kernels(network, best)
    keep(report)
    report["shares"] = shares(model)
    report["captures"] = {
        "count": len(model.host.runner.captured),
        "seconds": model.host.runner.seconds,
    }
    keep(report)
    report["decode"] = side_by_side(network, model, compiled)
    assert model.host.runner.capture_enabled, "captures were given up on the way"
    keep(report)
    return report


@torch.inference_mode()
def measure_shares(methods: Sequence[str], keep: Callable[[dict[str, Any]], None]) -> None:
    """Only where the time of these methods goes."""
    _, model = seven_billion()
    keep({"shares": shares(model, methods)})


def rows_and_tokens(name: str, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a method runs and finds in a forward of a trained model, the prompt not counted."""
    model = forerun.load(name, lanes=1, max_context=512)
    results = [
        model.generate(prompt, method=method, max_tokens=64, ignore_eos=True, **options)
        for prompt in CODE
    ]
    forwards = sum(r.stats.forwards for r in results)
    rows = model.host.work.rows - sum(len(r.prompt_ids or ()) - 1 for r in results)
    return {
        "model": name,
        "method": method,
        "options": options,
        "rows": rows / forwards,
        "tokens": sum(r.stats.tokens for r in results) / forwards,
        "drafts": sum(r.stats.draft_forwards for r in results) / forwards,
    }


def table(*rows: Sequence[str]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def forward_table(report: dict[str, Any]) -> str:
    chain, batch, candidates = (
        report["forward"][part] for part in ("chain", "batch", "candidates")
    )
    rows = [
        (
            f"Qwen2.5-7B shape, bf16, after {CONTEXT} tokens",
            "ms",
            "times its floor",
            "times one token's",
            "by the fastest kernels instead, ms",
        )
    ]
    fastest = report["fastest"]["chain"] + report["fastest"]["batch"]
    for cell, other in zip([*chain, *batch], fastest, strict=True):
        many = (
            f"{cell['batch']} sequences x {cell['tokens']}"
            if cell["batch"] > 1
            else f"{cell['tokens']} token(s)"
        )
        ms = 1e3 * cell["seconds"]
        floors = cell["times"]
        ones = cell["seconds"] / chain[0]["seconds"]
        rows.append(
            (many, f"{ms:.2f}", f"{floors:.2f}", f"{ones:.2f}", f"{1e3 * other['seconds']:.2f}")
        )
    sixty_four = next(cell["seconds"] for cell in chain if cell["tokens"] == 64)
    for name, ratio in candidates.items():
        ms = 1e3 * ratio * sixty_four
        ones = ratio * sixty_four / chain[0]["seconds"]
        rows.append(
            (
                f"{name} candidates: {ratio:.2f} times a chain of 64",
                f"{ms:.2f}",
                "",
                f"{ones:.2f}",
                "",
            )
        )
    return table(*rows)


def break_even(report: dict[str, Any]) -> str:
    chain = {cell["tokens"]: cell["seconds"] for cell in report["forward"]["chain"]}
    rows = [
        (
            "method, on",
            "rows per forward",
            "break-even tokens per forward",
            "tokens per forward",
            "drafts per forward",
        )
    ]
    for row in report["methods"]:
        options = "".join(f", {key} = {value}" for key, value in row["options"].items())
        even = seconds_at(chain, round(row["rows"])) / chain[1]
        numbers = (row["rows"], row["tokens"], row["drafts"])
        many, tokens, drafts = (f"{number:.1f}" for number in numbers)
        rows.append(
            (f"`{row['method']}`{options}, {row['model']}", many, f"{even:.2f}", tokens, drafts)
        )
    return table(*rows)


def decode_table(report: dict[str, Any]) -> str:
    ours = report["decode"]["forerun ar"]
    rows = [("greedy decoding, batch 1", "tokens/s", "forerun `ar` is faster by")]
    rows += [
        (name, f"{1 / taken:.1f}", f"{taken / ours:.2f}")
        for name, taken in report["decode"].items()
    ]
    return table(*rows)


def shares_table(report: dict[str, Any]) -> str:
    parts = ("forward", "rules", "host", "idle")
    rows = [("where the time goes", "batch", "tokens/s", *parts, "outside, of the forward")]
    for row in report["shares"]:
        cells = (f"{row[name] / row['total']:.0%}" for name in parts)
        rows.append(
            (
                row["method"],
                str(row["batch"]),
                f"{row['tokens/s']:.0f}",
                *cells,
                f"{row['outside']:.0%}",
            )
        )
    return table(*rows)


def canvas_table(report: dict[str, Any]) -> str:
    rows = [("LLaDA-8B shape, a block of 32 in 1,024", "ms", "times its floor")]
    for many in ("one", "five"):
        cell = report["canvases"][many]
        rows.append(
            (f"{many} of its canvases", f"{1e3 * cell['seconds']:.2f}", f"{cell['times']:.2f}")
        )
    return table(*rows)


def tables(report: dict[str, Any]) -> str:
    machine = report["machine"]
    captures = report["captures"]
    made = (
        f"`python bench/gpu.py` on one {report['device']}, torch {report['torch']}, "
        f"{report['date']}; a copy moves "
        f"{machine['bytes/s'] / 1e12:.2f} TB/s, a matrix product does "
        f"{machine['flop/s'] / 1e12:.0f} TFLOP/s. "
        f"{captures['count']} sizes were captured, in {captures['seconds']:.1f} s. "
        f"Five canvases take {report['canvases']['ratio']:.2f} times one, so `ssd` with five pays "
        f"where it saves more than {1 - 1 / report['canvases']['ratio']:.0%} of the forwards. "
        "At 55 %, as on zoo:masked with `tree=likeliest`, a block would take "
        f"{0.45 * report['canvases']['ratio']:.2f} of its time."
    )
    parts = [
        forward_table(report),
        decode_table(report),
        shares_table(report),
        canvas_table(report),
    ]
    if "methods" in report:
        parts.insert(1, break_even(report))
    return "\n\n".join([*parts, made])


def publish(report: dict[str, Any]) -> None:
    """Write the page; of parts that were not measured, what was measured before."""
    held = json.loads((DOCS / "gpu.json").read_text())
    if report.keys() > {"shares"}:
        report["methods"] = [rows_and_tokens(*one) for one in METHODS]
    measured = {(row["method"], row["batch"]): row for row in report.get("shares", ())}
    rows = [measured.get((row["method"], row["batch"]), row) for row in held["shares"]]
    report = {**held, **report, "shares": rows}
    (DOCS / "gpu.json").write_text(json.dumps(report, indent=1))
    write_tables("gpu.md", tables(report))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the measurements to this file")
    parser.add_argument(
        "--publish", type=Path, help="write docs/gpu.md by the measurements in this file"
    )
    parser.add_argument(
        "--blas",
        default="default",
        choices=("default", "cublas", "cublaslt"),
        help="whose matrix products, for all sizes",
    )
    parser.add_argument(
        "--without-compiled",
        action="store_true",
        help="leave out the library's compiled cache, which takes minutes",
    )
    parser.add_argument(
        "--no-ahead", action="store_true", help="begin no forward before its tokens are known"
    )
    parser.add_argument(
        "--shares",
        nargs="*",
        choices=SHARES,
        metavar="METHOD",
        help="only where the time goes, of all methods or of these",
    )
    arguments = parser.parse_args()
    if arguments.publish:
        return publish(json.loads(arguments.publish.read_text()))
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --publish FILE needs none")
    Engine.prefetches = False if arguments.no_ahead else None
    if arguments.blas != "default":
        graphs.CUBLASLT_ROWS = range(0)
        torch.backends.cuda.preferred_blas_library(arguments.blas)

    def keep(report: dict[str, Any]) -> None:
        print(json.dumps(report), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report, indent=1))

    if arguments.shares is not None:
        return measure_shares(arguments.shares or tuple(SHARES), keep)
    print(tables(measure(not arguments.without_compiled, keep)))


if __name__ == "__main__":
    main()
