"""Work by several workers, one of them killed in the middle, and Ray Serve under load:

    python bench/scale.py workers [--ray | --both]   1, 2 and 4 workers; again with one killed
    python bench/scale.py journal                    answers that the process in the middle can take
    python bench/scale.py serve                      two replicas: a rolling update, a killed one

Each prints a table for docs/scale.md; --publish writes it there. The last one, --ray and --both
need `forerun[ray]`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

from page import DOCS, write_part

from forerun.profile.machine import machine
from forerun.scale.generating import GenerateJob, GeneratePlan, generate
from forerun.scale.loading import LoadPlan
from forerun.scale.local import LocalPool

COLUMNS = ("workers", "killed", "seconds", "to the first answer", "tokens/s after it")
COLUMNS += ("lost, twice", "digest of the output")
PROCESSES = "processes"
RAY = "Ray actors"
PROMPTS = 96
TOKENS = 48
BATCH = 4
PLAN = GeneratePlan(
    LoadPlan("zoo:ar", lanes=4, max_context=128),
    "lookup",
    None,
    {"max_tokens": TOKENS, "temperature": 0.8, "logprobs": 1, "ignore_eos": True},
)


def write_prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    lines = [{"id": f"q{i}", "prompt": f"def f{i}(x):\n    return x"} for i in range(PROMPTS)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def one_run(folder: Path, pool, name: str, kill: bool) -> dict:
    prompts = write_prompts(folder)
    output = folder / name
    times: list[float] = []
    lost: list[int] = []

    def note(answered, done: int, total: int) -> None:
        times.append(time.perf_counter())
        if kill and done == total // 3:
            lost.append(answered.pid)
            os.kill(answered.pid, signal.SIGKILL)

    began = time.perf_counter()
    totals = generate(GenerateJob(PLAN, str(prompts), str(output), BATCH), pool, progress=note)
    seconds = time.perf_counter() - began
    ids = [json.loads(line)["id"] for line in output.read_text().splitlines()]
    steady = (len(times) - 1) * BATCH * TOKENS / (times[-1] - times[0])
    return {
        "lost": PROMPTS - len(set(ids)),
        "twice": len(ids) - len(set(ids)),
        "seconds": seconds,
        "until the first answer": times[0] - began,
        "tokens/s after it": steady,
        "bytes": hashlib.sha256(output.read_bytes()).hexdigest()[:12],
        "tokens": totals.tokens,
    }


def workers(kinds: Sequence[str], counts: Sequence[int]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as name:
        for kind, count in product(kinds, counts):
            for kill in (False, True) if count > 1 else (False,):
                pool = _ray_pool(count) if kind == RAY else LocalPool(count)
                output = f"{count}-{kill}-{kind[:3]}.jsonl"
                lines.append(
                    row_of(f"{count} {kind}", one_run(Path(name), pool, output, kill), kill)
                )
                print(lines[-1], flush=True)
    return "\n".join(
        [
            *lines,
            "",
            f"{PROMPTS} prompts of `zoo:ar` by `lookup`, {TOKENS} tokens each, {machine()}.",
        ]
    )


def row_of(workers: str, found: dict, kill: bool) -> str:
    return (
        f"| {workers} | {'one' if kill else ''} | {found['seconds']:.1f} "
        f"| {found['until the first answer']:.1f} | {found['tokens/s after it']:.0f} "
        f"| {found['lost']}, {found['twice']} | `{found['bytes']}` |"
    )


def _ray_pool(count: int):
    from forerun.scale.cluster import LOCAL, RayPool, connect

    connect(LOCAL, cpus=5)
    return RayPool.of(count, 1, None)


def journal(answers: int = 20_000, tokens: int = 256) -> None:
    """How many answers one process can take from all workers, write down and put in order."""
    from forerun.scale.journal import Journal
    from forerun.scale.work import Answered

    result = {"text": "x" * 4 * tokens, "token_ids": [*range(10_000, 10_000 + tokens)]}
    part = [[result]] * 64
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        made = Journal(Path(folder) / "out", {})
        names = [str(number) for number in range(answers // 64)]
        for name in names:
            made.add(Answered(name, json.loads(json.dumps(part)), 0))
        made.finish(line for answer in made.answers(names) for [line] in answer)
        seconds = time.perf_counter() - began
    print(f"{answers / seconds:.0f} answers of {tokens} tokens a second, {machine()}.")


class Clients:
    """Readers without end; a request that lost its server is asked again."""

    def __init__(self, address: str, count: int):
        self.address = address
        self.over = False
        self.seconds: list[tuple[float, float]] = []  # when it ended, how long it took
        self.failed = 0
        self.retried = 0
        self.threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]

    def _ask(self, number: int) -> None:
        import httpx

        asked = {"model": "zoo:ar", "prompt": f"def f{number}(x):", "max_tokens": 16, "seed": 1}
        with httpx.Client(timeout=60) as client:
            while not self.over:
                began = time.perf_counter()
                if self._answered(client, asked):
                    now = time.perf_counter()
                    self.seconds.append((now, now - began))
                else:
                    self.failed += 1

    def _answered(self, client, asked: dict) -> bool:
        import httpx

        for turn in range(5):
            try:
                answer = client.post(f"{self.address}/v1/completions", json=asked)
                if answer.status_code == 200:
                    return True
            except httpx.TransportError:
                pass
            self.retried += 1
            time.sleep(0.2 * 2**turn)
        return False


def serve(readers: int, seconds: float) -> str:
    from forerun.scale import serving
    from forerun.scale.cluster import LOCAL, connect
    from forerun.serve.settings import Settings

    connect(LOCAL, cpus=5)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    settings = Settings(models=["zoo:ar"], lanes=4, max_context=128, grace=20)
    replicas = serving.Replicas(2, 2, cpus=0.5)
    serving.deploy(settings, replicas, "bench", "127.0.0.1", port)
    clients = Clients(f"http://127.0.0.1:{port}", readers)
    marks: list[tuple[str, float, int, int]] = []

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter(), clients.failed, clients.retried))

    for thread in clients.threads:
        thread.start()
    time.sleep(3)
    mark("nothing else")
    time.sleep(seconds)
    mark("a rolling update of both")
    serving.deploy(settings, replicas, "bench", "127.0.0.1", port)
    time.sleep(2)
    mark("one killed")
    os.kill(min(_pids("bench")), signal.SIGKILL)
    time.sleep(seconds)
    mark("end")
    clients.over = True
    for thread in clients.threads:
        thread.join()
    lines = ["| meanwhile | requests | failed | asked again | median ms | 99th ms | seconds |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (name, since, failed, retried), (_, until, later, again) in pairwise(marks):
        took = sorted(each for at, each in clients.seconds if since <= at < until)
        last = took[int(0.99 * len(took))]
        lines.append(
            f"| {name} | {len(took)} | {later - failed} | {again - retried} "
            f"| {1e3 * statistics.median(took):.0f} | {1e3 * last:.0f} "
            f"| {until - since:.0f} |"
        )
    serving.stop("bench")
    load = f"Two replicas of `zoo:ar`, {readers} readers without a pause, 16 tokens each"
    return "\n".join([*lines, "", f"{load}, {machine()}."])


def _pids(name: str) -> set[int]:
    from ray.serve.context import _get_global_client

    from forerun.scale.serving import DEPLOYMENT

    told = _get_global_client().get_serve_details()["applications"][name]
    replicas = told["deployments"][DEPLOYMENT]["replicas"]
    return {one["pid"] for one in replicas if one["state"] == "RUNNING"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("workers", "serve", "journal"))
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--publish", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "journal":
        journal()
        return
    if arguments.what == "workers":
        kinds = [PROCESSES, RAY] if arguments.both else [RAY if arguments.ray else PROCESSES]
        table = workers(kinds, arguments.counts)
    else:
        table = serve(arguments.readers, arguments.seconds)
    print(table)
    if arguments.publish:
        what = arguments.what
        write_part(DOCS / "scale.md", table, f"<!-- {what} -->", f"<!-- end {what} -->")


if __name__ == "__main__":
    main()
