"""A server under load: many streams at once, clients that behave well and badly, and what is left
over when they are gone.

    python bench/serve_load.py --streams 256 --seconds 600        # make load
    python bench/serve_load.py --overhead                         # HTTP beside the bare engine

The server is a process of its own. Clients here read to the end, go away in the middle, read
slowly, ask for nonsense, or set deadlines. Every answer that is finished is compared with the same
request decoded alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.request import urlopen

MODEL = "zoo:ar"
DRAFT = "zoo:drafter"
PROMPTS = [
    "def fib(n):",
    "import os\nimport sys\n",
    "class Stack:\n    def __init__(self):\n",
    "for i in range(10):\n    print(",
    "def read_file(path):\n    with open(path) as",
    "x = [1, 2, 3]\ny = [",
    "try:\n    value = int(text)\nexcept",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
]
KINDS = {"finish": 70, "leave": 10, "slow": 8, "nonsense": 6, "deadline": 6}
LONGEST_PAUSE = 0.3  # seconds, of a slow reader
NONSENSE = [
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "max_tokens": 10**6},
    {"prompt": "x", "nobody": 1},
    {"prompt": 5},
    {"model": "gpt-9", "prompt": "x"},
]


@dataclass(frozen=True)
class Case:
    """A request that can be decoded again, alone."""

    prompt: str
    method: str
    temperature: float
    seed: int
    max_tokens: int

    def body(self) -> dict:
        extension = {"method": self.method}
        if self.method == "speculative":
            extension |= {"draft": DRAFT, "options": {"k": 3}}
        return {
            "model": MODEL,
            "prompt": self.prompt,
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "stream": True,
            "forerun": extension,
        }


def all_cases(count: int, seed: int) -> list[Case]:
    draw = random.Random(seed)
    return [
        Case(
            draw.choice(PROMPTS),
            draw.choice(["ar", "ar", "lookup", "speculative", "jacobi"]),
            draw.choice([0.0, 1.0]),
            draw.randrange(1000),
            draw.choice([4, 8, 16, 32, 48]),
        )
        for _ in range(count)
    ]


@dataclass
class Tally:
    """What the clients saw."""

    outcomes: Counter = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: dict[Case, Counter] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Reply:
    """A reply over a bare socket: its status, then its events."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int):
        self.reader = reader
        self.writer = writer
        self.status = status

    async def events(self):
        while line := await self.reader.readline():
            if line.startswith(b"data: "):
                yield line[6:].strip()
            if line.startswith(b"data: [DONE]"):
                return

    def close(self) -> None:
        self.writer.close()


async def post(port: int, body: dict) -> Reply:
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    return Reply(reader, writer, status)


async def client(port: int, cases: list[Case], until: float, tally: Tally, seed: int) -> None:
    """One after the other, requests of all kinds."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        try:
            await one_request(port, draw.choice(cases), kind, draw, tally)
        except (OSError, asyncio.IncompleteReadError, IndexError) as error:
            tally.outcomes[f"{kind}: {type(error).__name__}"] += 1
            tally.faults.append(f"{kind}: {error!r}")
            await asyncio.sleep(0.2)


async def one_request(port: int, case: Case, kind: str, draw: random.Random, tally: Tally) -> None:
    body = draw.choice(NONSENSE) if kind == "nonsense" else case.body()
    if kind == "deadline":
        body["forerun"]["deadline"] = draw.choice([0.05, 0.5, 2.0])
    began = time.monotonic()
    reply = await post(port, body)
    try:
        if reply.status != 200:
            tally.outcomes[f"{kind}: {reply.status}"] += 1
            expected = {"nonsense": (400, 404), "deadline": (504, 429)}.get(kind, (429,))
            if reply.status not in expected:
                tally.faults.append(f"{kind}: status {reply.status}")
            await asyncio.sleep(0.2 if reply.status == 429 else 0)
            return
        await read(reply, case, kind, draw, tally, began)
    finally:
        reply.close()


async def read(
    reply: Reply, case: Case, kind: str, draw: random.Random, tally: Tally, began: float
) -> None:
    leaves_after = draw.randrange(1, 20) if kind == "leave" else None
    text = ""
    last = began
    reason = None
    number = 0
    async for event in reply.events():
        now = time.monotonic()
        if event == b"[DONE]":
            break
        told = json.loads(event)
        if "error" in told:
            tally.faults.append(f"{kind}: {told['error']}")
            return
        choice = told["choices"][0]
        if choice["text"]:
            (tally.first if not number else tally.between).append(now - last)
            last = now
            number += 1
        text += choice["text"]
        reason = choice["finish_reason"] or reason
        if "forerun" in told:
            tally.tokens += round(
                told["forerun"]["forwards"] * told["forerun"]["tokens_per_forward"]
            )
            if "deadline" in told["forerun"]["finish_reasons"]:
                reason = "deadline"
        if leaves_after is not None and number >= leaves_after:
            tally.outcomes["leave: gone"] += 1
            return
        if kind == "slow":
            await asyncio.sleep(draw.random() * LONGEST_PAUSE)
            last = time.monotonic()
    tally.outcomes[f"{kind}: {reason}"] += 1
    if reason is None:
        tally.faults.append(f"{kind}: a stream that broke off")
    elif reason != "deadline":
        tally.answers.setdefault(case, Counter())[text] += 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(port: int, *flags: str):
    """A server in a process of its own, and no other that listens there in its place."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise SystemExit(f"--port {port} is taken: leave it out.")
    words = [sys.executable, "-m", "forerun", "serve", MODEL, DRAFT, "--port", str(port), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=environment)
    try:
        for _ in range(600):
            check_runs(process)
            with suppress(OSError):
                if urlopen(f"http://127.0.0.1:{port}/ready").status == 200:
                    break
            time.sleep(0.1)
        yield process
        check_runs(process)
    finally:
        process.terminate()
        process.wait(60)


def check_runs(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        raise SystemExit(f"the server has ended with status {process.returncode}.")


def gauges(port: int) -> dict[str, float]:
    text = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^forerun:(num_\w+)\{[^}]*\} (\S+)", text, re.M):
        found[name] = found.get(name, 0.0) + float(value)
    return found


async def watch(process: subprocess.Popen, until: float, sizes: list[float]) -> None:
    """Memory of the server, every few seconds."""
    import psutil

    while time.monotonic() < until:
        sizes.append(psutil.Process(process.pid).memory_info().rss / 2**20)
        await asyncio.sleep(5)


async def load(flags: argparse.Namespace, process: subprocess.Popen, cases: list[Case]) -> dict:
    warm = await post(flags.port, cases[0].body())  # loads the model
    async for _ in warm.events():
        pass
    tally = Tally()
    sizes: list[float] = []
    began = time.monotonic()
    until = began + flags.seconds
    clients = [client(flags.port, cases, until, tally, i) for i in range(flags.streams)]
    await asyncio.gather(watch(process, until, sizes), *clients)
    took = time.monotonic() - began
    left = gauges(flags.port)
    for _ in range(50):  # cancelling is a message: give it a moment
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
        left = gauges(flags.port)
    return report(tally, sizes, left, took) | {"tally": tally}


def report(tally: Tally, sizes: list[float], left: dict[str, float], took: float) -> dict:
    third = max(1, len(sizes) // 3)
    return {
        "seconds": round(took),
        "requests": sum(tally.outcomes.values()),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "faults": Counter(tally.faults).most_common(5),
        "tokens_per_second": round(tally.tokens / took, 1),
        "first_token_ms": percentiles(tally.first),
        "between_ms": percentiles(tally.between),
        "memory_mib": [
            round(statistics.mean(sizes[:third])),
            round(statistics.mean(sizes[-third:])),
        ],
        "memory_mib_by_minute": [round(max(sizes[i : i + 12])) for i in range(0, len(sizes), 12)],
        "left_over": left,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    at = lambda share: round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
    return {"p50": at(0.5), "p99": at(0.99), "count": len(values)}


def compare_with_alone(tally: Tally) -> dict[str, int]:
    """Every finished answer beside the same request decoded alone."""
    import forerun

    model = forerun.load(MODEL, lanes=1)
    counts = {"answers": 0, "different": 0}
    for case, texts in tally.answers.items():
        options = {"draft": DRAFT, "k": 3} if case.method == "speculative" else {}
        alone = model.generate(
            case.prompt,
            method=case.method,
            temperature=case.temperature,
            seed=case.seed,
            max_tokens=case.max_tokens,
            **options,
        )
        counts["answers"] += sum(texts.values())
        counts["different"] += sum(count for text, count in texts.items() if text != alone.text)
    return counts


async def http_rate(port: int, streams: int, tokens: int) -> float:
    """Tokens per second of some equal streams over HTTP."""
    body = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "forerun": {"method": "ar"},
    }

    async def one(prompt: str) -> None:
        reply = await post(port, {**body, "prompt": prompt})
        async for _ in reply.events():
            pass
        reply.close()

    began = time.perf_counter()
    await asyncio.gather(*[one(PROMPTS[i % len(PROMPTS)]) for i in range(streams)])
    return streams * tokens / (time.perf_counter() - began)


def overhead(flags: argparse.Namespace, process: subprocess.Popen) -> dict:
    """Some equal streams over HTTP and in the bare engine, in turns: tokens per second, and
    processor time, which other programs on the machine disturb less. Clients are bare sockets; they
    run on the same cores, and what they take is told apart."""
    import torch

    import forerun

    torch.set_num_threads(1)
    model = forerun.load(MODEL, lanes=flags.lanes)
    tokens = flags.lanes * flags.tokens
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(flags.lanes)]
    how = {"max_tokens": flags.tokens, "ignore_eos": True, "method": "ar"}
    turns: list[dict[str, float]] = []
    for _ in range(flags.turns + 1):
        before = processor_seconds(process.pid)
        own = processor_seconds(os.getpid())
        over_http = asyncio.run(http_rate(flags.port, flags.lanes, flags.tokens))
        http_work = processor_seconds(process.pid) - before
        client_work = processor_seconds(os.getpid()) - own
        before = processor_seconds(os.getpid())
        began = time.perf_counter()
        model.generate(prompts, **how)
        bare = tokens / (time.perf_counter() - began)
        bare_work = processor_seconds(os.getpid()) - before
        turns.append(
            {
                "http_tokens_per_second": over_http,
                "engine_tokens_per_second": bare,
                "rate_ratio": over_http / bare,
                "http_processor_us_per_token": 1e6 * http_work / tokens,
                "engine_processor_us_per_token": 1e6 * bare_work / tokens,
                "client_processor_us_per_token": 1e6 * client_work / tokens,
                "processor_ratio": http_work / bare_work,
            }
        )
    kept = turns[1:]  # the first loads and warms
    medians = {name: round(statistics.median(t[name] for t in kept), 3) for name in kept[0]}
    return {**medians, "rate_ratios": [round(turn["rate_ratio"], 3) for turn in kept]}


def processor_seconds(pid: int) -> float:
    """That a process has used, all its threads together. By its clock: what /proc says comes in
    hundredths of a second, which are 10 us per token of a turn."""
    clock = (~pid << 3) | 2  # what clock_getcpuclockid(3) returns on Linux
    return time.clock_gettime(clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--port", type=int, help="default: one that is free")
    parser.add_argument("--lanes", type=int, help="default: 32, and 8 with --overhead")
    parser.add_argument("--overhead", action="store_true", help="HTTP beside the bare engine")
    parser.add_argument("--tokens", type=int, default=128, help="with --overhead: per stream")
    parser.add_argument("--turns", type=int, default=5, help="with --overhead")
    parser.add_argument("--device")
    parser.add_argument("--interval", type=float, help="the server's --stream-interval")
    flags = parser.parse_args()
    flags.port = flags.port or free_port()
    flags.lanes = flags.lanes or (8 if flags.overhead else 32)
    options = ["--lanes", str(flags.lanes), "--queue", str(2 * flags.streams)]
    if flags.device:
        options += ["--device", flags.device]
    if flags.interval is not None:
        options += ["--stream-interval", str(flags.interval)]
    with served(flags.port, *options) as process:
        if flags.overhead:
            print(json.dumps(overhead(flags, process), indent=1))
            return
        found = asyncio.run(load(flags, process, all_cases(flags.cases, 1)))
    tally = found.pop("tally")
    found["beside_alone"] = compare_with_alone(tally)
    print(json.dumps(found, indent=1))
    wrong = found["beside_alone"]["different"] or tally.faults or any(found["left_over"].values())
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
