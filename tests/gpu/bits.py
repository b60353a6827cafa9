"""The same bits, whatever the company: on a GPU with our kernels, every exact method writes what
its reference writes, token for token and log-probability for log-probability, alone and in a batch.

PYTHONPATH=src python -m tests.gpu.bits [--dtype bfloat16] [--tokens 128] [--quantize int4]
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from pathlib import Path
from typing import Any

import torch

import forerun
from forerun import api, engine, methods
from forerun.engine import engine as loop
from forerun.profile.shapes import random_network

CAUSAL = {
    "lookup": {"k": 6},
    "jacobi": {"block": 8},
    "multiblock": {"block": 8, "candidates": 3},
    "lookahead": {"window": 5, "ngram": 4, "guesses": 5},
}
EXACT: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "zoo:ar": {
        **{name: ("ar", options) for name, options in CAUSAL.items()},
        "speculative": ("ar", {"draft": "zoo:drafter", "k": 4}),
        "specdiff": ("ar", {"draft": "zoo:masked", "k": 4}),
    },
    "zoo:consistency": {name: ("ar", options) for name, options in CAUSAL.items()},
    "zoo:any-subset": {
        "assd": ("sequential", {"k": 5}),
        "assd every": ("sequential", {"k": 4, "ahead": "every"}),
    },
    "zoo:masked": {"ssd": ("stepwise", {}), "ssd dual": ("stepwise", {"cache": "dual"})},
    "zoo:block": {
        "s2d2-exact": ("ar", {"k": 4}),
        "s2d2-exact every": ("ar", {"k": 3, "ahead": "every"}),
        "block-ssd": ("block-stepwise", {}),
    },
}


def prompts(count: int) -> list[str]:
    """Beginnings of functions of our own source."""
    texts = [inspect.getsource(module) for module in (api, loop, forerun, engine, methods)]
    lines = [line for text in texts for line in text.splitlines() if len(line) > 30]
    return ["\n".join(lines[i : i + 1 + i % 7]) for i in range(0, 8 * count, 8)][:count]


def loaded(name: str, dtype: str, quantize: str | None = None) -> forerun.Model:
    """A model of the zoo, a checkpoint, or one of a shape with random weights: bits need no
    sense."""
    if name.startswith("zoo:") or Path(name).exists():
        return forerun.load(
            name, dtype=dtype, max_context=1024, lanes=32, deterministic=True, quantize=quantize
        )
    network = random_network(name, torch.device("cuda"), getattr(torch, dtype))
    return forerun.from_network(
        network, None, name=name, lanes=32, max_context=1024, deterministic=True, quantize=quantize
    )


def check(m: forerun.Model, tokens: int, count: int, temperature: float) -> list[str]:
    name = m.name
    common = dict(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=3, logprobs=0)
    asked: list[Any] = prompts(count)
    if m.tokenizer is None:
        asked = [[17 + 7 * i + j % (5 + i) for j in range(20 + 31 * i)] for i in range(count)]
    wrong = []
    references: dict[str, list[Any]] = {}
    cases = EXACT.get(name) or {label: ("ar", options) for label, options in CAUSAL.items()}
    for label, (reference, options) in cases.items():
        shared = {"cache": options["cache"]} if "cache" in options else {}
        key = f"{reference} {shared}"
        if key not in references:
            how = dict(method=reference, **shared, **common)
            references[key] = [m.generate(prompt, **how) for prompt in asked]
            together = m.generate(asked, **how)
            wrong += compared(f"{name} {key} together", together, references[key])
        expected = references[key]
        how = dict(method=label.split()[0], **options, **common)
        same_draws = temperature == 0
        if same_draws:
            wrong += compared(
                f"{name} {label} alone", [m.generate(p, **how) for p in asked], expected
            )
        batches = [m.generate(asked[i : i + 8], **how) for i in range(0, count, 8)]
        in_eights = [result for batch in batches for result in batch]
        together = m.generate(asked, **how)
        if same_draws:
            wrong += compared(f"{name} {label} in eights", in_eights, expected)
        wrong += compared(f"{name} {label} together", together, in_eights)
    return wrong


def compared(what: str, found: list[Any], expected: list[Any]) -> list[str]:
    tokens = sum(a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True))
    same = sum(logprobs(a) == logprobs(b) for a, b in zip(found, expected, strict=True))
    line = f"{what}: tokens {tokens}/{len(found)}, bits {same}/{len(found)}"
    print(line, flush=True)
    return [] if tokens == same == len(found) else [line]


def logprobs(result: Any) -> list[float]:
    return [entry["logprob"] for entry in result.logprobs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--models", nargs="*", default=list(EXACT))
    parser.add_argument("--quantize", choices=("int8", "int4", "fp8"))
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    wrong = []
    for name in arguments.models:
        m = loaded(name, arguments.dtype, arguments.quantize)
        wrong += check(m, arguments.tokens, arguments.prompts, arguments.temperature)
    print(f"{len(wrong)} differ, {time.perf_counter() - began:.0f} s")
    for line in wrong:
        print("  differs:", line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
