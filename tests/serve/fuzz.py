"""Requests that nobody would send, by the thousand: none may be answered with a 500.

`python -m tests.serve.fuzz --count 10000` asks a server of tiny models in this process. A request
that is not answered in time ends the run, with the request, what the server was doing and where
every thread and task stood.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import heapq
import io
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from typing import NoReturn

from forerun import registry
from forerun.serve import wire
from tests.serve.servers import KINDS, in_process

ROUTES = {
    "/v1/completions": wire.CompletionRequest,
    "/v1/chat/completions": wire.ChatRequest,
    "/v1/responses": wire.ResponsesRequest,
    "/v1/fim/completions": wire.FimRequest,
    "/infill": wire.LlamaInfillRequest,
    "/v1/infill": wire.InfillRequest,
    "/tokenize": wire.TokenizeRequest,
    "/detokenize": wire.DetokenizeRequest,
    "/v1/embeddings": wire.EmbeddingsRequest,
}
NEEDED = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/fim/completions": {"prompt": "a", "suffix": "b"},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 4},
    "/v1/infill": {"text": "a<|fill:2|>b"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/embeddings": {"input": "x"},
}
SENSIBLE = {
    "model": [*KINDS, "nothing"],
    "prompt": ["hello", "", ["a", "b"], [1, 2, 3], [[1], [2, 3]], "é" * 50, "x" * 400],
    "messages": [
        [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text"}]}],
        [{"role": "tool", "content": None, "tool_call_id": "x"}],
        [{"role": "user"}],
    ],
    "input": ["hi", [{"role": "user", "content": "x"}], [{"type": "reasoning"}], []],
    "text": ["a<|fill:1-3|>b<|fill:2|>", {"prefix": "a", "max_tokens": 3}, ["<|fill:1|>"], "x"],
    "token_ids": [[1, None, 2], [[None]], [[1, None], [None]], [300, None]],
    "temperature": [0, 0.7, 1, 1e-9, 1e9],
    "top_p": [1, 0.5, 0, 1e-9],
    "top_k": [0, -1, 1, 5, 10**6],
    "n": [1, 2, 3, 9],
    "max_tokens": [0, 1, 5, 30, 1000],
    "n_predict": [-1, 0, 3, 500],
    "max_completion_tokens": [0, 4],
    "max_output_tokens": [0, 4],
    "logprobs": [True, 0, 1, 5, 101],
    "top_logprobs": [0, 2, 200],
    "stop": ["a", ["b", "c"], [], [""], "zzz"],
    "seed": [0, -1, 2**63 - 1, 2**64],
    "logit_bias": [{"5": 3}, {"999": 1}, {"-1": 1}, {"5": -1e6}, {}],
    "allowed_tokens": [[5], [], [999], [256]],
    "stop_token_ids": [[5], [999]],
    "suffix": ["", "x"],
    "prediction": [{"type": "content", "content": "abc"}, {"content": ""}, {"content": []}],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, {"x": 1}],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}},
        {},
    ],
    "regex": ["[a-c]{2,4}", "(", "(?=a)b", ""],
    "choices": [["a", "bc"], [], [""]],
    "grammar": ['start: "a"+', "start: nope", "::="],
    "tools": [[{"type": "function", "function": {"name": "f"}}], [], [{}]],
    "tool_choice": ["none", "auto", "required", "f", {"type": "function"}, 3],
    "echo": [True, False],
    "tokens": [[1], [], [999], [-1]],
    "min_tokens": [0, 3, 500],
    "presence_penalty": [0.5, 1e7],
    "repetition_penalty": [1.2, 0, -1],
}
WILD = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    -(10**30),
    1e308,
    "",
    "x",
    "\x00",
    "\ud800",
    "ü" * 3,
    [],
    [[]],
    [None],
    {},
    {"a": {"b": []}},
    [1, "a"],
    float("nan"),
    float("inf"),
]


def option_value(draw: random.Random):
    return draw.choice([0, 1, 2, 3, 8, 0.5, 10**9, "lookup", "x", True, None, [1], *WILD])


def extension(draw: random.Random) -> dict:
    methods = [*registry.names("methods"), "nope", 3]
    told = {"method": draw.choice(methods), "trace": draw.choice([True, False, "stream", "x"])}
    if draw.random() < 0.4:
        told["draft"] = draw.choice([*registry.names("drafters"), *KINDS, "/etc/passwd", 1])
    if draw.random() < 0.5 and isinstance(told["method"], str) and told["method"] != "nope":
        names = [*registry.method_named(told["method"]).option_names(), "prediction", "x"]
        told["options"] = {draw.choice(names): option_value(draw) for _ in range(2)}
    if draw.random() < 0.1:
        told["deadline"] = draw.choice([0.001, 5, -1, "x"])
    if draw.random() < 0.1:
        told["priority"] = draw.choice([1, 1000, None])
    if draw.random() < 0.7 and told["trace"] == "x":
        told["trace"] = False
    return told


def body_of(draw: random.Random, path: str) -> dict:
    body = dict(NEEDED[path])
    names = [*ROUTES[path].model_fields, "unheard_of"]
    body["model"] = draw.choice(list(KINDS))
    for name in draw.sample(names, min(len(names), draw.choice([0, 1, 2, 2, 3, 6]))):
        if name == "forerun":
            body[name] = extension(draw)
        elif name in SENSIBLE and draw.random() < 0.9:
            body[name] = draw.choice(SENSIBLE[name])
        elif draw.random() < 0.4:
            body[name] = draw.choice(WILD)
    if draw.random() < 0.3 and "forerun" in names:
        body["forerun"] = extension(draw)
    return body


def content_of(draw: random.Random, path: str) -> bytes:
    """A body, now and then damaged."""
    content = json.dumps(body_of(draw, path)).encode()
    if draw.random() < 0.05:
        place = draw.randrange(len(content))
        content = content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :]
    if draw.random() < 0.02:
        content = content[: draw.randrange(len(content))]
    return content


@dataclass
class Found:
    """What came of many requests."""

    statuses: Counter = field(default_factory=Counter)  # how often each came
    failures: list = field(default_factory=list)  # what was answered with a 500
    slowest: list = field(default_factory=list)  # (seconds, path, content), the longest first


class Stuck(AssertionError):
    """A request was not answered in time."""


def complain(told: str) -> NoReturn:
    raise Stuck(told)


def fuzz(
    count: int,
    seed: int = 0,
    patience: float = 60.0,
    when_stuck: Callable[[str], NoReturn] = complain,
) -> Found:
    """Send requests, one after the other. Each has `patience` seconds."""
    draw = random.Random(seed)
    found = Found()
    with in_process(max_sequences=6) as caller:
        for number in range(count):
            path = draw.choice(list(ROUTES))
            content = content_of(draw, path)
            began = time.monotonic()
            try:
                r = answered(caller, path, content, patience)
            except NotInTime:
                when_stuck(f"request {number}: {path} {content!r}\n{diagnosis(caller)}")
            took = time.monotonic() - began
            found.slowest = heapq.nlargest(5, [*found.slowest, (took, number, path, content)])
            judge(found, r, path, content)
        assert not caller.server.decodings.running
        for served in caller.server.models:
            check_free(served)
    return found


def answered(caller, path: str, content: bytes, patience: float):
    sent = {"content": content, "headers": {"content-type": "application/json"}}
    asking = caller.portal.start_task_soon(caller._request, "POST", path, sent)
    return asking.result(patience)


def judge(found: Found, r, path: str, content: bytes) -> None:
    found.statuses[r.status_code] += 1
    if r.status_code >= 500 and r.status_code != 504:
        found.failures.append((path, content, r.text))
    elif r.status_code >= 400:
        assert r.json()["error"].keys() == {"message", "type", "param", "code"}
    elif b'"code":"internal_error"' in r.content:
        found.failures.append((path, content, r.text[-400:]))


def check_free(served) -> None:
    """Nothing is left in a model's engine, and nobody waits at its gate."""
    if served.model is None:
        return
    deadline = time.monotonic() + 10
    while served.model.engine.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    free = len(served.model.engine.free_lanes)
    assert (served.gate.inside, free) == (0, served.model.lanes)


def diagnosis(caller) -> str:
    """What a server was doing when it did not answer: its requests, lanes, tasks and threads."""
    told = io.StringIO()
    for decoding in list(caller.server.decodings.running):
        tokens = decoding.jobs.tokens
        print(f"running: {decoding.id} on {decoding.served.id}, {tokens} tokens", file=told)
    for served in caller.server.models:
        gate = served.gate
        lanes = "not loaded"
        if served.model is not None:
            engine = served.model.engine
            free = len(engine.free_lanes)
            lanes = f"{free} of {served.model.lanes} lanes free, {len(engine.queue)} queued"
        print(f"{served.id}: {gate.inside} inside, {len(gate.waiting)} waiting; {lanes}", file=told)
    noted = threading.Event()

    async def tasks() -> None:
        for task in asyncio.all_tasks():
            task.print_stack(limit=12, file=told)
        noted.set()

    caller.portal.start_task_soon(tasks)
    print("the event loop", "turns" if noted.wait(5) else "stands still", file=told)
    with tempfile.TemporaryFile("w+") as stacks:  # of all threads, also of those that hold locks
        faulthandler.dump_traceback(stacks)
        stacks.seek(0)
        told.write(stacks.read())
    return told.getvalue()


def end_at_once(told: str) -> NoReturn:
    """A server that does not answer may not let itself be closed either."""
    print(told, file=sys.stderr, flush=True)
    os._exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for each request")
    flags = parser.parse_args()
    began = time.monotonic()
    found = fuzz(flags.count, flags.seed, flags.patience, end_at_once)
    took = time.monotonic() - began
    print(f"{flags.count} requests in {took:.0f} s: {dict(sorted(found.statuses.items()))}")
    for seconds, _, path, content in found.slowest[:3]:
        print(f"{seconds:.1f} s: {path} {content.decode(errors='replace')[:200]}")
    for path, content, text in found.failures[:10]:
        print(path, content.decode(errors="replace")[:600], "->", text[:300])
    raise SystemExit(bool(found.failures))


if __name__ == "__main__":
    main()
