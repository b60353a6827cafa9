"""Servers for tests, over tiny models that are in memory already."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager

import httpx
import uvicorn

import forerun
from forerun.checkpoints import tiny
from forerun.serve.app import create_app
from forerun.serve.models import Models
from forerun.serve.server import Server
from forerun.serve.settings import Settings
from tests.helpers import fresh, settled

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
KINDS = {
    "chat": ("llama", TEMPLATE),
    "plain": ("qwen2", None),
    "holes": ("any-subset", None),
    "masked": ("masked", None),
    "block": ("block", None),
    "fim": ("llama", None),
}


def load(source, **settings):
    """What a server loads by name: tiny models, each with an engine of its own."""
    arch, template = KINDS[source]
    lanes = settings.get("lanes") or 4
    if source == "fim":
        return fim_model(lanes)
    m = fresh(arch, lanes=lanes)
    m.tokenizer = tiny.tokenizer()
    m.tokenizer.chat_template = template
    return m


def slow(seconds):
    """A loader of models whose every forward takes a while."""

    def loader(source, **settings):
        m = load(source, **settings)
        forward = m.backbone.forward

        def later(batch, slots):
            time.sleep(seconds)
            return forward(batch, slots)

        m.backbone.forward = later
        return m

    return loader


def fim_model(lanes):
    """A model with tokens for filling in the middle."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(FIM, special_tokens=True)
    network = tiny.build("llama", vocab_size=len(tokenizer))
    return forerun.from_network(network, tokenizer, name="fim", lanes=lanes, max_context=160)


def local_server(loader=load, **settings) -> Server:
    told = Settings(**{"models": list(KINDS), "lanes": 4, **settings})
    return Server.of(told, Models(told, loader))


@contextmanager
def in_process(server: Server | None = None, **settings):
    """A client of a server in this process. Answers come whole."""
    import anyio.from_thread

    server = server or local_server(**settings)
    app = create_app(server.settings, server=server)
    with anyio.from_thread.start_blocking_portal() as portal:
        yield Caller(app, portal, server)
        portal.call(_close, server)


async def _close(server):
    server.models.close()


class Caller:
    """Asks an application without a socket."""

    def __init__(self, app, portal, server):
        self.app = app
        self.portal = portal
        self.server = server

    def request(self, method, path, **content):
        return self.portal.call(self._request, method, path, content)

    async def _request(self, method, path, content):
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **content)

    def post(self, path, json=None, **content):
        return self.request("POST", path, json=json, **content)

    def get(self, path, **content):
        return self.request("GET", path, **content)


class Live:
    """A server behind a socket, in a thread."""

    def __init__(self, server: Server):
        self.server = server
        self.port = free_port()
        app = create_app(server.settings, server=server)
        config = uvicorn.Config(app, port=self.port, log_config=None, timeout_graceful_shutdown=5)
        self.process = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.process.run, daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self.thread.start()
        deadline = time.monotonic() + 30
        while not self.process.started and time.monotonic() < deadline:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.process.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server does not end"

    def model(self, id):
        return self.server.models.served(id).model

    def settled(self, id):
        """Wait until nothing runs on a model; all its lanes must be free then."""
        deadline = time.monotonic() + 10
        while self.server.decodings.running and time.monotonic() < deadline:
            time.sleep(0.005)
        m = settled(self.model(id))
        assert len(m.engine.free_lanes) == m.lanes and not m.engine.queue
        gate = self.server.models.served(id).gate
        assert (gate.inside, gate.waiting) == (0, [])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
