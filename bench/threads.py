"""Many callers on one model: threads and asyncio tasks, some of which give up half-way.

    python bench/threads.py --seconds 60

Every result must equal the one of the same request alone, and nothing may be left behind: no lane,
no thread, no memory that grows. Prints one line of JSON, and exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import sys
import threading
import time
from dataclasses import dataclass, field

import forerun
from forerun.api import Model
from forerun.requests.result import Result

Request = dict[str, object]

PROMPTS = ("Once upon a time", "ABABAB", "x", "One two three one two three", "The end. The")
WAYS: tuple[Request, ...] = (
    {"method": "ar"},
    {"method": "ar", "temperature": 1.0},
    {"method": "lookup", "temperature": 0.7},
    {"method": "lookup", "k": 4},
    {"method": "jacobi", "block": 4},
)


@dataclass
class Tally:
    """What came of all requests."""

    equal: int = 0
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list)


class Crowd:
    """Callers of one model, and what each request gives when it is alone."""

    def __init__(self, model: Model, seconds: float):
        self.model = model
        self.tally = Tally()
        self.requests: list[Request] = [
            {"prompt": prompt, "max_tokens": 4 + 6 * (i % 3), "seed": i, **way}
            for i, prompt in enumerate(PROMPTS)
            for way in WAYS
        ]
        self.alone = [model.generate(**request).token_ids for request in self.requests]  # type: ignore[arg-type]
        self.until = time.monotonic() + seconds

    def compare(self, index: int, result: Result) -> None:
        if result.token_ids == self.alone[index]:
            self.tally.equal += 1
        else:
            self.tally.wrong.append(f"{self.requests[index]}: {result.token_ids}")

    def thread(self, seed: int) -> None:
        draw = random.Random(seed)
        try:
            while time.monotonic() < self.until:
                self._one_call(draw)
        except Exception as error:
            self.tally.wrong.append(repr(error))

    def _one_call(self, draw: random.Random) -> None:
        index = draw.randrange(len(self.requests))
        request = self.requests[index]
        kind = draw.choice(["generate", "stream", "close", "abandon"])
        if kind == "generate":
            self.compare(index, self.model.generate(**request))  # type: ignore[arg-type]
            return
        stream = self.model.stream(**request)  # type: ignore[arg-type]
        if kind == "stream":
            text = "".join(map(str, stream))
            result = stream.results[0]
            if text != result.text:
                self.tally.wrong.append(f"{request}: streamed {text!r}, not {result.text!r}")
            self.compare(index, result)
            return
        next(stream, None)
        if kind == "close":
            stream.close()
        self.tally.cancelled += 1

    async def task(self, seed: int) -> None:
        draw = random.Random(seed)
        try:
            while time.monotonic() < self.until:
                await self._one_await(draw)
        except Exception as error:
            self.tally.wrong.append(repr(error))

    async def _one_await(self, draw: random.Random) -> None:
        index = draw.randrange(len(self.requests))
        request = self.requests[index]
        kind = draw.choice(["generate", "cancel", "leave"])
        if kind == "leave":
            async for _ in self.model.astream(**request):
                break
            self.tally.cancelled += 1
            return
        waiting = asyncio.create_task(self.model.agenerate(**request))
        if kind == "cancel":
            await asyncio.sleep(draw.random() / 20)
            waiting.cancel()
        try:
            self.compare(index, await waiting)
        except asyncio.CancelledError:
            self.tally.cancelled += 1

    async def tasks(self, count: int) -> None:
        await asyncio.gather(*(self.task(1000 + i) for i in range(count)))


def run(model: Model, threads: int, tasks: int, seconds: float) -> dict[str, object]:
    """Let them all loose on a model. Gives what came of it, and what was left behind."""
    crowd = Crowd(model, seconds)
    before = set(threading.enumerate())
    callers = [threading.Thread(target=crowd.thread, args=(i,)) for i in range(threads)]
    for caller in callers:
        caller.start()
    if tasks:
        asyncio.run(crowd.tasks(tasks))
    for caller in callers:
        caller.join()
    gc.collect()
    deadline = time.monotonic() + 10
    while model.engine.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    return {
        "equal": crowd.tally.equal,
        "cancelled": crowd.tally.cancelled,
        "wrong": crowd.tally.wrong[:5],
        "busy lanes": model.lanes - len(model.engine.free_lanes),
        "waiting": len(model.engine.queue),
        "threads left": len(set(threading.enumerate()) - before),
        "MB at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    with forerun.load(args.model) as model:
        found = run(model, args.threads, args.tasks, args.seconds)
    found["engine threads left"] = sum(t.name == "forerun-engine" for t in threading.enumerate())
    print(json.dumps(found))
    left = (found["busy lanes"], found["waiting"], found["threads left"])
    sys.exit(bool(found["wrong"] or any(left) or found["engine threads left"]))


if __name__ == "__main__":
    main()
