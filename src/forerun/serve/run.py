"""A server as a process: it listens, says so, and ends well."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn
from fastapi import APIRouter

from forerun.errors import BadOption
from forerun.serve.app import create_app
from forerun.serve.middleware import log_to_stderr
from forerun.serve.server import Server
from forerun.serve.settings import Settings

log = logging.getLogger("forerun.serve")

FAILED = 1  # the exit status of a server whose engine has failed for good
BACKLOG = 2048


class Process(uvicorn.Server):
    """Uvicorn's server, which also lets running requests finish and ends when an engine is beyond
    help."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self.server = server
        self.exit_status = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no more requests; what runs may finish, and what is there at the end of the grace
        period is returned."""
        if not self.server.decodings.draining:
            log.info("shutting down: %d requests run", len(self.server.decodings.running))
            self.server.decodings.drain()
            loop = asyncio.get_running_loop()
            loop.call_later(self.server.settings.grace, self.server.decodings.end_all)
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        failure = self.server.models.failure
        if failure is not None and not self.exit_status:
            log.error("the server ends: %s", failure)
            self.exit_status = FAILED
            self.server.decodings.drain()
            self.server.decodings.end_all()
        return await super().on_tick(counter) or bool(self.exit_status)


def run(settings: Settings, host: str, port: int, routers: Sequence[APIRouter] = ()) -> int:
    """Serve until told to stop. The exit status."""
    log_to_stderr()
    server = Server.of(settings)
    config = uvicorn.Config(
        create_app(settings, routers, server),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(settings.grace) + 5,
    )
    process = Process(config, server)
    with listening(host, port) as listener:
        port = listener.getsockname()[1]
        log.info("serving %s on http://%s:%d", ", ".join(server.models.ids), host, port)
        process.run(sockets=[listener])
    return process.exit_status


def listening(host: str, port: int) -> socket.socket:
    """A socket at an address that nobody else has."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address[0], port, *address[2:]))
    except (OSError, OverflowError) as error:
        raise BadOption(
            f"host={host!r}, port={port}: nothing can listen there ({error}). Choose another with "
            f"--port; 0 takes one that is free."
        ) from error
    return listener
