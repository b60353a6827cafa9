"""`auto` beside every fixed method and option, in tokens per second: code, chat, summarising,
translation and retrieval, at several batch sizes, on a CPU or a GPU.

    python bench/auto.py --model zoo:ar --draft zoo:drafter --json FILE
    python bench/auto.py --model DIR --device cuda --batch 1 8 32 --json FILE
    python bench/auto.py --neighbour --json FILE        (beside a process that computes)
    python bench/auto.py --choices                      (what it chose over a text)
    python bench/auto.py --publish FILE ...             (writes docs/auto.md)

Contestants take turns, so that a noisy machine is noisy for all of them; the order changes from
turn to turn, and the first turn only warms up: on a GPU until a contestant meets no size any more
that has to be captured, or `--warm` times. A turn in which something is captured later is
repeated. All decode greedily
past end tokens, so that each writes the same number of tokens, and every text is compared with
plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import forerun
from forerun.engine import continuation, graphs, prefetch_rounds, rules

PARAGRAPH = (
    "The harbour of Bergen was founded before 1070. In the thirteenth century it became the "
    "largest town of the country and the seat of its kings. Merchants of the Hanseatic League "
    "opened an office there in 1360 and traded dried cod from the north for grain from the south. "
    "Fires burned the wooden houses down in 1702 and again in 1916; the rows along the quay were "
    "rebuilt each time on the old plan. "
)
TRIES = 3  # of a turn in which something is captured
FUNCTION = """def summarise(values):
    total = 0
    count = 0
    for value in values:
        total = total + value
        count = count + 1
    if count == 0:
        return None
    return {"total": total, "count": count, "average": total / count}
"""
PROMPTS: dict[str, list[str]] = {
    "code": [
        f"{FUNCTION}\n\n# The same with a docstring:\n\ndef summarise(values):\n",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self):\n",
        "import os\nimport sys\n\n\ndef read_file(path):\n    with open(path) as file:\n",
        "def fibonacci(n):\n    if n < 2:\n        return n\n",
    ],
    "chat": [
        "User: What should I cook for six friends on a cold evening?\nAssistant:",
        "User: Why is the sky blue, and why is the sunset red?\nAssistant:",
        "User: Write me a short poem about a bicycle in the rain.\nAssistant:",
        "User: I slept badly. What can I do about it?\nAssistant:",
    ],
    "summarising": [
        f"{PARAGRAPH}{PARAGRAPH}\nSummary in two sentences:",
        f"Text: {PARAGRAPH}\nRepeat the text with all years left out:",
        f"{PARAGRAPH}\nThe most important facts as a list:\n-",
        f"Minutes: {PARAGRAPH}\nHeadline:",
    ],
    "translation": [
        f"English: {PARAGRAPH}\nFrench:",
        "English: The cat sleeps on the old chair.\nGerman:",
        f"English: {PARAGRAPH}\nSpanish:",
        "English: Where is the station, please?\nItalian:",
    ],
    "retrieval": [
        f"{PARAGRAPH}\nQuestion: When did the merchants open their office? Quote the sentence.\n",
        "A1: red\nA2: green\nA3: blue\nA4: yellow\nA5: black\n" * 3 + "Question: list A1 to A5.\n",
        f"{PARAGRAPH}\nQuestion: What burned down, and when? Quote.\nAnswer:",
        "key 17 = 4821\nkey 18 = 9034\nkey 19 = 1177\nkey 20 = 6650\nQuestion: key 18? Answer:",
    ],
}
GRID: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    ("lookup", {"k": 2}),
    ("lookup", {"k": 5}),
    ("lookup", {"k": 10}),
    ("lookup", {"k": 10, "adapt": False}),
    ("jacobi", {"block": 4}),
    ("jacobi", {"block": 16}),
]
DRAFTED: list[tuple[str, dict[str, Any]]] = [("speculative", {"k": k}) for k in (2, 4, 7)]
Contestant = tuple[str, dict[str, Any]]


def label(contestant: Contestant) -> str:
    method, options = contestant
    told = [f"{name} {value}" for name, value in options.items() if name != "draft"]
    return ", ".join([method, *told])


@dataclass
class Row:
    """Tokens per second of one contestant on one set of prompts at one batch size."""

    prompts: str
    batch: int
    method: str
    rate: float  # the median of the turns
    least: float
    most: float
    tokens_per_forward: float
    same_text: bool
    choices: dict[str, int]
    warmed: int  # texts decoded before the first turn
    captured: float  # seconds of the turns that went into captures


class Captures:
    """The captures of all engines of this process: how many, and their seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        plain = graphs.capture_graph

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*arguments, **options)
            finally:
                self.count += 1
                self.seconds += time.perf_counter() - began

        for module in (graphs, rules, continuation, prefetch_rounds):
            setattr(module, "capture_graph", timed)  # noqa: B010


class Race:
    """One model, all contestants."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        batch = max(arguments.batch)
        self.model = forerun.load(
            arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            quantize=arguments.quantize,
            lanes=batch,
            max_context=arguments.context,
        )
        contestants = [*GRID]
        more: dict[str, Any] = {}
        if arguments.draft:
            draft = forerun.load(
                arguments.draft,
                device=arguments.device,
                dtype=arguments.dtype,
                quantize=arguments.quantize,
                lanes=1,
            )
            more = {"draft": draft}
            contestants += [(name, {**options, **more}) for name, options in DRAFTED]
        self.contestants: list[Contestant] = [*contestants, ("auto", more)]
        self.until = time.perf_counter() + arguments.seconds
        self.captures = Captures()

    def run(self) -> list[Row]:
        rows = []
        for batch in self.arguments.batch:
            for name in self.arguments.sets:
                rows += self.race(name, batch)
        return rows

    def race(self, name: str, batch: int) -> list[Row]:
        prompts = [PROMPTS[name][i % len(PROMPTS[name])] for i in range(batch)]
        rates: dict[str, list[float]] = {label(one): [] for one in self.contestants}
        last: dict[str, list[forerun.Result]] = {}
        warmed = {label(one): self.warm_up(one, prompts) for one in self.contestants}
        captured = dict.fromkeys(warmed, 0.0)
        order = list(self.contestants)
        for turn in range(max(1, self.arguments.rounds)):
            random.Random(turn).shuffle(order)
            for contestant in order:
                rate, last[label(contestant)], spent = self.turn(contestant, prompts)
                rates[label(contestant)].append(rate)
                captured[label(contestant)] += spent
            if time.perf_counter() > self.until:
                break
        plain = [result.token_ids for result in last["ar"]]
        rows = []
        for contestant in self.contestants:
            results = last[label(contestant)]
            rates_of = rates[label(contestant)]
            rows.append(
                Row(
                    name,
                    batch,
                    label(contestant),
                    statistics.median(rates_of),
                    min(rates_of),
                    max(rates_of),
                    statistics.mean(r.stats.tokens_per_forward for r in results),
                    [result.token_ids for result in results] == plain,
                    dict(sum_up(r.stats.choices for r in results)),
                    warmed[label(contestant)],
                    captured[label(contestant)],
                )
            )
        best = max(rows, key=lambda row: row.rate)
        ours = rows[-1]
        over_plain = ours.rate / rows[0].rate
        print(
            f"{name:12} batch {batch}: auto {ours.rate:8.1f} tokens/s, {over_plain:.2f} of ar, "
            f"{ours.rate / best.rate:.2f} of the best ({best.method}), {ours.choices}, warm after "
            f"{ours.warmed}, captures {ours.captured:.2f} s",
            flush=True,
        )
        return rows

    def warm_up(self, contestant: Contestant, prompts: Sequence[str]) -> int:
        """Decode until nothing new is captured; how often that was."""
        for times in range(1, self.arguments.warm + 1):
            before = self.captures.count
            self.decode(contestant, prompts)
            if self.captures.count == before:
                return times
        return self.arguments.warm

    def turn(
        self, contestant: Contestant, prompts: Sequence[str]
    ) -> tuple[float, list[forerun.Result], float]:
        """A turn, again if something was captured in it; and what captures took of it at last."""
        for _ in range(TRIES):
            before = self.captures.seconds
            rate, results = self.decode(contestant, prompts)
            spent = self.captures.seconds - before
            if not spent:
                break
        return rate, results, spent

    def decode(
        self, contestant: Contestant, prompts: Sequence[str]
    ) -> tuple[float, list[forerun.Result]]:
        method, options = contestant
        clock = time.process_time if self.arguments.cpu_time else time.perf_counter
        began = clock()
        results = self.model.generate(
            list(prompts),
            method=method,
            max_tokens=self.arguments.tokens,
            ignore_eos=True,
            raise_errors=True,
            **options,
        )
        seconds = clock() - began
        return sum(len(result.token_ids) for result in results) / seconds, results


def sum_up(counts: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return found


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def keep_busy() -> None:
    numbers = torch.randn(256, 256)
    while True:
        numbers = torch.tanh(numbers @ numbers)


@contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    """A process beside us that computes all the time."""
    process = multiprocessing.get_context("spawn").Process(target=keep_busy, daemon=True)
    if wanted:
        process.start()
        time.sleep(3)
    try:
        yield
    finally:
        if wanted:
            process.kill()


def machine(device: str | None) -> str:
    if device is not None and device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} x {platform.machine()}, {torch.get_num_threads()} threads"


def choices(race: Race) -> list[dict[str, Any]]:
    """What it chose over one text, step by step."""
    prompt = PROMPTS["code"][0]
    race.decode(race.contestants[-1], [prompt])
    _, [result] = race.decode(race.contestants[-1], [prompt])
    texts: dict[int, str] = {}
    for event in result.trace:
        said = race.model.decode(event.tokens)
        texts[event.forward] = texts.get(event.forward, "") + said
    return [
        {**choice._asdict(), "text": texts.get(choice.forward, "")} for choice in result.choices
    ]


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    with neighbour(arguments.neighbour):
        race = Race(arguments)
        found: dict[str, Any] = dict(
            model=Path(arguments.model).name,
            draft=arguments.draft and Path(arguments.draft).name,
            machine=machine(arguments.device),
            neighbour=arguments.neighbour,
            cpu_time=arguments.cpu_time,
            dtype=arguments.quantize or str(race.model.backbone.dtype).removeprefix("torch."),
            torch=torch.__version__,
            date=date.today().isoformat(),
            tokens=arguments.tokens,
            rows=[],
            choices=[],
        )
        if arguments.choices:
            found["choices"] = choices(race)
        else:
            found["rows"] = [asdict(row) for row in race.run()]
        curve = race.model.host.costs.curve or {}
        found["curve"] = {str(rows): round(1e3 * each, 4) for rows, each in curve.items()}
    return found


def race_table(found: dict[str, Any]) -> str:
    """One line for each set and batch: `ar`, the best fixed contestant and `auto`."""
    lines = [
        "| prompts | batch | `ar`, tokens/s | best fixed, tokens/s | `auto`, tokens/s | "
        "over `ar` | over the best | steps that drafted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((row["prompts"], row["batch"]) for row in found["rows"])
    for prompts, batch in kinds:
        rows = [r for r in found["rows"] if (r["prompts"], r["batch"]) == (prompts, batch)]
        by_name = {row["method"]: row for row in rows}
        best = max((r for r in rows if r["method"] != "auto"), key=lambda row: row["rate"])
        ours = by_name["auto"]
        plain = by_name["ar"]["rate"]
        steps = sum(ours["choices"].values()) or 1
        drafted = [
            f"{name} {count / steps:.0%}"
            for name, count in sorted(ours["choices"].items())
            if name != "none"
        ]
        lines.append(
            f"| {prompts} | {batch} | {plain:,.1f} | {best['rate']:,.1f} (`{best['method']}`) | "
            f"{ours['rate']:,.1f} | {ours['rate'] / plain:.2f} "
            f"| {ours['rate'] / best['rate']:.2f} | {', '.join(drafted) or 'none'} |"
        )
    return "\n".join(lines)


def worst(found: dict[str, Any]) -> str:
    """The worst ratios of all sets and batches."""
    over_plain = []
    over_best = []
    for row in found["rows"]:
        if row["method"] == "auto":
            same = [
                r
                for r in found["rows"]
                if (r["prompts"], r["batch"]) == (row["prompts"], row["batch"])
            ]
            plain = next(r for r in same if r["method"] == "ar")
            best = max(r["rate"] for r in same if r["method"] != "auto")
            over_plain.append(row["rate"] / plain["rate"])
            over_best.append(row["rate"] / best)
    texts = [row["same_text"] for row in found["rows"] if row["method"] == "auto"]
    return (
        f"Worst ratio to `ar`: {min(over_plain):.2f}; to the best of the fixed ones: "
        f"{min(over_best):.2f}. Texts equal to `ar`'s: {sum(texts)} of {len(texts)} sets."
    )


def choice_table(found: dict[str, Any]) -> str:
    lines = ["| forward | chosen | expected | written |", "|---|---|---|---|"]
    for choice in found["choices"]:
        chosen = choice["drafter"]
        if choice["length"]:
            chosen += f", {choice['length']}"
        expected = f"{choice['expected']:.1f} tokens in {1e3 * choice['seconds']:.1f} ms"
        text = json.dumps(choice["text"]).replace("|", "\\|").replace("`", "'")
        lines.append(f"| {choice['forward']} | {chosen} | {expected} | `{text}` |")
    return "\n".join(lines)


def section(found: dict[str, Any]) -> str:
    """One file's part of the page."""
    beside = ", beside a process that keeps every core busy" if found["neighbour"] else ""
    drafted = f", draft model {found['draft']}" if found["draft"] else ""
    title = f"### {found['model']}{drafted}: {found['machine']}{beside}"
    about = (
        f"{found['dtype']}, torch {found['torch']}, {found['tokens']} tokens each, {found['date']}."
    )
    curve = ", ".join(f"{rows}: {each:g}" for rows, each in found["curve"].items())
    if found["cpu_time"]:
        about += " Seconds are this process's own, on a machine that others used at the same time."
    parts = [title, f"{about} Measured milliseconds of a forward by rows: {curve}."]
    if found["rows"]:
        parts += [race_table(found), worst(found)]
    if found["choices"]:
        parts += ["What it chose, step by step:", choice_table(found)]
    return "\n\n".join(parts)


def merged(files: Sequence[Path]) -> list[dict[str, Any]]:
    """What files hold, one for each model, machine, neighbour and day."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for file in files:
        held = json.loads(file.read_text())
        kinds = ("model", "draft", "machine", "neighbour", "dtype", "date")
        key = tuple(held[name] for name in kinds)
        if key in found:
            found[key]["rows"] += held["rows"]
            found[key]["choices"] += held["choices"]
        else:
            found[key] = held
    return list(found.values())


def publish(files: Sequence[Path]) -> None:
    from page import write_tables

    write_tables("auto.md", "\n\n".join(section(found) for found in merged(files)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="zoo:ar")
    parser.add_argument("--draft")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--quantize", help="int8 or int4")
    parser.add_argument("--context", type=int)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--sets", nargs="*", default=list(PROMPTS), choices=list(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=8, help="texts before the first turn, at most")
    parser.add_argument("--seconds", type=float, default=150, help="then one turn each is enough")
    parser.add_argument("--neighbour", action="store_true", help="beside a busy process")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count only this process's own time"
    )
    parser.add_argument("--choices", action="store_true", help="what it chose over a text")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--publish", type=Path, nargs="*", help="write the page from these files")
    arguments = parser.parse_args()
    if arguments.publish:
        publish(arguments.publish)
        return
    found = report(arguments)
    if found["rows"]:
        print(worst(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
