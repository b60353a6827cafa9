"""Real models: tokens per target forward and seconds, by category, over our own `ar`.

    python bench/real.py --model smollm --draft auto --data DATA --out real.json
    python bench/real.py --out real.json --report docs/real.md

DATA is a folder with HumanEval.jsonl, GSM8K's test.jsonl and MT-Bench's question.jsonl, anywhere
under it; summarising, translation and retrieval are asked about the texts below, which no training
saw. Every prompt is decoded by `ar` and by the method, one after the other; `--batch 8` takes eight
prompts at once. Errors are standard errors over prompts (over groups of prompts in a batch).
`--peers` adds `transformers`' own `generate` on the same weights, plain and with prompt lookup.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

import forerun

START = "<!-- real: bench/real.py writes this part -->"
END = "<!-- end of real -->"

TEXTS = [
    "The lighthouse on the northern cape was built in 1871 by stonemasons from three villages. For "
    "forty years it burned whale oil, then paraffin, and in 1932 it was given electric light. The "
    "last keeper, Ingrid Solberg, left in 1984, when a timer took over her work. Since then the "
    "house beside the tower has been a small museum, open from May to September, with a room about "
    "the shipwreck of the barque Aurora in 1903.",
    "Leafcutter ants do not eat the leaves that they carry. They chew them into a pulp on which a "
    "fungus grows, and the fungus is their food. A colony may hold eight million workers of four "
    "sizes. The smallest tend the garden, the largest guard the trails. When a young queen leaves "
    "to found a nest, she takes a pellet of the fungus with her in a pocket of her mouth.",
    "On Tuesday the town council voted to close Mill Street to cars for one summer. Shop owners "
    "were divided: the baker expects more customers on foot, while the furniture shop fears that "
    "nobody will carry a table to the car park. The trial costs 42,000 euros and begins on 1 June. "
    "A survey in October will decide whether it becomes permanent.",
    "Concrete sets because cement reacts with water, not because it dries. In the first day it "
    "gains about a sixth of its final strength, after a week about two thirds. If it loses its "
    "water too early, the reaction stops and the surface becomes dusty. That is why builders cover "
    "fresh concrete with wet cloth or foil, above all in hot and windy weather.",
    "The night train from Vienna to Venice leaves at 21:27 and arrives at 8:34. It has four "
    "couchette cars, two sleeping cars and one car with seats. Bicycles travel in a compartment "
    "behind the engine and need a ticket of their own. Breakfast is included in the sleeping cars "
    "only; in the couchettes tea and coffee can be bought from the attendant.",
    "In 1854 the physician John Snow marked the deaths of a cholera outbreak in London on a map. "
    "They lay close together around one water pump in Broad Street. Workers of a nearby brewery, "
    "who drank beer, stayed healthy. Snow persuaded the parish to remove the handle of the pump. "
    "The outbreak was ending already, but his map became the beginning of epidemiology.",
    "Sourdough rises by wild yeasts and bacteria that live in flour. A starter is flour and water "
    "that were left to ferment and are fed every day. The bacteria make acids, which give taste "
    "and keep mould away. A loaf takes a day, most of which is waiting. Cold slows the yeasts more "
    "than the bacteria, so dough that rests in a refrigerator becomes more sour.",
    "The library lends tools as well as books. Members may take up to three tools for a week: "
    "drills, saws, ladders, a sewing machine, and in autumn two apple presses, which must be "
    "booked in advance. Whoever brings a tool back dirty pays five euros. Repairs are done by "
    "volunteers on the first Saturday of the month, and everybody is welcome to watch.",
]
QUESTIONS = [
    "Who was the last keeper, and when did she leave?",
    "What does a young queen take with her?",
    "How much does the trial cost and when does it begin?",
    "Why do builders cover fresh concrete?",
    "Where can bicycles travel?",
    "What did John Snow persuade the parish to do?",
    "Why does cold dough become more sour?",
    "What must be booked in advance?",
]
LANGUAGES = ["French", "German", "Spanish", "Italian"]


def main() -> None:
    flags = parse(sys.argv[1:])
    file = Path(flags.out)
    runs = json.loads(file.read_text()) if file.exists() else []
    if flags.model:
        runs.append(run(flags))
        file.write_text(json.dumps(runs, indent=1))
        print(markdown(runs[-1:]))
    if flags.report:
        write_report(runs, Path(flags.report))


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--method", default="specdiff")
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--option", nargs="*", default=[], help="NAME=VALUE of the method")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--count", type=int, default=8, help="prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-context", type=int, default=1024)
    parser.add_argument("--data", default=".")
    parser.add_argument("--categories", nargs="*")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--quantize", help="as load's own, where it has it")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--name", help="what the table calls this run")
    parser.add_argument("--seconds", type=float, default=1e9, help="for the whole run")
    parser.add_argument("--out", required=True)
    parser.add_argument("--report")
    return parser.parse_args(words)


def objects(data: str, name: str) -> list[dict]:
    """The lines of a benchmark's file, if it is there."""
    found = sorted(Path(data).rglob(name))
    return [json.loads(line) for line in found[0].read_text().splitlines()] if found else []


def prompts(data: str, count: int) -> dict[str, list[dict]]:
    """Arguments of `generate` for every prompt, by category."""
    chats = objects(data, "question.jsonl")
    asked = {
        "chat": [one["turns"][0] for one in chats if one["category"] not in ("coding", "math")],
        "maths": [one["question"] for one in objects(data, "test.jsonl") if "question" in one],
        "summarising": [f"Summarize the following text:\n{text}" for text in TEXTS],
        "translation": [
            f"Translate the following text into {LANGUAGES[i % 4]}:\n{text.split('. ')[0]}."
            for i, text in enumerate(TEXTS)
        ],
        "retrieval": [f"{text}\n\n{question}" for text, question in zip(TEXTS, QUESTIONS)],
    }
    found = {
        category: [{"messages": [{"role": "user", "content": text}]} for text in texts[:count]]
        for category, texts in asked.items()
    }
    code = [one["prompt"] for one in objects(data, "HumanEval.jsonl")[:count]]
    found["code"] = [{"prompt": text} for text in code]
    return {category: these for category, these in found.items() if these}


def run(flags: argparse.Namespace) -> dict:
    """One run: every category by `ar` and by the method."""
    began = time.perf_counter()
    loading = {"quantize": flags.quantize} if flags.quantize else {}
    model = forerun.load(
        flags.model,
        device=flags.device,
        dtype=flags.dtype,
        lanes=flags.batch,
        max_context=flags.max_context,
        **loading,
    )
    options = dict(option.split("=", 1) for option in flags.option)
    options = {name: json.loads(value) for name, value in options.items()}
    sides = {
        "ar": dict(method="ar"),
        "drafted": dict(method=flags.method, k=flags.k, **options),
    }
    if flags.draft and flags.draft != "none":
        sides["drafted"]["draft"] = flags.draft
    rows = defaultdict(list)
    chosen = prompts(flags.data, flags.count)
    for category, these in chosen.items():
        if flags.categories and category not in flags.categories:
            continue
        groups = [these[i : i + flags.batch] for i in range(0, len(these), flags.batch)]
        for number, group in enumerate(groups):
            if time.perf_counter() - began > flags.seconds:
                break
            rows[category].append(measure(model, group, sides, flags, warm=number == 0))
    peers = measure_peers(model, chosen, flags) if flags.peers else {}
    device = str(model.backbone.device)
    if device.startswith("cuda"):
        device = torch.cuda.get_device_name()
    return {
        "name": flags.name or f"{flags.model}, {flags.method}, draft {flags.draft}, k {flags.k}",
        "machine": f"{device}, {platform.machine()}, {torch.get_num_threads()} threads",
        "dtype": str(model.backbone.dtype).removeprefix("torch."),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
        "temperature": flags.temperature,
        "batch": flags.batch,
        "rows": rows,
        "peers": peers,
    }


def measure(model, group: list[dict], sides: dict, flags, warm: bool) -> dict:
    """What a group of prompts costs, by each side in turn."""
    found = {}
    for side, method in sides.items():
        options = dict(max_tokens=flags.max_tokens, temperature=flags.temperature, seed=1, **method)
        for attempt in range(2 if warm else 1):  # the first captures and compiles
            if attempt == 0 and warm and model.backbone.device.type == "cpu":
                continue
            start = time.perf_counter()
            results = model.generate(**together(group), **options)
            seconds = time.perf_counter() - start
        tokens = sum(r.stats.tokens for r in results)
        forwards = sum(r.stats.forwards for r in results)
        found[side] = {"tokens": tokens, "forwards": forwards, "seconds": seconds}
        found[f"{side} text"] = [r.token_ids for r in results]
    return {
        "tokens_per_forward": found["drafted"]["tokens"] / found["drafted"]["forwards"],
        "ar_rate": found["ar"]["tokens"] / found["ar"]["seconds"],
        "rate": found["drafted"]["tokens"] / found["drafted"]["seconds"],
        "same": found["ar text"] == found["drafted text"],
        "tokens": found["drafted"]["tokens"],
    }


def together(group: list[dict]) -> dict:
    """The arguments of one call for all prompts of a group."""
    [name] = group[0]
    return {name: [one[name] for one in group]}


def measure_peers(model, chosen: dict, flags) -> dict[str, float]:
    """Tokens a second of `transformers`' own `generate`, plain and with prompt lookup, batch 1."""
    from transformers import AutoModelForCausalLM

    from forerun.train.networks import load_network

    network = load_network(flags.model)
    fresh = AutoModelForCausalLM.from_config(network.config)
    fresh.load_state_dict(network.state_dict())
    torch.nn.Module.to(fresh, device=model.backbone.device, dtype=model.backbone.dtype)
    fresh.eval()
    found = {}
    for name, options in (("generate", {}), ("prompt lookup", {"prompt_lookup_num_tokens": 10})):
        rates = []
        for these in chosen.values():
            text = these[0].get("prompt") or model.tokenizer.apply_chat_template(
                these[0]["messages"], tokenize=False, add_generation_prompt=True
            )
            ids = model.tokenizer(text, return_tensors="pt", add_special_tokens=False)
            ids = ids.input_ids.to(model.backbone.device)
            start = time.perf_counter()
            with torch.no_grad():
                out = fresh.generate(
                    ids, max_new_tokens=flags.max_tokens, do_sample=False, **options
                )
            rates.append((out.shape[1] - ids.shape[1]) / (time.perf_counter() - start))
        found[name] = sum(rates) / len(rates)
    return found


def mean(values: list[float]) -> str:
    """A mean and its standard error."""
    middle = sum(values) / len(values)
    if len(values) < 2:
        return f"{middle:.2f}"
    spread = math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1) / len(values))
    return f"{middle:.2f} ± {spread:.2f}"


def markdown(runs: list[dict]) -> str:
    lines = []
    for one in runs:
        lines += [
            f"**{one['name']}**, temperature {one['temperature']:g}, batch {one['batch']}, "
            f"{one['dtype']}, {one['machine']}, {one['date']}",
            "",
            "| | prompts | tokens per forward | over `ar` | tokens/s | `ar` tokens/s | same text |",
            "|---|---|---|---|---|---|---|",
        ]
        every = [row for rows in one["rows"].values() for row in rows]
        for category, rows in [*one["rows"].items(), ("all", every)]:
            if rows:
                lines.append(_line(category, rows, one["batch"]))
        for peer, rate in one["peers"].items():
            lines.append(f"| `transformers` {peer} | | | | {rate:.1f} | | |")
        lines.append("")
    return "\n".join(lines)


def _line(category: str, rows: list[dict], batch: int) -> str:
    ratios = [row["rate"] / row["ar_rate"] for row in rows]
    cells = [
        category,
        f"{len(rows) * batch}",
        mean([row["tokens_per_forward"] for row in rows]),
        mean(ratios),
        f"{sum(row['rate'] for row in rows) / len(rows):.1f}",
        f"{sum(row['ar_rate'] for row in rows) / len(rows):.1f}",
        f"{sum(row['same'] for row in rows)} of {len(rows)}",
    ]
    return f"| {' | '.join(cells)} |"


def write_report(runs: list[dict], page: Path) -> None:
    text = page.read_text()
    head, _, rest = text.partition(START)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{START}\n\n{markdown(runs)}\n{END}{tail}")


if __name__ == "__main__":
    main()
