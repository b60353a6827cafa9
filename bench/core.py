"""Forerun beside `transformers`, on the same weights and prompts, in one run: medians, spread and
ratios.

    python bench/core.py [--rounds 3] [--only TEXT] [--json FILE]

Contestants take turns, so that a noisy machine is noisy for all of them. All decode greedily in
float32, past end tokens, so that each writes the same number of tokens.
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
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import forerun
from forerun.checkpoints import hub, resolve
from forerun.checkpoints.tokenizers import load_tokenizer
from forerun.engine.clock import Clock

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
"""  # noqa: E501
EDITS = [
    "Rename the function to `describe` and write the whole code again:\n",
    "Write this code again with a docstring at the top of the function:\n",
    "Write this code again, without any other change:\n",
]
Contest = dict[str, Callable[[], int]]


def race(contest: Contest, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Tokens per second of each contestant: median, least and most, over rounds in which they take
    turns."""
    rates: dict[str, list[float]] = {name: [] for name in contest}
    for turn in range(rounds + 1):
        for name, run in contest.items():
            began = time.perf_counter()
            tokens = run()
            if turn:  # the first round only warms up
                rates[name].append(tokens / (time.perf_counter() - began))
    return {name: (statistics.median(r), min(r), max(r)) for name, r in rates.items()}


def theirs(
    network: Any, prompts: list[list[int]], tokens: int, **options: Any
) -> Callable[[], int]:
    def run() -> int:
        for ids in prompts:
            inputs = torch.tensor([ids])
            network.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=-1,  # which does not exist, and so never stops it early
                pad_token_id=0,
                **options,
            )
        return len(prompts) * tokens

    return run


def their_batch(network: Any, prompts: list[list[int]], tokens: int) -> Callable[[], int]:
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def run() -> int:
        done = network.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        return sum(len(output.generated_tokens) for output in done.values())

    return run


def ours(
    model: forerun.Model,
    prompts: list[list[int]],
    tokens: int,
    one_by_one: bool = True,
    **options: Any,
) -> Callable[[], int]:
    def run() -> int:
        groups = [[ids] for ids in prompts] if one_by_one else [prompts]
        written = 0
        for group in groups:
            results = model.generate_all(group, max_tokens=tokens, ignore_eos=True, **options)
            written += sum(result.stats.tokens for result in results)
        return written

    return run


def outside_share(model: forerun.Model, prompt: list[int], tokens: int) -> tuple[float, float]:
    """The share of time outside the forward, and the microseconds of it per token."""
    model.engine.clock = Clock()
    model.generate(prompt, max_tokens=tokens, ignore_eos=True)
    clock = model.engine.clock
    return clock.outside_share, (clock.total - clock.forward) / tokens * 1e6


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).eval()


@dataclass(frozen=True)
class Rate:
    """Tokens per second of one contestant, and how they compare with the first one's."""

    what: str
    who: str
    rate: float
    least: float
    most: float
    ratio: float
    target: str  # what the ratio should be


class Races:
    """Contests that are run as they are added, those whose name contains `only`."""

    def __init__(self, rounds: int, only: str = ""):
        self.rounds = rounds
        self.only = only
        self.rates: list[Rate] = []
        self.facts: dict[str, Any] = {}

    def add(self, what: str, contest: Contest, target: str) -> None:
        if self.only not in what:
            return
        rates = race(contest, self.rounds)
        first = rates[next(iter(contest))][0]
        for who, (median, least, most) in rates.items():
            self.rates.append(Rate(what, who, median, least, most, median / first, target))


def race_tiny(races: Races) -> None:
    network = tiny_llama()
    model = forerun.from_network(network, None, name="llama 4x256")
    ids = list(range(1, 17))
    races.add(
        "Llama, 4 layers of 256, batch 1",
        {
            "transformers generate": theirs(network, [ids], 128),
            "forerun ar": ours(model, [ids], 128),
        },
        ">= 1.3",
    )
    outside = {}
    for length in (64, 256, 1024, 2048):
        prompt = [i % 4000 + 1 for i in range(length)]
        microseconds = [outside_share(model, prompt, 32)[1] for _ in range(5)]
        outside[length] = round(statistics.median(microseconds))
    races.facts["us outside the forward per token"] = outside


def race_smollm(races: Races) -> None:
    source = resolve.find("smollm")
    tokenizer = load_tokenizer(source)
    network = hub.load_weights(source, torch.device("cpu"), torch.float32)
    model = forerun.from_network(network, tokenizer, name="smollm", max_context=2048)
    prompts = [tokenizer(p).input_ids for p in PROMPTS]
    races.add(
        "SmolLM2-135M, batch 1",
        {
            "transformers generate": theirs(network, prompts[:2], 48),
            "forerun ar": ours(model, prompts[:2], 48),
        },
        ">= 1",
    )
    races.add(
        "SmolLM2-135M, 8 requests",
        {
            "transformers generate, one by one": theirs(network, prompts, 32),
            "transformers continuous batching": their_batch(network, prompts, 32),
            "forerun ar, batched": ours(model, prompts, 32, one_by_one=False),
        },
        ">= 3",
    )
    edits = edit_prompts(tokenizer)
    races.add(
        "SmolLM2-135M, editing code, batch 1",
        {
            "transformers prompt lookup (10)": theirs(
                network, edits, 96, prompt_lookup_num_tokens=10
            ),
            "forerun lookup (at most 10)": ours(model, edits, 96, method="lookup", k=10),
            "transformers generate": theirs(network, edits, 96),
            "forerun ar": ours(model, edits, 96),
        },
        "> 1",
    )
    share, _ = outside_share(model, prompts[0], 48)
    races.facts["SmolLM2 share outside the forward, batch 1"] = round(share, 3)


def edit_prompts(tokenizer: Any) -> list[list[int]]:
    """Chats that ask for a piece of code to be written again."""
    prompts = []
    for edit in EDITS:
        chat = [{"role": "user", "content": edit + CODE}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(text, add_special_tokens=False).input_ids)
    return prompts


def show(races: Races, console: Console, machine: str) -> None:
    table = Table("what", "who", "tokens/s", "least to most", "ratio", "wanted", title=machine)
    previous = None
    for rate in races.rates:
        first = rate.what != previous
        previous = rate.what
        table.add_row(
            rate.what if first else "",
            rate.who,
            f"{rate.rate:.1f}",
            f"{rate.least:.1f} to {rate.most:.1f}",
            f"{rate.ratio:.2f}",
            rate.target if first else "",
        )
    console.print(table)
    for name, value in races.facts.items():
        console.print(f"{name}: {value}", highlight=False)


def write(races: Races, file: Path, machine: str) -> None:
    """All rates as JSON. Where only some contests were run, the file keeps the others."""
    rows = [asdict(rate) for rate in races.rates]
    if races.only:
        kept = json.loads(file.read_text())["rows"]
        merged = []
        for what in dict.fromkeys(row["what"] for row in kept):
            again = [row for row in rows if row["what"] == what]
            merged += again or [row for row in kept if row["what"] == what]
        rows = merged
    report = {"machine": machine, "rows": rows, "facts": races.facts}
    file.write_text(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="write the numbers here; with --only, replace those of the contests run again",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only the contests whose name contains this"
    )
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    console = Console(width=120)
    races = Races(arguments.rounds, arguments.only)
    with console.status("racing …"):
        race_tiny(races)
        if resolve.has_smollm():
            race_smollm(races)
        else:
            races.facts["smollm"] = "not installed: make .venv/smollm"
    # these contests run on the CPU, wherever they run
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    machine = f"{cores}, torch {torch.__version__}, {date.today()}"
    show(races, console, machine)
    if arguments.json:
        write(races, arguments.json, machine)


if __name__ == "__main__":
    main()
