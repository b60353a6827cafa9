"""Forerun beside `transformers`, on the same weights and prompts, in one run: medians, spread and ratios.

    python bench/core.py [--rounds 3] [--only TEXT] [--json FILE]

Contestants take turns, so that a noisy machine is noisy for all of them. All decode greedily in float32, past end tokens, so
that each writes the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import forerun
from forerun.checkpoints import causal
from forerun.engine.serve import Clock

PROMPTS = [
    "def fibonacci(n):\n",
    "The capital of France is",
    "Write a poem about the sea.\n",
    "import os\nimport sys\n\n",
    "class Stack:\n",
    "Once upon a time",
    "To be, or not to be, that is",
    "for i in range(10):\n",
]
CODE = """def summarise(values):
    total = 0
    count = 0
    for value in values:
        total = total + value
        count = count + 1
    if count == 0:
        return None
    average = total / count
    largest = max(values)
    smallest = min(values)
    return {"total": total, "count": count, "average": average, "largest": largest, "smallest": smallest}
"""
EDITS = [
    "Rename the function to `describe` and write the whole code again:\n",
    "Write this code again with a docstring at the top of the function:\n",
    "Write this code again, without any other change:\n",
]
Contest = dict[str, Callable[[], int]]


def race(contest: Contest, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Tokens per second of each contestant: median, least and most, over rounds in which they take turns."""
    rates: dict[str, list[float]] = {name: [] for name in contest}
    for turn in range(rounds + 1):
        for name, run in contest.items():
            began = time.perf_counter()
            tokens = run()
            if turn:  # the first round only warms up
                rates[name].append(tokens / (time.perf_counter() - began))
    return {name: (statistics.median(r), min(r), max(r)) for name, r in rates.items()}


def theirs(network: Any, prompts: list[list[int]], tokens: int, **options: Any) -> Callable[[], int]:
    def run() -> int:
        for ids in prompts:
            inputs = torch.tensor([ids])
            # An end token that does not exist keeps it from stopping early.
            network.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False,
                             eos_token_id=-1, pad_token_id=0, **options)  # fmt: skip
        return len(prompts) * tokens

    return run


def their_batch(network: Any, prompts: list[list[int]], tokens: int) -> Callable[[], int]:
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run() -> int:
        done = network.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        return sum(len(output.generated_tokens) for output in done.values())

    return run


def ours(model: forerun.Model, prompts: list[list[int]], tokens: int, one_by_one: bool = True, **options: Any) -> Callable[[], int]:
    def run() -> int:
        groups = [[ids] for ids in prompts] if one_by_one else [prompts]
        results = [r for group in groups for r in model.generate(group, max_tokens=tokens, ignore_eos=True, **options)]
        return sum(r.stats.tokens for r in results)

    return run


def outside_share(model: forerun.Model, prompt: list[int], tokens: int) -> tuple[float, float]:
    """The share of time outside the forward, and the microseconds of it per token."""
    model.engine.clock = Clock()
    model.generate(prompt, max_tokens=tokens, ignore_eos=True)
    clock = model.engine.clock
    return clock.outside_share, (clock.total - clock.forward) / tokens * 1e6


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
                         vocab_size=4096, max_position_embeddings=4096)  # fmt: skip
    return LlamaForCausalLM(config).eval()


def contests(rounds: int, only: str = "") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(what: str, contest: Contest, target: str) -> None:
        if only not in what:
            return
        rates = race(contest, rounds)
        base = rates[next(iter(contest))][0]
        for name, (median, least, most) in rates.items():
            rows.append(dict(what=what, who=name, rate=median, least=least, most=most, ratio=median / base, target=target))

    facts: dict[str, Any] = {}
    network = tiny_llama()
    model = forerun.from_network(network, None, name="llama 4x256")
    ids = list(range(1, 17))
    add(
        "Llama, 4 layers of 256, batch 1",
        {"transformers generate": theirs(network, [ids], 128), "forerun ar": ours(model, [ids], 128)},
        ">= 1.3",
    )
    facts["us outside the forward per token"] = {
        length: round(statistics.median(outside_share(model, [i % 4000 + 1 for i in range(length)], 32)[1] for _ in range(5)))
        for length in (64, 256, 1024, 2048)
    }
    if not causal.has_smollm():
        facts["smollm"] = "not installed: make .venv/smollm"
        return rows, facts
    source = causal.find("smollm")
    tokenizer, network = causal.load_tokenizer(source), causal.load_weights(source, torch.device("cpu"), torch.float32)
    model = forerun.from_network(network, tokenizer, name="smollm", max_context=2048)
    prompts = [tokenizer(p).input_ids for p in PROMPTS]
    add(
        "SmolLM2-135M, batch 1",
        {"transformers generate": theirs(network, prompts[:2], 48), "forerun ar": ours(model, prompts[:2], 48)},
        ">= 1",
    )
    add("SmolLM2-135M, 8 requests", {
        "transformers generate, one by one": theirs(network, prompts, 32),
        "transformers continuous batching": their_batch(network, prompts, 32),
        "forerun ar, batched": ours(model, prompts, 32, one_by_one=False),
    }, ">= 3")  # fmt: skip
    chats = [[{"role": "user", "content": edit + CODE}] for edit in EDITS]
    spoken = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    edits = [tokenizer(text, add_special_tokens=False).input_ids for text in spoken]
    add("SmolLM2-135M, editing code, batch 1", {
        "transformers prompt lookup (10)": theirs(network, edits, 96, prompt_lookup_num_tokens=10),
        "forerun lookup (at most 10)": ours(model, edits, 96, method="lookup"),
        "transformers generate": theirs(network, edits, 96),
        "forerun ar": ours(model, edits, 96),
    }, "> 1")  # fmt: skip
    facts["SmolLM2 share outside the forward, batch 1"] = round(outside_share(model, prompts[0], 48)[0], 3)
    return rows, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--json", metavar="FILE", help="write the numbers here; with --only, replace those of the contests run again"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only the contests whose name contains this")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    console = Console(width=120)
    with console.status("racing …"):
        rows, facts = contests(arguments.rounds, arguments.only)
    machine = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, {date.today()}"
    table = Table("what", "who", "tokens/s", "least to most", "ratio", "wanted", title=machine)
    previous = None
    for row in rows:
        first, previous = row["what"] != previous, row["what"]
        speed, spread = f"{row['rate']:.1f}", f"{row['least']:.1f} to {row['most']:.1f}"
        what, wanted = (row["what"], row["target"]) if first else ("", "")
        table.add_row(what, row["who"], speed, spread, f"{row['ratio']:.2f}", wanted)
    console.print(table)
    for name, value in facts.items():
        console.print(f"{name}: {value}", highlight=False)
    if arguments.json:
        if arguments.only:
            with open(arguments.json) as old:
                again = {row["what"]: [r for r in rows if r["what"] == row["what"]] for row in rows}
                kept = json.load(old)["rows"]
            names = dict.fromkeys(row["what"] for row in kept)
            rows = [row for name in names for row in again.get(name) or [r for r in kept if r["what"] == name]]
        with open(arguments.json, "w") as out:
            json.dump({"machine": machine, "rows": rows, "facts": facts}, out, indent=1)


if __name__ == "__main__":
    main()
