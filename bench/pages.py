"""What pages and chunks are good for: `python bench/pages.py [lanes|served|prefix|gap ...]`.

- lanes: how many sequences of mixed lengths fit at once into 24 and 140 GB with the keys and values
  of a 7B model, with and without pages, by the allocator itself.
- served: how many of them an engine decodes at once in 24 GB. Its pages and its order of service
  are real; forwards are not run.
- prefix: what a common beginning of requests saves.
- gap: the longest gap of streams while a prompt of 8k tokens is read beside them.

`--device cuda` runs the last two with the 7B shape on a GPU. Needs torch and transformers only.
`--json FILE` keeps the numbers, `--publish FILE ...` puts those of some files into docs/serving.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from auto import Captures
from page import DOCS, write_part

from forerun.api import Model
from forerun.engine.backbone import SlottedBackbone
from forerun.engine.cache import Memo
from forerun.engine.loop import InCaller
from forerun.engine.pace import Pace
from forerun.engine.pack import Batch
from forerun.engine.pages import PAGE, PagePool, PageShape, PageTable, pages_for
from forerun.engine.turns import GROWTH
from forerun.families.causal import Causal
from forerun.profile.shapes import random_model
from forerun.sequence.canvas import Canvas
from forerun.sequence.rows import Plan, causal_rows

START = "<!-- pages: bench/pages.py writes this part -->"
END = "<!-- end of pages -->"
CPU = torch.device("cpu")
SLOT_BYTES = 2 * 28 * 4 * 128 * 2  # keys and values of the 7B shape, bfloat16
WEIGHT_BYTES = 7.62e9 * 2
FOR_SLOTS = 0.9  # of what the weights leave
CONTEXT = 8192 + 512
WARM_UP = 40  # tokens of a stream
ALONE = 80
MOST_PROMPTS = 5  # that are read before one counts, whatever is captured


class NoStorage:
    """Pages without memory."""

    def __init__(self, table: PageTable):
        self.table = table

    def copy(self, source: int, target: int, count: int) -> None:
        pass


class NoNetwork(SlottedBackbone):
    """A backbone whose forwards give the same logits to all."""

    vocab = 8
    context = CONTEXT
    cost = 1.0
    device = CPU
    dtype = torch.float32
    layers = heads = key_heads = head_dim = 1

    def bytes_per_lane(self, context: int) -> int:
        return 0

    def make_slots(self, lanes: int, context: int, pages: PageShape | None = None) -> Any:
        return NoStorage(PageTable(lanes, context, pages))

    def forward(self, batch: Batch, slots: Any) -> torch.Tensor:
        return torch.zeros(len(batch.reads), self.vocab)


def mixed_requests(count: int, common: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Prompts of 64 to 8,192 tokens and outputs of 16 to 512, both uniform by their logarithm; the
    first `common` tokens are the same for all."""
    rng = np.random.default_rng(seed)
    prompts = np.exp(rng.uniform(np.log(64), np.log(8192), count)).astype(int)
    outputs = np.exp(rng.uniform(np.log(16), np.log(512), count)).astype(int)
    found = []
    for prompt, output in zip(prompts, outputs):
        own = rng.integers(1, 7, max(0, prompt - common)).tolist()
        found.append(([3] * min(common, prompt) + own, int(output)))
    return found


def sequences_at_once(memory: float, common: int, steps: int) -> dict[str, float]:
    """How many sequences have their keys in memory, on average, while others wait for room."""
    slots = int((memory - WEIGHT_BYTES) * FOR_SLOTS / SLOT_BYTES)
    whole = pages_for(Causal().slots(CONTEXT)) * PAGE
    reserved = slots // whole
    lanes = min(1536, 8 * slots // CONTEXT)
    m = Model("fake", Causal(), NoNetwork(), lanes=lanes, context=CONTEXT, threaded=False)
    m.engine.slots = slots
    m.engine.chunk = 10**6  # so that lanes are filled soon
    m.host.pool.copies = False  # as on a GPU
    for prompt, output in mixed_requests(4 * lanes, common):
        m.submit(prompt, max_tokens=output, ignore_eos=True, method="ar")
    at_once = []
    use = []
    for _ in range(steps):
        if not m.engine.queue:
            break
        m.engine.step()
        at_once.append(sum(bool(m.host.memos[one.lane].pages) for one in m.engine.running))
        use.append(m.host.pool.in_use / m.host.pool.table.count)
    settled = slice(len(at_once) // 2, None)
    return {
        "GB": memory / 1e9,
        "common": common,
        "pages": m.host.pool.table.count,
        "reserved": reserved,
        "paged": round(statistics.mean(at_once[settled])),
        "in use": round(statistics.mean(use[settled]), 3),
        "hit rate": round(m.host.pool.stats.hit_rate, 3),
        "taken back": m.host.pool.stats.taken_back,
    }


def sequences_that_fit(memory: float, common: int) -> dict[str, float]:
    """How many sequences of mixed lengths have room at once, each somewhere in its output; by the
    pages that their memos take, with those left over that the engine leaves for growth."""
    slots = int((memory - WEIGHT_BYTES) * FOR_SLOTS / SLOT_BYTES)
    room = Causal().slots(CONTEXT)
    lanes = 40 * slots // CONTEXT
    pool = PagePool(PageTable(lanes, room, PageShape(slots // PAGE)), lambda *_: None, copies=False)
    requests = mixed_requests(lanes, common)
    progress = np.random.default_rng(1).uniform(size=lanes)
    for lane, ((prompt, output), share) in enumerate(zip(requests, progress)):
        text = np.array([*prompt, *[0] * int(share * output)], np.int32)
        length = len(text)
        plan = Plan(causal_rows(text), [np.array([length - 1])], length, causal=length)
        memo = Memo(room, pool, lane)
        pool.wake(lane)
        start = memo.find(plan)
        if not pool.ensure(memo.pages_needed(start, length) + GROWTH * lane):
            break
        memo.claim(start, length)
        memo.ran(plan, start)
    return {
        "GB": memory / 1e9,
        "tokens in common": common,
        "a whole context each": slots // (pages_for(room) * PAGE),
        "in pages": lane,
    }


def measured_model(arguments: argparse.Namespace, lanes: int, context: int) -> Model:
    cuda = arguments.device == "cuda"
    shape = arguments.shape or ("qwen2.5-7b" if cuda else "smollm2-135m")
    dtype = torch.bfloat16 if cuda else torch.float32
    model = random_model(shape, torch.device(arguments.device), dtype, lanes, context)
    model.driver = InCaller(model.engine)
    return model


def text(length: int, seed: int, vocab: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, vocab, length).tolist()


def common_beginning(arguments: argparse.Namespace) -> dict[str, Any]:
    """Requests with one system prompt, with what earlier ones left and without."""
    clock = time.perf_counter if arguments.device == "cuda" else time.process_time
    model = measured_model(arguments, lanes=4, context=2048)
    system = text(arguments.system, 0, model.vocab)
    prompts = [system + text(32, 1 + i, model.vocab) for i in range(arguments.requests)]
    how = dict(method="ar", max_tokens=8, ignore_eos=True)
    model.generate(text(arguments.system, 99, model.vocab), **how)  # warms up
    seconds = {}
    texts = {}
    for kind in ("without", "with"):
        model.host.forget()
        stats = model.host.pool.stats
        stats.asked_rows = stats.found_rows = 0
        seconds[kind] = []
        texts[kind] = []
        for prompt in prompts:
            if kind == "without":
                model.host.forget()
            began = clock()
            texts[kind].append(model.generate(prompt, **how).token_ids)
            seconds[kind].append(clock() - began)
    later = {kind: statistics.median(taken[1:]) for kind, taken in seconds.items()}
    return {
        "model": model.name,
        "system tokens": len(system),
        "requests": len(prompts),
        "hit rate": round(model.host.pool.stats.hit_rate, 3),
        "seconds without": round(later["without"], 3),
        "seconds with": round(later["with"], 3),
        "saved per request": round(later["without"] - later["with"], 3),
        "same texts": texts["with"] == texts["without"],
        "bits kept": model.backbone.deterministic,
    }


def longest_gap(arguments: argparse.Namespace, chunk: int | None) -> dict[str, Any]:
    """Gaps between two tokens of streams, alone and while a long prompt is read. `chunk` 0 reads it
    in one piece. On a CPU they are processor time: others may use the machine too. The first prompt
    shows what is compiled and captured on the way; the one that counts is the first one beside
    which nothing was, after the first."""
    captures = Captures()
    model = measured_model(arguments, arguments.streams + 1, arguments.prompt + 1024)
    if chunk is not None:
        model.host.pace = Pace(model.host.costs, chunk or 10**6)
    # longer than two prompts take to be read, however few rows a step reads
    how = dict(method="ar", max_tokens=arguments.prompt + 900, ignore_eos=True)
    streams = [model.submit(text(32, i, model.vocab), **how) for i in range(arguments.streams)]
    watch = GapWatch(model, streams[0].jobs[0].seq, arguments.device == "cuda")
    watch.gaps(WARM_UP)
    first = watch.gaps_beside(text(arguments.prompt, 76, model.vocab))
    alone = watch.gaps(ALONE)
    for number in range(2, 2 + MOST_PROMPTS):
        captured = captures.count
        began = watch.clock()
        beside = sorted(watch.gaps_beside(text(arguments.prompt, 75 + number, model.vocab)))
        read = watch.clock() - began
        alone += watch.gaps(ALONE)
        if captures.count == captured:
            break
    usual = statistics.median(alone)
    late = beside[int(0.99 * (len(beside) - 1))]
    return {
        "model": model.name,
        "streams": arguments.streams,
        "prompt": arguments.prompt,
        "chunk": "whole" if chunk == 0 else model.host.pace.rows,
        "usual ms": round(1e3 * usual, 2),
        "longest alone ms": round(1e3 * max(alone), 2),
        "median beside ms": round(1e3 * statistics.median(beside), 2),
        "p99 beside ms": round(1e3 * late, 2),
        "longest beside ms": round(1e3 * beside[-1], 2),
        "longest over usual": round(beside[-1] / usual, 2),
        "p99 over usual": round(late / usual, 2),
        "prompt read in s": round(read, 2),
        "of prompt": number,
        "longest beside the first prompt ms": round(1e3 * max(first), 2),
    }


class GapWatch:
    """Watches the gaps between two tokens of one of several streams."""

    def __init__(self, model: Model, watched: Canvas, on_gpu: bool):
        self.model = model
        self.watched = watched
        self.clock = time.perf_counter if on_gpu else time.process_time

    def gaps(self, tokens: int) -> list[float]:
        """Of so many tokens, alone."""
        return [self._gap() for _ in range(tokens)]

    def gaps_beside(self, prompt: list[int]) -> list[float]:
        """Until a prompt is read."""
        how = dict(method="ar", max_tokens=1, ignore_eos=True)
        reader = self.model.submit(prompt, **how).jobs[0].seq
        found = []
        while not reader.trace.forwards:
            found.append(self._gap())
        return found

    def _gap(self) -> float:
        began = self.clock()
        known = self.watched.known
        while self.watched.known == known:
            if self.watched.done:
                raise SystemExit("the streams ended before the prompt was read")
            self.model.engine.step()
        return self.clock() - began


SAYS = {
    "lanes": "Sequences that fit at once with the keys and values of a 7B model (28 layers, 4 key "
    "heads of 128, bfloat16), in what its weights leave of so many GB, with a context of 8,704; "
    "prompts of 64 to 8,192 tokens, outputs of 16 to 512 (`python bench/pages.py lanes`; by the "
    "allocator itself, so on any machine):",
    "served": "An engine with such requests, whose forwards are not run, keeps so many of them at "
    "work on average (`python bench/pages.py served`):",
    "prefix": "Requests that begin alike, with what earlier ones left in pages and without, each "
    "of 32 tokens more and 8 of output (`python bench/pages.py prefix`; times are medians):",
    "gap": "Steps of streams, alone and beside a prompt that is read in chunks, or whole (`python "
    "bench/pages.py gap`; the goal is a longest step below twice the usual one):",
}


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} x {platform.machine()}, one thread, in processor time"


def section(found: dict[str, Any]) -> str:
    """One file's part of the page."""
    parts = []
    for name, says in SAYS.items():
        if name in found:
            parts += [f"{says}", table(found[name])]
    return "\n\n".join([*parts, f"On {found['where']}, {found['date']}."])


def told(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(told(row[name]) for name in names)} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["lanes", "prefix", "gap"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", help="of the model that is timed")
    parser.add_argument("--steps", type=int, default=200, help="of the engine, for lanes")
    parser.add_argument(
        "--system", type=int, default=512, help="tokens that all requests begin with"
    )
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--streams", type=int, help="beside the prompt; 31 on cuda, else 3")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--chunks", default="default,whole", help="rows; numbers, default or whole")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--publish", type=Path, nargs="*", help="write the page from these files")
    arguments = parser.parse_args()
    if arguments.publish:
        parts = [section(json.loads(file.read_text())) for file in arguments.publish]
        write_part(DOCS / "serving.md", "\n\n".join(parts), START, END)
        return
    arguments.streams = arguments.streams or (31 if arguments.device == "cuda" else 3)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {}
    if "lanes" in arguments.parts:
        pairs = [(gb * 1e9, common) for gb in (24, 140) for common in (0, 1024)]
        found["lanes"] = [sequences_that_fit(*pair) for pair in pairs]
    if "served" in arguments.parts:
        found["served"] = [sequences_at_once(24e9, common, arguments.steps) for common in (0, 1024)]
    if "prefix" in arguments.parts:
        found["prefix"] = [common_beginning(arguments)]
    if "gap" in arguments.parts:
        special = {"default": None, "whole": 0}
        chunks = [special.get(c, c) for c in arguments.chunks.split(",")]
        found["gap"] = [longest_gap(arguments, None if c is None else int(c)) for c in chunks]
    where = machine(arguments.device)
    told = dict(where=where, date=date.today().isoformat(), **found)
    print(section(told))
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
