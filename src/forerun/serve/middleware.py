"""What every request goes through: a number, a line in the log, and a limit to its body."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.errors import ApiError, internal
from forerun.serve.handlers import response_to
from forerun.serve.server import Server

log = logging.getLogger("forerun.serve")

REQUEST_ID = re.compile(r"[\w.-]{1,128}")  # of a client's own that is taken over
QUIET = ("/health", "/ready", "/metrics")  # asked for all the time


current_id: ContextVar[str] = ContextVar("request_id", default="")


class TooLarge(HTTPException):
    """A body that has become too long. FastAPI passes this kind of error on, and no other."""

    def __init__(self, message: str):
        super().__init__(413, message)


class BodyLimit:
    """Refuses bodies above a size, whether they say how long they are or not."""

    def __init__(self, app: ASGIApp, most: int):
        self.app = app
        self.most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        told = Headers(scope=scope).get("content-length", "0")
        if told.isdigit() and int(told) > self.most:
            await self._refuse(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.most:
                raise TooLarge(self._message)
            return message

        await self.app(scope, counted, send)

    @property
    def _message(self) -> str:
        return f"the body is longer than {self.most} bytes, the most that is taken here."

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        await response_to(ApiError(413, self._message))(scope, receive, send)


class RequestLog:
    """Gives every request a number and every answer a line in the log."""

    def __init__(self, app: ASGIApp, server: Server):
        self.app = app
        self.server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        current_id.set(id)
        began = time.monotonic()
        status = 0

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        try:
            await self.app(scope, receive, numbered)
        except Exception:
            log.exception("a request failed")
            if not status:
                await response_to(internal())(scope, receive, numbered)
        finally:
            self._note(scope, status, time.monotonic() - began)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"]
        if status >= 400:
            self.server.metrics.refused.labels("", str(status)).inc()
        if path in QUIET and status < 400:
            return
        told = {
            "method": scope["method"],
            "path": path,
            "status": status,
            "seconds": round(seconds, 4),
        }
        log.info("request", extra={"told": told})


class JsonLines(logging.Formatter):
    """A line of JSON for every record."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **({"request_id": current_id.get()} if current_id.get() else {}),
            **getattr(record, "told", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Send the server's log to standard error, as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("forerun.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
