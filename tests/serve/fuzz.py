"""Requests that nobody would send, by the thousand: none may be answered with a 500.

`python -m tests.serve.fuzz --count 10000` asks a server of tiny models in this process.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter

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


def fuzz(count: int, seed: int = 0) -> tuple[Counter, list]:
    """How often each status came, and what was answered with a 500."""
    draw = random.Random(seed)
    statuses: Counter = Counter()
    failures = []
    headers = {"content-type": "application/json"}
    with in_process(max_sequences=6) as caller:
        for _ in range(count):
            path = draw.choice(list(ROUTES))
            content = content_of(draw, path)
            r = caller.request("POST", path, content=content, headers=headers)
            statuses[r.status_code] += 1
            if r.status_code >= 500 and r.status_code != 504:
                failures.append((path, content, r.text))
            elif r.status_code >= 400:
                assert r.json()["error"].keys() == {"message", "type", "param", "code"}
            elif b'"code":"internal_error"' in r.content:
                failures.append((path, content, r.text[-400:]))
        assert not caller.server.decodings.running
        for served in caller.server.models:
            if served.model is not None:
                deadline = time.monotonic() + 10
                while served.model.engine.busy and time.monotonic() < deadline:
                    time.sleep(0.01)
                free = len(served.model.engine.free_lanes)
                assert (served.gate.inside, free) == (0, served.model.lanes)
    return statuses, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    began = time.monotonic()
    statuses, failures = fuzz(flags.count, flags.seed)
    print(f"{flags.count} requests in {time.monotonic() - began:.0f} s: {dict(statuses)}")
    for path, content, text in failures[:10]:
        print(path, content.decode(errors="replace")[:600], "->", text[:300])
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
