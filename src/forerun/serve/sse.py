"""Answers as server-sent events: as they come, to readers fast and slow.

The events and their encoding are FastAPI's own; what is ours is that one route answers with a
stream or with JSON, that a reader who is gone ends the request at once, and that one who takes
nothing is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
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
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

T = TypeVar("T")


def event(value: Any, name: str | None = None) -> bytes:
    """One event. One that is written already is bytes."""
    if isinstance(value, bytes):
        return value
    if name is None:
        return b"data: " + encoded(value) + b"\n\n"
    return format_sse_event(data_str=encoded(value).decode(), event=name)


class EventStream(EventSourceResponse):
    """The stream of a decoding. However it ends, the decoding is closed."""

    def __init__(self, decoding: Decoding, content: AsyncIterator[bytes]):
        super().__init__(content, headers=HEADERS)
        self.decoding = decoding
        self.stalled = decoding.owner.settings.stalled
        self._sending: float | None = None
        self._sent = time.monotonic()
        self._over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None

        async def noted(message: Message) -> None:
            self._sending = time.monotonic()
            await send(message)
            self._sending = None
            self._sent = time.monotonic()
            self._over = message["type"] == "http.response.body" and not message.get("more_body")

        keeper = asyncio.create_task(self._keep(task, noted))
        try:
            await super().__call__(scope, receive, noted)
        finally:
            keeper.cancel()
            self.decoding.close()

    async def _keep(self, task: asyncio.Task[Any], send: Send) -> None:
        """Say that all is well where nothing is to be said; drop a reader who takes nothing."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            now = time.monotonic()
            if self._sending is not None:
                if now - self._sending > self.stalled:
                    task.cancel()
                    return
            elif now - self._sent > PING_EVERY and not self._over:
                body = {"type": "http.response.body", "body": KEEPALIVE_COMMENT, "more_body": True}
                await send(body)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for an answer. If the client goes away before, the work is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client is gone.", code="client_gone")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def begun(request: Request, decodings: Decodings, ask: Ask) -> Decoding:
    """A decoding that has begun, unless its client has gone while it waited."""
    task = asyncio.ensure_future(decodings.start(ask))
    try:
        return await unless_gone(request, task)
    except BaseException:
        if task.done() and not task.cancelled() and task.exception() is None:
            task.result().close()  # it began in the very moment
        raise


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
