"""Methods over their references on small trained models, in seconds: tokens per second on one GPU
at batch 1, 8 and 32, in float32 and bfloat16, and whether exact methods write the same text.

    python bench/gpu_methods.py --json FILE                        (needs a CUDA device)
    python bench/gpu_methods.py --json FILE --model DIR [--draft DIR] --dtype bfloat16 [--batch 1 8]
    python bench/gpu_methods.py ... --methods speculative auto     (only these and the reference)
    python bench/gpu_methods.py --publish FILE ...                (writes docs/gpu-methods.md)

Without `--model`, the zoo. With it, causal checkpoints that can chat, such as
SmolLM2-135M-Instruct: twelve questions about code and twelve others, through their template.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from page import write_tables

import forerun
from forerun.evaluate.prompts import ASKED_FOR_CODE, ASKED_IN_CHAT, CODE

TOKENS = 96
TURNS = 3
BATCHES = (1, 8, 32)
CAUSAL: list[tuple[str, dict[str, Any]]] = [
    ("lookup", {}),
    ("jacobi", {}),
    ("multiblock", {}),
    ("lookahead", {}),
]
# model: the reference, and the methods beside it
ZOO: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "zoo:ar": (
        "ar",
        [
            ("lookup", {}),
            ("lookahead", {}),
            ("speculative", {"draft": "zoo:drafter"}),
            ("specdiff", {"draft": "zoo:block"}),
        ],
    ),
    "zoo:consistency": ("ar", CAUSAL),
    "zoo:any-subset": ("sequential", [("assd", {}), ("assd", {"ahead": "every"})]),
    "zoo:block": ("ar", [("s2d2-exact", {}), ("s2d2-exact", {"ahead": "every"})]),
    "zoo:masked": ("stepwise", [("ssd", {}), ("ssd", {"tree": "chain"})]),
}


Prompts = list[Any]  # texts, or tokens of a chat


def timed(
    model: forerun.Model, method: str, options: dict[str, Any], batches: list[Prompts]
) -> tuple[float, list[forerun.Result]]:
    """Seconds of the median turn over all batches, and what was written."""
    seconds = []
    for _ in range(TURNS + 2):  # the first two capture
        results = []
        torch.cuda.synchronize()
        began = time.perf_counter()
        for prompts in batches:
            results += model.generate_all(
                prompts, method=method, max_tokens=TOKENS, ignore_eos=True, **options
            )
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:]), results


def prompt_sets(model: forerun.Model, name: str, batch: int) -> dict[str, list[Prompts]]:
    """What is asked, by kind: the zoo gets the same few beginnings of code in one batch; a model
    that can chat gets all twelve questions of a kind, `batch` at a time (all at once, and some
    twice, where a batch holds more)."""
    if name.startswith("zoo:"):
        return {"code": [[CODE[i % len(CODE)] for i in range(batch)]]}
    kinds = {"code": ASKED_FOR_CODE, "chat": ASKED_IN_CHAT}
    sets = {}
    for kind, questions in kinds.items():
        asked = [chat_tokens(model, question) for question in questions]
        asked = (asked * (1 + batch // len(asked)))[: max(batch, len(asked))]
        sets[kind] = [asked[i : i + batch] for i in range(0, len(asked), batch)]
    return sets


def chat_tokens(model: forerun.Model, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return model.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def measure(
    name: str,
    reference: str,
    methods: list[tuple[str, dict[str, Any]]],
    dtype: str,
    sizes: list[int],
) -> list[dict[str, Any]]:
    """One row for each kind of prompt, method and batch."""
    model = forerun.load(name, device="cuda", dtype=dtype, lanes=max(sizes), max_context=1024)
    cases = [(batch, *case) for batch in sizes for case in prompt_sets(model, name, batch).items()]
    rows = []
    for batch, kind, batches in cases:
        slow, expected = timed(model, reference, {}, batches)
        for method, options in [(reference, {}), *methods]:
            taken, results = (slow, expected)
            if method != reference:
                taken, results = timed(model, method, options, batches)
            tokens = sum(result.stats.tokens for result in results)
            pairs = zip(results, expected)
            row = dict(
                model=Path(name).name,
                kind=kind,
                dtype=dtype,
                batch=batch,
                method=", ".join(
                    [method, *(f"{k} = {Path(str(v)).name}" for k, v in options.items())]
                ),
                speed=tokens / taken,
                over=slow / taken,
                found=tokens / sum(result.stats.forwards for result in results),
                same=sum(one.token_ids == other.token_ids for one, other in pairs) / len(results),
            )
            print(row, flush=True)
            rows.append(row)
    model.close()
    return rows


def shown(name: str, value: Any) -> str:
    return f"{name} = {Path(value).name if isinstance(value, str) else value}"


def table(report: dict[str, Any]) -> str:
    """Rows are methods, columns are batches."""
    sizes = ", ".join(str(size) for size in sorted({row["batch"] for row in report["rows"]}))
    lines = [
        f"| model, numbers | method | tokens per forward | tokens/s at batch {sizes} "
        "| over the first row | same text |",
        "|---|---|---|---|---|---|",
    ]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        kind = "" if row["model"].startswith("zoo:") else f", {row['kind']}"
        model = f"{row['model']}{kind}, {row['dtype']}"
        cells.setdefault((model, row["method"]), []).append(row)
    for (model, method), rows in cells.items():
        speeds = ", ".join(f"{row['speed']:,.0f}" for row in rows)
        over = ", ".join(f"{row['over']:.2f}" for row in rows)
        found = statistics.mean(row["found"] for row in rows)
        same = min(row["same"] for row in rows)
        cell = f"{model} | `{method}` | {found:.2f} | {speeds} | {over} | {same:.0%}"
        lines.append(f"| {cell} |")
    made = (
        f"`python bench/gpu_methods.py` on one {report['device']}, torch {report['torch']}, "
        f"{report['date']}; greedy, {TOKENS} tokens after every prompt, the median of {TURNS} "
        "turns. The zoo continues six beginnings of code; real models answer twelve questions of a "
        "kind, through their chat template."
    )
    return "\n".join([*lines, "", made])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--publish", type=Path, nargs="*", help="write the page from these files")
    parser.add_argument("--model", nargs="*", default=[], help="causal checkpoints, not the zoo")
    parser.add_argument("--draft", nargs="*", default=[], help="models that draft for --model")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--only", help="only models whose name holds this")
    parser.add_argument("--methods", nargs="*", help="only these, beside their references")
    parser.add_argument("--batch", nargs="*", type=int, default=list(BATCHES))
    arguments = parser.parse_args()
    if arguments.publish:
        reports = [json.loads(path.read_text()) for path in arguments.publish]
        rows = [row for report in reports for row in report["rows"]]
        write_tables("gpu-methods.md", table({**reports[0], "rows": rows}))
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    methods = [*CAUSAL, ("auto", {})]
    for draft in arguments.draft:
        methods += [("speculative", {"draft": draft, "k": k}) for k in (2, 4, 7)]
        methods.append(("auto", {"draft": draft}))
    models = dict.fromkeys(arguments.model, ("ar", methods)) or ZOO
    known = {method for _, listed in models.values() for method, _ in listed}
    if unknown := sorted(set(arguments.methods or ()) - known):
        parser.error(f"--methods {' '.join(unknown)}: not raced here; there are {sorted(known)}")
    report = dict(
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        date=date.today().isoformat(),
        rows=[],
    )
    for name, (reference, methods) in models.items():
        if arguments.only and arguments.only not in name:
            continue
        wanted = [one for one in methods if one[0] in (arguments.methods or [one[0]])]
        for dtype in arguments.dtype:
            report["rows"] += measure(name, reference, wanted, dtype, arguments.batch)
            if arguments.json:
                arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
