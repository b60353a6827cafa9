"""Real models: tokens per target forward and seconds, by category, over a baseline.

    python bench/real.py --model smollm --method specdiff:auto@k=7 --data DATA --out real.json
    python bench/real.py --model DISTILLED --method jacobi --original QWEN --data DATA --out ...
    python bench/real.py --model CONVERTED --method s2d2 --baseline block@threshold=0.9 --out ...
    python bench/real.py --model ANY --method assd --baseline sequential --known 0.3 --out ...
    python bench/real.py --out real.json --report docs/real.md --answers FOLDER --curve NAME=CSV
    python bench/real.py --readme README.md

A method is METHOD[:DRAFT][@OPTION=VALUE...], and there may be several; the baseline is the model's
own `ar` unless given. DATA is a folder with HumanEval.jsonl, GSM8K's test.jsonl and MT-Bench's
question.jsonl, anywhere under it; summarising, translation and retrieval are asked about the texts
below, which no training saw. Every prompt is decoded by the baseline and by the method, one after
the other; `--batch 8` takes eight prompts at once. `--original` is another model whose `ar` is
timed on the same prompts: what one had before distillation. `--known 0.3` gives that share of the
tokens of English and code, at random places, and fills the others. Errors are standard errors over
prompts (over groups of prompts in a batch). `--peers` adds `transformers`' own `generate` on the
same weights, plain, with prompt lookup, and with the assistant that `--assistant` names.
`--answers` is a folder of bench/evaluate_real.py: its tables go into the page, and so do curves.
With `--keep`, tables of other names that the page has already stay there. `--readme` writes that
page's own table from some of docs/real.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import platform
import re
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from auto import Captures
from page import write_part

import forerun
from forerun.evaluate.scattered import scattered_canvases
from forerun.evaluate.tasks import MethodChoice

START = "<!-- real: bench/real.py writes this part -->"
END = "<!-- end of real -->"
REPORT = Path(__file__).parents[1] / "docs" / "real.md"
README = ("<!-- table: bench/real.py writes this part -->", "<!-- end of table -->")
# Rows of the README: how a table of docs/real.md begins, what it is called there, and its method.
SHOWN = [
    (
        "SmolLM2-135M, its shipped drafter**, temperature 0, batch 1",
        "SmolLM2-135M",
        '`specdiff`, `draft="auto"`',
    ),
    ("SmolLM2-135M, its shipped drafter, float32**", "", "the same, in float32"),
    ("SmolLM2-135M in 4 bits, auto over ar**", "SmolLM2-135M, 4 bits", "`auto`"),
    ("SmolLM2-135M in 4 bits, lookup@k=5 over ar**", "", "`lookup`"),
    (
        "Qwen2.5-Coder-1.5B, its own drafter, specdiff:drafter@k=7 over",
        "Qwen2.5-Coder-1.5B",
        "`specdiff`, a drafter trained for it",
    ),
    (
        "Qwen2.5-Coder-0.5B after Jacobi distillation, jacobi",
        "Qwen2.5-Coder-0.5B, distilled",
        "`jacobi`",
    ),
    ("SmolLM2-135M, any-subset adapters", "`smollm:any-subset`", "`assd`, 30 % given"),
]
CATEGORIES = ["chat", "maths", "code", "summarising", "translation", "retrieval"]

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
PEER_PROMPTS = 3  # of each category
TURNS = 5  # at most: after one that reads the prompt, the first in which nothing is captured counts
LANGUAGES = ["French", "German", "Spanish", "Italian"]


def main() -> None:
    flags = parse(sys.argv[1:])
    if flags.readme:
        write_part(Path(flags.readme), summary(REPORT.read_text()), *README)
        return
    file = Path(flags.out)
    runs = json.loads(file.read_text()) if file.exists() else []
    models = {name: load(name, flags) for name in (flags.model, flags.original) if name}
    captures = Captures()
    for method in flags.method if flags.model else ():
        runs.append(run(method, models, flags, captures))
        file.write_text(json.dumps(runs, indent=1))
        print(markdown(runs[-1:]), flush=True)
    if flags.report:
        write_report(runs, flags)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument(
        "--method", nargs="*", default=["specdiff:auto@k=7"], help="METHOD[:DRAFT][@OPTION=...]"
    )
    parser.add_argument("--baseline", default="ar", help="the same")
    parser.add_argument("--original", help="a model whose ar is timed too")
    parser.add_argument("--known", type=float, help="fill blanks, this share of tokens given")
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
    parser.add_argument("--assistant", help="a model that assists transformers' generate")
    parser.add_argument("--name", help="what the table calls this run")
    parser.add_argument("--seconds", type=float, default=1e9, help="for each method")
    parser.add_argument("--out", help="a file that runs are added to")
    parser.add_argument("--report")
    parser.add_argument("--readme", help="write this page's table, and nothing else")
    parser.add_argument("--keep", action="store_true", help="other tables of the report stay")
    parser.add_argument("--answers", nargs="*", default=[])
    parser.add_argument("--curve", nargs="*", default=[], help="NAME=FILE of a training run")
    flags = parser.parse_args(words)
    if not flags.out and not flags.readme:
        parser.error("--out FILE says where runs are kept")
    return flags


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


def canvases(data: str, count: int, known: float, tokenizer) -> dict[str, list[dict]]:
    """Arguments of `infill`: English and code of at most 128 tokens, most of them blank."""
    solved = objects(data, "HumanEval.jsonl")[:count]
    found = {
        "English": TEXTS[:count],
        "code": [one["prompt"] + one["canonical_solution"] for one in solved],
    }
    asked = {}
    for category, texts in found.items():
        windows = [np.array(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
        gapped = [
            scattered_canvases([window[:128]], known, i)[0] for i, window in enumerate(windows)
        ]
        asked[category] = [{"token_ids": canvas} for canvas in gapped]
    return {category: these for category, these in asked.items() if these}


def load(name: str, flags: argparse.Namespace):
    loading = {"quantize": flags.quantize} if flags.quantize else {}
    return forerun.load(
        name,
        device=flags.device,
        dtype=flags.dtype,
        lanes=flags.batch,
        max_context=flags.max_context,
        **loading,
    )


def run(method: str, models: dict, flags: argparse.Namespace, captures: Captures) -> dict:
    """One run: every category by the baseline and by the method."""
    began = time.perf_counter()
    model = models[flags.model]
    sides = {"baseline": (model, flags.baseline), "method": (model, method)}
    if flags.original:
        sides["original"] = (models[flags.original], "ar")
    if flags.known is None:
        chosen = prompts(flags.data, flags.count)
    else:
        chosen = canvases(flags.data, flags.count, flags.known, model.tokenizer)
    if flags.categories:
        chosen = {name: these for name, these in chosen.items() if name in flags.categories}
    rows = defaultdict(list)
    first = next(iter(chosen.values()))[: flags.batch]
    for one, word in sides.values():  # the first ever compiles, measures and picks threads
        decode(one, first, word, flags)
    for category, these in chosen.items():
        groups = [these[i : i + flags.batch] for i in range(0, len(these), flags.batch)]
        for group in groups:
            if time.perf_counter() - began > flags.seconds:
                break
            rows[category].append(measure(group, sides, flags, captures))
    peers = measure_peers(model, chosen, flags) if flags.peers else {}
    device = str(model.backbone.device)
    if device.startswith("cuda"):
        device = torch.cuda.get_device_name()
    return {
        "name": shown_name(method, flags),
        "machine": f"{device}, {platform.machine()}, {torch.get_num_threads()} threads",
        "dtype": str(model.backbone.dtype).removeprefix("torch."),
        "date": time.strftime("%Y-%m-%d"),
        "command": shown_command(sys.argv[1:]),
        "baseline": flags.baseline,
        "temperature": flags.temperature,
        "batch": flags.batch,
        "rows": rows,
        "peers": peers,
    }


def shown_name(method: str, flags: argparse.Namespace) -> str:
    name = flags.name or Path(flags.model).name
    if flags.name and len(flags.method) == 1:
        return name
    return f"{name}, {without_folders(method)} over {flags.baseline}"


def without_folders(word: str) -> str:
    """A word of the command line without what differs from machine to machine."""
    return re.sub(r"(?<![\w.])(?:~|\.[\w.-]*)?/[\w./-]*/", "", word)


def shown_command(words: list[str]) -> str:
    """The command without what differs from machine to machine: folders, and the file."""
    shown = ["python bench/real.py"]
    left_out = {"--data", "--out", "--name", "--seconds"}
    for before, word in zip(["", *words], words):
        if word not in left_out and before not in left_out:
            shown.append(without_folders(word))
    return " ".join(shown)


def measure(group: list[dict], sides: dict, flags: argparse.Namespace, captures: Captures) -> dict:
    """What a group of prompts costs, by each side in turn."""
    found = {}
    for side, (model, word) in sides.items():
        for turn in range(TURNS):
            before = captures.count
            start = time.perf_counter()
            results = decode(model, group, word, flags)
            seconds = time.perf_counter() - start
            # the first side would read the prompt for all, and the first turn may compile
            if turn and captures.count == before:
                break
        tokens = sum(result.stats.tokens for result in results)
        found[side] = {
            "tokens": tokens,
            "per_forward": tokens / sum(result.stats.forwards for result in results),
            "rate": tokens / seconds,
            "text": [result.token_ids for result in results],
        }
    row = {
        "tokens_per_forward": found["method"]["per_forward"],
        "baseline_per_forward": found["baseline"]["per_forward"],
        "baseline_rate": found["baseline"]["rate"],
        "rate": found["method"]["rate"],
        "same": found["baseline"]["text"] == found["method"]["text"],
        "tokens": found["method"]["tokens"],
    }
    if "original" in found:
        row["original_rate"] = found["original"]["rate"]
    return row


def decode(model, group: list[dict], word: str, flags: argparse.Namespace) -> list:
    """The results of all prompts of a group, decoded at once."""
    choice = MethodChoice.read(word, {})
    options = dict(choice.options, method=choice.method, temperature=flags.temperature, seed=1)
    if choice.draft:
        options["draft"] = choice.draft
    [name] = group[0]
    together = [one[name] for one in group]
    if name == "token_ids":
        return model.infill_all(together, **options)
    return model.generate(**{name: together}, max_tokens=flags.max_tokens, **options)


def measure_peers(model, chosen: dict, flags: argparse.Namespace) -> dict[str, dict]:
    """Tokens a second of `transformers`' own `generate` on some prompts of each category, batch
    1."""
    kinds = {"generate": {}, "prompt lookup": {"prompt_lookup_num_tokens": 10}}
    if flags.assistant:
        kinds["assisted"] = {"assistant_model": plain_network(flags.assistant, model)}
    network = plain_network(flags.model, model)
    found = {}
    for name, options in kinds.items():
        peer_rate(network, model, next(iter(chosen.values()))[0], 8, options)  # warm
        found[name] = {
            category: [peer_rate(network, model, one, flags.max_tokens, options) for one in some]
            for category, some in ((key, these[:PEER_PROMPTS]) for key, these in chosen.items())
        }
    return found


def peer_rate(network, model, asked: dict, tokens: int, options: dict) -> float:
    text = asked.get("prompt") or model.tokenizer.apply_chat_template(
        asked["messages"], tokenize=False, add_generation_prompt=True
    )
    ids = model.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    ids = ids.to(model.backbone.device)
    done = []
    for most in (1, tokens):  # one token is what reading the prompt takes, which ours have read
        start = time.perf_counter()
        with torch.no_grad():
            out = network.generate(ids, max_new_tokens=most, do_sample=False, **options)
        done.append((out.shape[1] - ids.shape[1], time.perf_counter() - start))
    (first, before), (last, after) = done
    return (last - first) / (after - before)


def plain_network(name: str, model):
    """The library's own network of a checkpoint, where and as precise as our model is."""
    from transformers import AutoModelForCausalLM

    from forerun.train.networks import load_network, move

    network = load_network(name)
    fresh = AutoModelForCausalLM.from_config(network.config)
    fresh.load_state_dict(network.state_dict())
    move(fresh, model.backbone.device, model.backbone.dtype)
    return fresh.eval()


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
        baseline = f"`{one['baseline']}`"
        original = any("original_rate" in row for rows in one["rows"].values() for row in rows)
        heads = ["", "prompts", "tokens per forward", f"over {baseline}"]
        heads += ["over the original's `ar`"] if original else []
        heads += ["tokens/s", f"{baseline} tokens/s", "same text"]
        lines += [
            f"**{one['name']}**, temperature {one['temperature']:g}, batch {one['batch']}, "
            f"{one['dtype']}, {one['machine']}, {one['date']}",
            "",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
        ]
        every = [row for rows in one["rows"].values() for row in rows]
        for category, rows in [*one["rows"].items(), ("all", every)]:
            if rows:
                lines.append(_line(category, rows, one["batch"], original))
        for peer, categories in one["peers"].items():
            for category, rates in categories.items():
                empty = " |" * (3 if original else 2)
                who = f"{category}, `transformers` {peer} | {len(rates)}"
                lines.append(f"| {who} |{empty} {mean(rates)} | | |")
        lines += ["", f"`{one['command']}`", ""]
    return "\n".join(lines)


def _line(category: str, rows: list[dict], batch: int, original: bool) -> str:
    cells = [
        category,
        f"{len(rows) * batch}",
        mean([row["tokens_per_forward"] for row in rows]),
        mean([row["rate"] / row["baseline_rate"] for row in rows]),
    ]
    if original:
        cells.append(mean([row["rate"] / row["original_rate"] for row in rows]))
    cells += [
        f"{sum(row['rate'] for row in rows) / len(rows):.1f}",
        f"{sum(row['baseline_rate'] for row in rows) / len(rows):.1f}",
        f"{sum(row['same'] for row in rows)} of {len(rows)}",
    ]
    return f"| {' | '.join(cells)} |"


def curve_table(word: str, most: int = 8) -> str:
    """Some rows of a training run's curve, the first and the last among them."""
    name, _, file = word.partition("=")
    with Path(file).open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    chosen = sorted({round(i) for i in np.linspace(0, len(rows) - 1, min(most, len(rows)))})
    heads = list(rows[0])
    table = [f"**{name}**: the curve of its training", ""]
    table += [f"| {' | '.join(head.replace('_', ' ') for head in heads)} |"]
    table += ["|---" * len(heads) + "|"]
    for number in chosen:
        cells = [f"{float(rows[number][head]):.4g}" for head in heads]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join([*table, ""])


def answers_table(folder: str) -> str:
    """What bench/evaluate_real.py found in its answers: accuracy beside tokens per forward. Seconds
    are left to the rows, which are timed alone."""
    from forerun.evaluate.report import markdown as panel_table
    from forerun.evaluate.summary import summarise_folder

    tables = []
    for panel in summarise_folder(Path(folder)):
        untimed = [
            replace(one, speed=replace(one.speed, tokens_per_second=None, first_token=None))
            for one in panel
        ]
        asked = panel[0].settings
        tables.append(f"**{asked['model']}, {asked['task']}**\n\n{panel_table(untimed)}")
    return "\n".join(tables)


def write_report(runs: list[dict], flags: argparse.Namespace) -> None:
    page = Path(flags.report)
    head, _, rest = page.read_text().partition(START)
    before, _, tail = rest.partition(END)
    parts = [markdown(runs)] if runs else []
    parts += [answers_table(folder) for folder in flags.answers]
    parts += [curve_table(word) for word in flags.curve]
    body = "\n".join(parts)
    if flags.keep:
        tables = tables_by_name(before) | tables_by_name(body)
        body = "\n".join(f"{table}\n" for table in tables.values())
    page.write_text(f"{head}{START}\n\n{body}\n{END}{tail}")


def summary(report: str) -> str:
    """Some tables of the report in one: speed over the baseline, by category."""
    tables = tables_by_name(report.partition(START)[2])
    alone = [name for name in tables if "temperature 0, batch 1," in name]
    heads = ["model", "method", "on", "tokens/forward", *CATEGORIES]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    dates = set()
    for begins, model, method in SHOWN:
        [name] = [one for one in alone if one.startswith(f"**{begins}")]
        table = tables[name]
        cells = {row[0]: row for row in table_rows(table)}
        place = cells[""].index(next(head for head in cells[""] if head.startswith("over")))
        over = [cells[one][place].split(" ")[0] if one in cells else "" for one in CATEGORIES]
        where = "2 CPU cores" if ", cpu, " in name else re.findall(r"NVIDIA (\w+)", name)[0]
        lines.append(
            f"| {' | '.join([model, method, where, cells['all'][2].split(' ')[0], *over])} |"
        )
        dates.add(table.split("\n")[0][-10:])
    first, last = min(dates), max(dates)
    told = "Tokens/s over plain decoding of the same model (`ar`, `sequential`), one text at a time"
    where = "`python bench/real.py`; errors, machines and commands in [docs/real.md](docs/real.md)"
    return "\n".join([*lines, "", f"{told}, temperature 0; {first} to {last}, {where}."])


def table_rows(table: str) -> list[list[str]]:
    """The cells of a table's lines."""
    lines = [line for line in table.split("\n") if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def tables_by_name(text: str) -> dict[str, str]:
    """What stands below each line with a name in bold, by that line without its date: another
    temperature or batch is another table."""
    found = [part.strip() for part in re.split(r"^(?=\*\*)", text, flags=re.MULTILINE)]
    named = [part for part in found if part.startswith("**")]
    return {re.sub(r", \d{4}-\d\d-\d\d$", "", part.split("\n")[0]): part for part in named}


if __name__ == "__main__":
    main()
