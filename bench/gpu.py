"""Forwards against their floors and decoding beside the library, on one GPU, in one run:

    python bench/gpu.py [--json FILE] [--without-compiled]

Shapes of real models with random weights: only time is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import forerun
from forerun.engine.pack import Batch
from forerun.evaluate.bench import Cell, ceilings, decoding, random_network, timed_cell
from forerun.evaluate.latency import verdicts
from forerun.families.causal import Causal
from forerun.rows import Plan

CUDA, HALF = torch.device("cuda"), torch.bfloat16
CONTEXT = 1024
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def forwards(model: forerun.Model, machine: dict[str, float]) -> dict[str, Any]:
    """Forwards of a chain by its length, of a batch, and of a chain with candidates."""
    chain = {n: timed_cell(model, verdicts(model, 1, CONTEXT, n), (1, CONTEXT, n), machine, 20) for n in TOKENS}
    batched = [
        timed_cell(model, verdicts(model, b, CONTEXT, n), (b, CONTEXT, n), machine, 20) for b, n in ((8, 1), (32, 1), (32, 16))
    ]
    whole = timed_cell(model, candidates(model, 64, 4), (1, CONTEXT, 256), machine, 20)
    short = timed_cell(model, candidates(model, 64, 4, 16), (1, CONTEXT, 112), machine, 20)
    return {
        "chain": [cell.as_dict() for cell in chain.values()],
        "batch": [cell.as_dict() for cell in batched],
        "candidates": {
            "64 tokens x 4": whole.seconds / chain[64].seconds,
            "64 tokens, 3 tails of 16": short.seconds / chain[64].seconds,
        },
        "break-even": {n: cell.seconds / chain[1].seconds for n, cell in chain.items()},
    }


def candidates(model: forerun.Model, length: int, count: int, tail: int | None = None) -> Batch:
    """A chain after the text, and others that leave it at its first token, as recycling verifies them."""
    text = np.arange(CONTEXT, dtype=np.int32)
    tails = [(0, np.full(tail or length, 5 + i)) for i in range(count - 1)]
    plan = Causal._with_tails(text, np.arange(length), tails)
    first, *others = plan.reads
    return Batch([(0, replace(plan, reads=[first[1:], *others]), CONTEXT)], model.host.room, CUDA)  # the text is in slots already


def canvases(model: forerun.Model, machine: dict[str, float], block: int = 32) -> dict[str, Any]:
    """A block of a masked model that sees all around it, once and in five copies, as SSD verifies them."""

    def packed(copies: int) -> Cell:
        index = np.arange(copies * block, dtype=np.int32)
        rows = np.zeros((5, CONTEXT + copies * block), np.int32)
        rows[1, :CONTEXT], rows[2, :CONTEXT] = np.arange(CONTEXT), CONTEXT
        rows[1, CONTEXT:], rows[2, CONTEXT:] = CONTEXT // 2 + index % block, CONTEXT
        rows[3, CONTEXT:] = CONTEXT + index // block * block
        rows[4, CONTEXT:] = rows[3, CONTEXT:] + block
        plan = Plan(rows, [CONTEXT + index], CONTEXT)
        return timed_cell(model, Batch([(0, plan, CONTEXT)], model.host.room, CUDA), (1, CONTEXT, copies * block), machine, 20)

    one, five = packed(1), packed(5)
    return {"one": one.as_dict(), "five": five.as_dict(), "ratio": five.seconds / one.seconds}


def per_token(generate: Callable[[int], Any], few: int = 8, many: int = 136, turns: int = 3) -> float:
    """Seconds per token, reading the prompt not counted: long outputs against short ones."""

    def taken(count: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        generate(count)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    for count in (many, few, many):
        generate(count)
    return statistics.median((taken(many) - taken(few)) / (many - few) for _ in range(turns))


def side_by_side(network: Any, model: forerun.Model, compiled: bool) -> dict[str, float]:
    """Greedy decoding after a prompt of 1,024 tokens: the library's ways and ours, on the same weights."""
    prompt = np.random.default_rng(0).integers(10, 50_000, CONTEXT).tolist()
    ids = torch.tensor([prompt], device=CUDA)

    def library(**how: Any) -> Callable[[int], Any]:
        return lambda count: network.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, **how)

    ways: dict[str, Callable[[int], Any]] = {
        "forerun ar": lambda count: model.generate(prompt, method="ar", max_tokens=count, ignore_eos=True),
        "transformers generate": library(),
    }
    if compiled:
        ways["transformers generate, compiled static cache"] = library(cache_implementation="static")
    found = {}
    for name, way in ways.items():
        network.set_attn_implementation("sdpa")
        found[name] = per_token(way)
        print(f"{name}: {1 / found[name]:.1f} tokens/s", flush=True)
    return found


def shares(model: forerun.Model) -> list[dict[str, Any]]:
    """Where the time of greedy decoding goes, alone and at batch 32."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(10, 50_000, CONTEXT).tolist() for _ in range(32)]
    rows = []
    for batch in (1, 32):
        for name, options in (("ar", {}), ("jacobi", {"block": 16})):
            [split] = decoding(model, [(name, options)], prompts[:batch], batch=batch, turns=3, max_tokens=64, ignore_eos=True)
            rows.append({"batch": batch, **split.as_dict(), "outside": (split.total - split.forward) / split.forward})
            print(rows[-1], flush=True)
    return rows


@torch.inference_mode()
def measure(compiled: bool, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All of it; `keep` gets what there is after every part, because a machine may be taken away."""
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "date": date.today().isoformat(), "torch": torch.__version__}
    masked = forerun.from_network(random_network("llada-8b", CUDA, HALF), None, name="llada-8b", lanes=2, max_context=2 * CONTEXT)
    machine = report["machine"] = ceilings(masked.backbone)
    report["canvases"] = canvases(masked, machine)
    keep(report)
    del masked
    gc.collect()
    torch.cuda.empty_cache()
    network = random_network("qwen2.5-7b", CUDA, HALF)
    model = forerun.from_network(network, None, name="qwen2.5-7b", lanes=32, max_context=4 * CONTEXT)
    report["forward"] = forwards(model, machine)
    keep(report)
    report["shares"] = shares(model)
    report["captures"] = {"count": len(model.host.runner.captured), "seconds": model.host.runner.seconds}
    keep(report)
    report["decode"] = side_by_side(network, model, compiled)
    assert model.host.runner.captures, "captures were given up on the way"
    keep(report)
    return report


def tables(report: dict[str, Any]) -> str:
    forward, machine = report["forward"], report["machine"]
    lines = [f"| Qwen2.5-7B shape, bf16, after {CONTEXT} tokens | ms | times its floor | break-even |", "|---|---|---|---|"]
    for cell in forward["chain"]:
        even = cell["seconds"] / forward["chain"][0]["seconds"]
        lines.append(f"| {cell['tokens']} tokens | {1e3 * cell['seconds']:.2f} | {cell['times']:.2f} | {even:.2f} |")
    for cell in forward["batch"]:
        lines.append(f"| {cell['batch']} sequences x {cell['tokens']} | {1e3 * cell['seconds']:.2f} | {cell['times']:.2f} | |")
    lines += [f"| {name} candidates, to a chain of 64 | | | {ratio:.2f} |" for name, ratio in forward["candidates"].items()]
    lines += ["", "| greedy decoding, batch 1 | tokens/s | forerun `ar` is faster by |", "|---|---|---|"]
    ours = report["decode"]["forerun ar"]
    lines += [f"| {name} | {1 / taken:.1f} | {taken / ours:.2f} |" for name, taken in report["decode"].items()]
    lines += ["", "| where the time goes | batch | tokens/s | forward | rules | host | idle | outside, of the forward |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in report["shares"]:
        parts = " | ".join(f"{row[name] / row['total']:.0%}" for name in ("forward", "rules", "host", "idle"))
        lines.append(f"| {row['method']} | {row['batch']} | {row['tokens/s']:.0f} | {parts} | {row['outside']:.0%} |")
    one, five = report["canvases"]["one"], report["canvases"]["five"]
    lines += ["", "| LLaDA-8B shape, a block of 32 in 1,024 | ms | times its floor |", "|---|---|---|"]
    lines += [
        f"| {name} | {1e3 * c['seconds']:.2f} | {c['times']:.2f} |" for name, c in (("one canvas", one), ("five canvases", five))
    ]
    lines += [
        "",
        f"`python bench/gpu.py` on one {report['device']}, torch {report['torch']}, {report['date']}; a copy moves "
        f"{machine['bytes/s'] / 1e12:.2f} TB/s, a matrix product does {machine['flop/s'] / 1e12:.0f} TFLOP/s. "
        f"{report['captures']['count']} sizes were captured, in {report['captures']['seconds']:.1f} s. Five canvases take "
        f"{report['canvases']['ratio']:.2f} times one.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the measurements to this file")
    parser.add_argument(
        "--without-compiled", action="store_true", help="leave out the library's compiled cache, which takes minutes"
    )
    arguments = parser.parse_args()

    def keep(report: dict[str, Any]) -> None:
        print(json.dumps(report), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report, indent=1))

    print(tables(measure(not arguments.without_compiled, keep)))


if __name__ == "__main__":
    main()
