"""A server as a process of its own: asked to stop in the middle, killed, and started again."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

from tests.helpers import ROOT
from tests.serve.servers import free_port

# zoo:ar takes a few seconds for so much, and a stop comes in the middle of it
LONG = {"prompt": "def f(", "max_tokens": 900, "stream": True, "ignore_eos": True}


def start(port, *flags, log=None):
    """A server of zoo:ar that is ready. Its log goes to a pipe, or to a file."""
    words = ["serve", "zoo:ar", "--port", port, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with open(log or os.devnull, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "forerun", *map(str, words)],
            stderr=subprocess.PIPE if log is None else file,
            env=environment,
            cwd=ROOT,
        )
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return process
        except httpx.TransportError:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.1)
    raise AssertionError("the server does not start")


@pytest.fixture
def port():
    return free_port()


def stream_of(port):
    """The events of a long stream, as they come."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=LONG, timeout=300) as r:
        for line in r.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])
            elif line.startswith("data: [DONE]"):
                yield "done"


def test_a_server_that_is_asked_to_stop_returns_what_is_there_and_ends_well(port):
    process = start(port, "--grace", 0.3)
    events = []
    try:
        for event in stream_of(port):
            events.append(event)
            if len(events) == 3:
                process.send_signal(signal.SIGTERM)
        status = process.wait(30)
    finally:
        process.kill()
    assert events[-1] == "done" and events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-2]["forerun"]["finish_reasons"] == ["shutdown"]
    assert status in (0, -signal.SIGTERM)  # uvicorn ends itself by the signal that it was sent
    log = process.stderr.read().decode()
    assert "shutting down: 1 requests run" in log and "Traceback" not in log
    for line in log.splitlines():
        json.loads(line)


def test_a_server_killed_with_minus_nine_under_load_breaks_its_streams_and_frees_its_port(port):
    """The disk under its log is full too: it answers all the same."""
    process = start(port, log="/dev/full")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
    asked = {**LONG, "model": "zoo:ar", "extra_body": {"ignore_eos": True}}
    del asked["ignore_eos"]
    try:
        streams = [client.completions.create(**asked) for _ in range(3)]
        for stream in streams:
            assert next(stream).choices
        process.kill()
        for stream in streams:
            with pytest.raises((openai.APIConnectionError, httpx.TransportError)):
                for _ in stream:
                    pass
    finally:
        process.kill()
        process.wait(30)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_a_client_that_is_killed_with_minus_nine_frees_its_lane(live):
    """A process of its own, killed in the middle of its stream."""
    body = json.dumps({**LONG, "model": "plain", "max_tokens": 150})
    request = (
        "POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
        f"Content-Length: {len(body)}\\r\\n\\r\\n"
    )
    script = (
        "import socket, time\n"
        f"client = socket.create_connection(('127.0.0.1', {live.port}))\n"
        f"client.sendall(b'{request}' + {body!r}.encode())\n"
        "while b'data: ' not in client.recv(4096): pass\n"
        "print('piece', flush=True)\n"
        "time.sleep(60)\n"
    )
    httpx.post(f"{live.url}/v1/completions", json={"model": "plain", "prompt": "x"}, timeout=300)
    m = live.model("plain")
    forward = m.backbone.forward

    def slowly(batch, slots):
        time.sleep(0.02)
        return forward(batch, slots)

    m.backbone.forward = slowly
    try:
        client = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert client.stdout.readline() == b"piece\n"
        assert len(m.engine.free_lanes) == m.lanes - 1
        client.kill()
        client.wait(10)
        freed = threading.Event()
        deadline = time.monotonic() + 2
        while len(m.engine.free_lanes) < m.lanes and time.monotonic() < deadline:
            freed.wait(0.005)
        assert len(m.engine.free_lanes) == m.lanes
    finally:
        m.backbone.forward = forward
    live.settled("plain")
