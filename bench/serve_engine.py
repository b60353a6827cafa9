"""What is behind the server's routes, under load and without HTTP: admission, queue, deadlines,
cancelling, readers fast and slow, and the engine in its thread.

    python bench/serve_engine.py zoo:ar --draft zoo:drafter --seconds 60        # on 2 cores
    python bench/serve_engine.py zoo:ar --draft zoo:drafter --seconds 60 --device cuda \
        --dtype bfloat16 --lanes 128

It needs none of the packages of the extra `serve`, so it runs where nothing can be installed.
Clients do what those of `serve_load.py` do: read to the end, go away in the middle, read slowly,
ask for nonsense, or set deadlines. Every finished answer is compared with the same request decoded
alone by a model loaded anew. Then some streams run through the server's layer and in the bare
engine, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from serve_load import KINDS, LONGEST_PAUSE, PROMPTS, Case, Tally, all_cases, percentiles

import forerun
from forerun.api import Model
from forerun.requests.jobs import Bell, Jobs
from forerun.serve.errors import ApiError, as_api_error
from forerun.serve.models import Models
from forerun.serve.settings import Settings
from forerun.serve.streams import Ask, Decoding, Decodings, PlainWishes, Text, first_error

CLIENTS = 16  # names that the streams share, for the fair queue
NONSENSE = [{"temperature": -1.0}, {"max_tokens": 10**6}, {"method": "nobody"}, {"top_p": 2.0}]


class Silence:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Silence:
        return self

    def __call__(self, *arguments: object) -> Silence:
        return self


def request_of(case: Case, draft: Model | None) -> dict[str, Any]:
    """A case as `submit` takes it."""
    options: dict[str, Any] = {"method": case.method}
    if case.method == "speculative":
        options |= {"draft": draft, "k": 3}
    return {
        "temperature": case.temperature,
        "seed": case.seed,
        "max_tokens": case.max_tokens,
        **options,
    }


class Clients:
    """Those who ask, and what they see."""

    def __init__(self, decodings: Decodings, model: str, draft: Model | None):
        self.decodings = decodings
        self.model = model
        self.draft = draft
        self.tally = Tally()
        self.most_waiting_text = 0  # characters that waited for a slow reader

    async def ask_on(self, number: int, cases: list[Case], until: float) -> None:
        """One client: one request after the other."""
        draw = random.Random(number)
        while time.monotonic() < until:
            kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
            try:
                await self.ask(draw.choice(cases), kind, draw, f"client {number % CLIENTS}")
            except ApiError as error:
                self._refused(kind, error)
                await asyncio.sleep(0.2 if error.status == 429 else 0.0)

    def _refused(self, kind: str, error: ApiError) -> None:
        self.tally.outcomes[f"{kind}: {error.status}"] += 1
        expected = {"nonsense": (400, 404), "deadline": (504, 429)}.get(kind, (429,))
        if error.status not in expected:
            self.tally.faults.append(f"{kind}: {error.status} {error.message}")

    async def ask(self, case: Case, kind: str, draw: random.Random, name: str) -> None:
        arguments = request_of(case, self.draft)
        deadline = None
        if kind == "nonsense":
            arguments |= draw.choice(NONSENSE)
        if kind == "deadline":
            deadline = draw.choice([0.05, 0.5, 2.0])
            arguments |= {"deadline": deadline, "allow_partial": True}
        submit = partial(submitted, case.prompt, arguments)
        ask = Ask(submit, self.model, client=name, extension=PlainWishes(deadline=deadline))
        began = time.monotonic()
        try:
            decoding = await self.decodings.start(ask)
        except Exception as error:
            raise as_api_error(error) from error
        try:
            await self.read(decoding, case, kind, draw, began)
        finally:
            decoding.close()

    async def read(
        self, decoding: Decoding, case: Case, kind: str, draw: random.Random, began: float
    ) -> None:
        tally = self.tally
        leaves_after = draw.randrange(1, 20) if kind == "leave" else None
        last = began
        number = 0
        text = ""
        async for burst in decoding.bursts():
            now = time.monotonic()
            (tally.between if number else tally.first).append(now - last)
            last = now
            number += 1
            new = "".join(item.text for item in burst if isinstance(item, Text))
            text += new
            if leaves_after is not None and number >= leaves_after:
                tally.outcomes["leave: gone"] += 1
                return
            if kind == "slow":
                self.most_waiting_text = max(self.most_waiting_text, len(new))
                await asyncio.sleep(draw.random() * LONGEST_PAUSE)
                last = time.monotonic()
        results = await decoding.results()
        error = first_error(results)
        if error is not None:
            raise as_api_error(error)
        [[result]] = results
        reason = decoding.reason(result)
        tally.tokens += result.stats.tokens
        tally.outcomes[f"{kind}: {reason}"] += 1
        if text != result.text:
            tally.faults.append(f"{kind}: the pieces are not the text")
        if reason in ("stop", "length"):
            tally.answers.setdefault(case, Counter())[result.text] += 1
        elif reason != "deadline":
            tally.faults.append(f"{kind}: ended by {reason}")


def submitted(prompt: str, arguments: dict[str, Any], model: Model) -> Jobs:
    return model.submit(prompt, streams=True, **arguments)


def memory_mib(device: str | None) -> list[float]:
    """Of this process, and of the device."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = [pages * resource.getpagesize() / 2**20]
    if device == "cuda":
        held.append(torch.cuda.memory_allocated() / 2**20)
    return held


async def watch(until: float, device: str | None, sizes: list[list[float]]) -> None:
    while time.monotonic() < until:
        sizes.append(memory_mib(device))
        await asyncio.sleep(2)


async def left_over(model: Model, decodings: Decodings) -> dict[str, float]:
    """What is still there when all clients are gone; all of it should be 0."""
    engine = model.engine
    gates = [served.gate for served in decodings.models]
    for _ in range(100):  # cancelling is a message: give it a moment
        left = {
            "lanes": model.lanes - len(engine.free_lanes),
            "running": len(engine.running) + len(decodings.running),
            "waiting": len(engine.queue) + sum(len(gate.waiting) for gate in gates),
            "inside": sum(gate.inside for gate in gates),
        }
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    for host in engine.hosts:
        host.pool.check([memo.pages for memo in host.memos])
        free = host.pool.ensure(host.slots.table.count)
        left["pages"] = left.get("pages", 0) + (not free)
    return left


async def load(flags: argparse.Namespace, server: Decodings) -> dict[str, Any]:
    _, model = await server.models.loaded(flags.model)
    draft = None
    if flags.draft:
        _, draft = await server.models.loaded(flags.draft)
    cases = cases_of(flags)
    clients = Clients(server, flags.model, draft)
    await warm(clients, cases)
    sizes: list[list[float]] = []
    began = time.monotonic()
    until = began + flags.seconds
    asking = [clients.ask_on(number, cases, until) for number in range(flags.streams)]
    await asyncio.gather(watch(until, flags.device, sizes), *asking)
    took = time.monotonic() - began
    tally = clients.tally
    third = max(1, len(sizes) // 3)
    mean = lambda part: [round(statistics.mean(each)) for each in zip(*part)]
    return {
        "seconds": round(took, 1),
        "streams": flags.streams,
        "lanes": model.lanes,
        "requests": sum(tally.outcomes.values()),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "faults": Counter(tally.faults).most_common(5),
        "tokens_per_second": round(tally.tokens / took, 1),
        "first_token_ms": percentiles(tally.first),
        "between_ms": percentiles(tally.between),
        "memory_mib_first_and_last_third": [mean(sizes[:third]), mean(sizes[-third:])],
        "most_text_that_waited_for_a_slow_reader": clients.most_waiting_text,
        "left_over": await left_over(model, server),
        "answers": tally.answers,
    }


async def warm(clients: Clients, cases: list[Case]) -> None:
    """All cases once, so that what is captured or compiled is there."""
    draw = random.Random(0)
    await asyncio.gather(*[clients.ask(case, "finish", draw, "warm") for case in cases])
    clients.tally = Tally()


def cases_of(flags: argparse.Namespace) -> list[Case]:
    cases = all_cases(flags.cases, 1)
    return [each for each in cases if flags.draft or each.method != "speculative"]


def compare_with_alone(answers: dict[Case, Counter], flags: argparse.Namespace) -> dict[str, Any]:
    """Every finished answer beside the same request decoded alone."""
    how = {"device": flags.device, "dtype": flags.dtype, "max_context": flags.max_context}
    model = forerun.load(flags.model, lanes=1, **how)
    draft = forerun.load(flags.draft, lanes=1, **how) if flags.draft else None
    counts = {"answers": 0, "different": 0}
    by_method: Counter[str] = Counter()
    for case, texts in answers.items():
        alone = model.generate(case.prompt, **request_of(case, draft))
        wrong = sum(count for text, count in texts.items() if text != alone.text)
        counts["answers"] += sum(texts.values())
        counts["different"] += wrong
        by_method[case.method] += wrong
    return {**counts, "different_by_method": dict(+by_method)}


async def through_the_layer(server: Decodings, flags: argparse.Namespace, count: int) -> float:
    """Tokens per second of some equal streams."""
    how = {"method": "ar", "temperature": 0.0, "max_tokens": flags.tokens, "ignore_eos": True}

    async def one(prompt: str) -> None:
        decoding = await server.start(Ask(partial(submitted, prompt, how), flags.model))
        try:
            async for _ in decoding.bursts():
                pass
            await decoding.results()
        finally:
            decoding.close()

    began = time.perf_counter()
    await asyncio.gather(*[one(PROMPTS[i % len(PROMPTS)]) for i in range(count)])
    return count * flags.tokens / (time.perf_counter() - began)


async def beside_engine(server: Decodings, flags: argparse.Namespace) -> dict[str, Any]:
    """The same streams through the server's layer and in the bare engine, in turns."""
    _, model = await server.models.loaded(flags.model)
    found = {}
    how = {"method": "ar", "max_tokens": flags.tokens, "ignore_eos": True}
    for count in sorted({min(8, flags.lanes), flags.lanes}):
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
        turns = []
        for _ in range(flags.turns + 1):
            layer = await through_the_layer(server, flags, count)
            began = time.perf_counter()
            await asyncio.to_thread(partial(model.generate, prompts, **how))
            turns.append((layer, count * flags.tokens / (time.perf_counter() - began)))
        layers, engines = zip(*turns[1:])  # the first warms
        found[f"{count} streams"] = {
            "layer_tokens_per_second": round(statistics.median(layers), 1),
            "engine_tokens_per_second": round(statistics.median(engines), 1),
            "ratios": [round(layer / engine, 3) for layer, engine in turns[1:]],
        }
    return found


async def run(flags: argparse.Namespace) -> dict[str, Any]:
    Bell.of(asyncio.get_running_loop()).pause = Settings().stream_interval
    settings = Settings(
        models=[flags.model, *([flags.draft] if flags.draft else [])],
        device=flags.device,
        dtype=flags.dtype,
        lanes=flags.lanes,
        max_context=flags.max_context,
        queue=2 * flags.streams,
    )
    server = Decodings(Models(settings), settings, Silence())  # type: ignore[arg-type]
    try:
        found = await load(flags, server)
        found["beside_engine"] = await beside_engine(server, flags)
    finally:
        server.drain()
        server.end_all()
        server.models.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="zoo:ar")
    parser.add_argument("--draft", help="a model for speculative requests; without it, none")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="per stream, beside the engine")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-context", type=int, default=512)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--json", type=Path, help="write what is found here as well")
    flags = parser.parse_args()
    found = asyncio.run(run(flags))
    found["beside_alone"] = compare_with_alone(found.pop("answers"), flags)
    found["model"] = flags.model
    print(json.dumps(found, indent=1))
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1))
    wrong = (
        found["beside_alone"]["different"] or found["faults"] or any(found["left_over"].values())
    )
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
