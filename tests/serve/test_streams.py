"""Clients that go away, read slowly or wait too long; steps that fail; and nothing is left over."""

import asyncio
import json
import random
import socket
import struct
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest

from forerun.requests.jobs import Bell
from forerun.sequence.trace import Event
from forerun.serve import shapes, sse
from forerun.serve.app import create_app
from forerun.serve.streams import Decoding, Text, Traced
from forerun.serve.wire import CompletionRequest
from tests.serve.servers import Live, local_server, slow

LONG = {"model": "plain", "prompt": "hello", "max_tokens": 150, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def slowly():
    with Live(local_server(slow(0.01), lanes=2, queue=4)) as running:
        yield running


def open_stream(live, body=LONG):
    """A client by hand: its socket, once the first piece has come."""
    content = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", live.port), timeout=90)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    received = b""
    while b"data: " not in received:
        piece = client.recv(4096)
        assert piece, received
        received += piece
    return client


def busy_lanes(live, id="plain"):
    m = live.model(id)
    return m.lanes - len(m.engine.free_lanes)


def wait_until(true, seconds=10):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert true()


@pytest.mark.parametrize("killed", [False, True])
def test_a_client_that_goes_away_frees_its_lane_at_once(slowly, killed):
    client = open_stream(slowly)
    assert busy_lanes(slowly) == 1
    [decoding] = slowly.server.decodings.running
    if killed:  # what the kernel sends for a process that was killed with much unread
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    wait_until(lambda: busy_lanes(slowly) == 0)
    assert decoding.jobs.tokens < 150, "it ended in the middle"
    slowly.settled("plain")


def test_a_client_that_goes_away_while_it_waits_for_a_whole_answer_frees_its_lane(slowly):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slowly.url}/v1/completions", json={**LONG, "stream": False}, timeout=0.3)
    wait_until(lambda: busy_lanes(slowly) == 0)
    slowly.settled("plain")


def test_a_client_that_goes_away_in_the_queue_is_forgotten(slowly):
    clients = [open_stream(slowly) for _ in range(2)]

    def give_up():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{slowly.url}/v1/completions", json=LONG, timeout=0.3)

    waiting = [threading.Thread(target=give_up) for _ in range(3)]
    for each in waiting:
        each.start()
    for each in waiting:
        each.join()
    for client in clients:
        client.close()
    slowly.settled("plain")


def test_too_many_are_refused_with_the_time_to_come_back(slowly):
    clients = [open_stream(slowly) for _ in range(2)]
    statuses = []

    def ask():
        body = {**LONG, "stream": False, "max_tokens": 2}
        statuses.append(httpx.post(f"{slowly.url}/v1/completions", json=body, timeout=30))

    threads = [threading.Thread(target=ask) for _ in range(9)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for client in clients:
        client.close()
    refused = [r for r in statuses if r.status_code == 429]
    assert len(refused) >= 1 and len(refused) + sum(r.status_code == 200 for r in statuses) == 9
    for r in refused:
        assert int(r.headers["retry-after"]) >= 1 and r.json()["error"]["code"] == "queue_full"
    slowly.settled("plain")


def test_a_deadline_returns_what_is_there(slowly):
    body = {**LONG, "stream": False, "forerun": {"deadline": 0.4}}
    r = httpx.post(f"{slowly.url}/v1/completions", json=body, timeout=30).json()
    assert 0 < r["usage"]["completion_tokens"] < 150
    assert r["choices"][0]["finish_reason"] == "length"
    assert r["forerun"]["finish_reasons"] == ["deadline"] and r["forerun"]["deadline"] == 0.4
    slowly.settled("plain")


def test_a_deadline_that_passes_in_the_queue_is_an_error(slowly):
    clients = [open_stream(slowly) for _ in range(2)]
    clients.append(open_stream(slowly, {**LONG, "echo": True}))  # in the engine's own queue
    body = {**LONG, "stream": False, "forerun": {"deadline": 0.2}}
    r = httpx.post(f"{slowly.url}/v1/completions", json=body, timeout=30)
    for client in clients:
        client.close()
    assert r.status_code == 504 and r.json()["error"]["code"] == "deadline_exceeded"
    slowly.settled("plain")


def test_a_stream_in_which_nothing_comes_says_that_it_is_alive(slowly, monkeypatch):
    monkeypatch.setattr(sse, "PING_EVERY", 0.05)
    monkeypatch.setattr(sse, "LOOK_EVERY", 0.02)
    m = slowly.model("plain")
    forward = m.backbone.forward

    def much_later(batch, slots):
        time.sleep(0.3)
        return forward(batch, slots)

    m.backbone.forward = much_later
    try:
        text = httpx.post(f"{slowly.url}/v1/completions", json={**LONG, "max_tokens": 2}).text
    finally:
        m.backbone.forward = forward
    assert ": ping\n\n" in text and text.endswith("data: [DONE]\n\n")


class Stuck:
    """A reader who takes nothing after the first piece."""

    def __init__(self):
        self.sent = 0

    async def __call__(self, message):
        self.sent += 1
        if self.sent > 2:
            await asyncio.sleep(60)


async def stuck_at_the_end(message):
    """A reader who takes all but the last message."""
    if message["type"] == "http.response.body" and not message.get("more_body"):
        await asyncio.sleep(60)


async def ask_directly(app, body, send):
    """A request to an application, whose answer goes to `send`."""
    scope = dict(
        type="http",
        asgi={"version": "3.0", "spec_version": "2.3"},
        http_version="1.1",
        method="POST",
        path="/v1/completions",
        raw_path=b"/v1/completions",
        query_string=b"",
        headers=[(b"content-type", b"application/json")],
        client=("1.2.3.4", 5),
        server=("x", 80),
        scheme="http",
        root_path="",
    )
    given = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive():
        for message in given:
            return message
        await asyncio.sleep(60)

    await asyncio.wait_for(app(scope, receive, send), 20)


@pytest.mark.parametrize("send", [Stuck(), stuck_at_the_end], ids=["after a piece", "at the end"])
def test_a_reader_who_takes_nothing_is_dropped_and_holds_no_lane(monkeypatch, send):
    monkeypatch.setattr(sse, "LOOK_EVERY", 0.02)
    server = local_server(models=["plain"], stalled=0.2)
    app = create_app(server.settings, server=server)

    async def ask():
        await server.models.loaded("plain")
        with pytest.raises(asyncio.CancelledError):
            await ask_directly(app, {**LONG, "max_tokens": 40}, send)
        assert not server.decodings.running
        assert server.models.served("plain").gate.inside == 0

    asyncio.run(ask())
    server.models.close()


def test_readers_who_take_nothing_keep_nobody_waiting():
    server = local_server(models=["plain"], lanes=1)
    app = create_app(server.settings, server=server)
    taken = []

    async def take(message):
        taken.append(message)

    async def ask():
        await server.models.loaded("plain")
        body = {**LONG, "max_tokens": 20}
        stuck = [asyncio.create_task(ask_directly(app, body, Stuck())) for _ in range(5)]
        while len(server.decodings.running) < 2:  # as many as may be inside
            await asyncio.sleep(0.01)
        await ask_directly(app, {**body, "stream": False}, take)
        assert taken[0]["status"] == 200
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert not server.decodings.running

    asyncio.run(ask())
    server.models.close()


def test_a_step_that_fails_fails_those_it_concerns_and_nobody_after(slowly):
    m = slowly.model("plain")
    forward = m.backbone.forward

    def fails(batch, slots):
        raise MemoryError("no room on this /dev/thing")

    m.backbone.forward = fails
    body = {**LONG, "stream": False, "max_tokens": 4}
    r = httpx.post(f"{slowly.url}/v1/completions", json=body, timeout=30)
    m.backbone.forward = forward
    assert r.status_code == 500 and "/dev" not in r.text
    assert httpx.post(f"{slowly.url}/v1/completions", json=body, timeout=30).status_code == 200
    assert httpx.get(f"{slowly.url}/health").status_code == 200
    slowly.settled("plain")


def test_gauges_say_what_runs_and_what_waits(slowly):
    clients = [open_stream(slowly) for _ in range(2)]
    told = httpx.get(f"{slowly.url}/metrics").text
    for client in clients:
        client.close()
    values = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    assert float(values['forerun:num_lanes_busy{model_name="plain"}']) == 2
    assert float(values['forerun:num_requests_running{model_name="plain"}']) == 2
    assert 0 < float(values['forerun:kv_cache_usage_perc{model_name="plain"}']) < 1
    slowly.settled("plain")


def test_a_bell_rests_and_loses_nothing():
    """Between two looks of a resting event loop, what comes wakes nobody, and is heard at the next;
    what is urgent is heard at once."""

    async def scenario():
        loop = asyncio.get_running_loop()
        bell = Bell.of(loop)
        bell.pause = 0.2
        calls = []
        tell = bell._tell
        bell._tell = lambda: (calls.append(loop.time()), tell())

        async def rung(*how):
            arrived = asyncio.Event()
            bell.ring(arrived, *how)
            bell.ring(arrived, *how)
            await asyncio.wait_for(arrived.wait(), 5)
            return len(calls)

        assert await rung() == 1
        assert await rung() == 2, "soon after the first: from now on it rests"
        assert await rung() == 3 and calls[2] - calls[1] >= 0.19
        assert await rung(True) == 4 and calls[3] - calls[2] < 0.19
        await asyncio.sleep(0.5)
        assert len(calls) == 4, "nothing came"
        assert await rung() == 5 and bell._timer is None, "steps are slow: there is no rest"

    asyncio.run(scenario())


def test_pieces_that_come_together_are_one_message():
    """Whatever comes of several steps between two looks is one write, and no text is lost."""
    server = local_server(stream_interval=0.2)
    body = {
        "model": "plain",
        "prompt": "ab",
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": 0,
    }
    with Live(server) as live:
        whole = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).json()
        with httpx.stream(
            "POST", f"{live.url}/v1/completions", json={**body, "stream": True}, timeout=60
        ) as reply:
            raw = list(reply.iter_raw())
    events = [
        line[6:] for line in b"".join(raw).decode().splitlines() if line.startswith("data: {")
    ]
    chunks = [json.loads(event) for event in events]
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    heads = [{k: v for k, v in c.items() if k not in ("choices", "forerun")} for c in chunks]
    assert all(head == heads[0] for head in heads)
    assert len(raw) <= 6, "one write for many pieces"


@pytest.mark.parametrize("kind", [shapes.Completions, shapes.ChatCompletions])
def test_a_chunk_from_a_template_is_the_chunk(kind):
    """To the byte. Quotes and the place's own mark, in a text or a name, change nothing else."""
    shape = kind.__new__(kind)
    shape.decoding = SimpleNamespace(
        id="cmpl-1", created=1, served=SimpleNamespace(id=f'a"{shapes.PLACE}"é'), sequences=list
    )
    shape.body = CompletionRequest(prompt="x", max_tokens=4)
    shape.how = SimpleNamespace(sampling={})
    shape._around = {}
    draw = random.Random(0)
    letters = ['"', "\\", "\n", "\0", "\x7f", "\u2028", "é", "日", "🎉", "/", "<", shapes.PLACE]
    texts = ["".join(draw.choices(letters, k=draw.randint(0, 9))) for _ in range(200)]
    for text in texts:
        [written] = shape.pieces(0, text)
        assert written == sse.event(shape.chunk(0, shape.content(text)))
    [written] = shape.pieces(0, "\ud800")  # half a character, which only clients can write
    assert json.loads(written[6:]) == shape.chunk(0, shape.content("\ud800"))


class InBursts:
    """Jobs whose events come so many at a time."""

    def __init__(self, bursts):
        self._bursts = bursts

    async def bursts(self):
        for burst in self._bursts:
            yield burst


def test_text_that_comes_together_is_one_piece_and_events_stay_in_their_place():
    event = Event(1, "sampled", [0], [5])
    bursts = [[(0, "a"), (1, "x"), (0, "b")], [(0, "c"), (0, event), (0, "d"), (1, "y"), (0, "e")]]
    metrics = SimpleNamespace(first_token=Mock(), between=Mock())
    decoding = Decoding.__new__(Decoding)
    decoding.jobs = InBursts(bursts)
    decoding.owner = SimpleNamespace(metrics=metrics)
    decoding.served = SimpleNamespace(id="m")
    decoding.arrived = 0.0
    decoding._last_piece = {}

    async def told():
        return [burst async for burst in decoding.bursts()]

    first, second = asyncio.run(told())
    assert first == [Text(0, "ab"), Text(1, "x")]
    assert second == [Text(0, "c"), Traced(0, event), Text(0, "de"), Text(1, "y")]
    assert metrics.between.note.call_count == 3 and metrics.first_token.labels.call_count == 2
