"""Answers as server-sent events: as they come, to readers fast and slow.

The events and their encoding are FastAPI's own; what is ours is that one route answers with a
stream or with JSON, that a reader who is gone ends the request at once, and that one who takes
nothing is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Message, Receive, Scope, Send

from forerun.requests.result import Result
from forerun.serve.encoding import encoded
from forerun.serve.errors import ApiError, as_api_error
from forerun.serve.streams import Ask, Decoding, Decodings, Text, Traced, first_error

PING_EVERY = 15.0  # seconds without a word
LOOK_EVERY = 1.0  # seconds
BODY = {"type": "http.response.body"}
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

T = TypeVar("T")


def event(value: Any, name: str | None = None) -> bytes:
    """One event. One that is written already is bytes."""
    if isinstance(value, bytes):
        return value
    if name is None:
        return b"data: " + encoded(value) + b"\n\n"
    return format_sse_event(data_str=encoded(value).decode(), event=name)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@contextmanager
def client_there(receive: Receive) -> Iterator[None]:
    """Cancel what runs inside when the client goes away; `ClientGone` is raised then. One task
    listens: what is waited for needs none of its own."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def listen() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    listening = asyncio.create_task(listen())
    try:
        yield
    except asyncio.CancelledError:
        if not gone or task.uncancel():  # somebody else cancelled it, too
            raise
        raise ClientGone from None
    else:
        if gone:  # too late: it was done in the very moment
            task.uncancel()
    finally:
        listening.cancel()


class EventStream(EventSourceResponse):
    """The stream of a decoding. However it ends, the decoding is closed."""

    def __init__(self, decoding: Decoding, content: AsyncIterator[bytes]):
        super().__init__(content, headers=HEADERS)
        self.decoding = decoding
        self.events = content
        self.stalled = decoding.owner.settings.stalled
        self._sending: float | None = None
        self._sent = time.monotonic()
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._look_later(task, send)
        try:
            with suppress(ClientGone), client_there(receive):
                await self._send_all(send)
        finally:
            self._look_no_more()
            self.decoding.close()

    async def _send_all(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await self._send(send, {"type": "http.response.start", **start})
        async for body in self.events:
            await self._send(send, {**BODY, "body": body, "more_body": True})
        self._over = True
        await self._send(send, BODY)

    async def _send(self, send: Send, message: Message) -> None:
        self._sending = time.monotonic()
        await send(message)
        self._sending = None
        self._sent = time.monotonic()

    def _look_later(self, task: asyncio.Task[Any], send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_EVERY, self._look, task, send)

    def _look(self, task: asyncio.Task[Any], send: Send) -> None:
        """Say that all is well where nothing is to be said; drop a reader who takes nothing."""
        now = time.monotonic()
        if self._sending is not None:
            if now - self._sending > self.stalled:
                task.cancel()
                return
        elif now - self._sent > PING_EVERY and not self._over:
            body = {**BODY, "body": KEEPALIVE_COMMENT, "more_body": True}
            self._ping = asyncio.create_task(self._send(send, body))
        self._look_later(task, send)

    def _look_no_more(self) -> None:
        for each in (self._timer, self._ping):
            if each is not None:
                each.cancel()


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for an answer. If the client goes away before, the work is cancelled."""
    try:
        with client_there(request.receive):
            return await work
    except ClientGone:
        raise ApiError(499, "the client is gone.", code="client_gone") from None


async def begun(request: Request, decodings: Decodings, ask: Ask) -> Decoding:
    """A decoding that has begun, unless its client has gone while it waited."""
    return await unless_gone(request, decodings.start(ask))


async def whole(request: Request, decoding: Decoding) -> list[list[Result]]:
    """All results of a decoding. An error of any is raised."""
    try:
        results = await unless_gone(request, decoding.results())
    finally:
        decoding.close()
    error = first_error(results)
    if error is not None:
        raise as_api_error(error)
    return results


class Shape(Protocol):
    """How an interface writes a stream. Every method gives what one or more events hold, or bytes
    that are events already."""

    @property
    def end_mark(self) -> bytes:
        """What follows the last event."""

    def opening(self) -> Iterable[Any]: ...

    def pieces(self, index: int, text: str) -> Iterable[Any]: ...

    def closing(self, results: list[list[Result]]) -> Iterable[Any]: ...

    def trace(self, traced: Traced) -> Any: ...


async def streamed(decoding: Decoding, shape: Shape, traces: bool = False) -> AsyncIterator[bytes]:
    """The events of an answer, and the end mark. An error is the last event."""
    try:
        if opening := joined(shape.opening()):
            yield opening
        async for burst in decoding.bursts():
            if body := joined(_told(burst, shape, traces)):
                yield body
        results = await decoding.results()
        error = first_error(results)
        if error is not None:
            raise error
        last = joined(shape.closing(results))
    except Exception as error:
        last = event(as_api_error(error).body())
    yield last + shape.end_mark


def joined(values: Iterable[Any]) -> bytes:
    """Events that are sent together: every message goes through all that is around the routes, and
    is a system call."""
    return b"".join([event(value) for value in values])


def _told(burst: Iterable[Text | Traced], shape: Shape, traces: bool) -> Iterator[Any]:
    for item in burst:
        if isinstance(item, Text):
            yield from shape.pieces(item.index, item.text)
        elif traces:
            yield shape.trace(item)
