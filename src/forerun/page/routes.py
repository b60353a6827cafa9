"""What the page asks over HTTP: its own files, what there is, and streams of trace lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from forerun.page import assets, runs, studies
from forerun.page.models import about
from forerun.requests.traces import Line
from forerun.serve.encoding import JsonResponse
from forerun.serve.errors import ApiError
from forerun.serve.server import check_key, client_of, server_of
from forerun.serve.sse import event, unless_gone
from forerun.serve.wire import Wire

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class LoadRequest(Wire):
    """A model that is to be loaded, so that the page knows what it can do."""

    model: str


files = APIRouter(include_in_schema=False)
asks = APIRouter(include_in_schema=False, dependencies=[Depends(check_key)])


def page_routers() -> tuple[APIRouter, APIRouter]:
    """The page at `/`, and what it asks under `/page/`. Its files need no key; they come last, for
    they take every name."""
    return asks, files


@files.get("/")
def index() -> Response:
    return asset("index.html")


@files.get("/page/{name}")
def asset(name: str) -> Response:
    found = assets.read(name)
    if found is None:
        raise ApiError(404, "there is no such file.")
    return Response(found.content, media_type=found.media_type, headers=HEADERS)


@asks.get("/page/about")
def tell_about(request: Request) -> Response:
    return JsonResponse(about(server_of(request).models), headers=HEADERS)


@asks.get("/page/replay.html")
def replay() -> Response:
    """An empty replay as text: the page puts a trace into it, for download."""
    return Response(assets.replay_html([]), media_type="text/plain", headers=HEADERS)


@asks.post("/page/load")
async def load(body: LoadRequest, request: Request) -> Response:
    await server_of(request).models.loaded(body.model)
    return tell_about(request)


@asks.post("/page/run")
async def run(body: runs.RunsRequest, request: Request) -> Response:
    starting = asyncio.ensure_future(runs.start(server_of(request), body, client_of(request)))
    try:
        started = await unless_gone(request, starting)
    except BaseException:
        if starting.done() and not starting.cancelled() and starting.exception() is None:
            runs.close(starting.result())  # it began in the very moment
        raise
    return LineStream(request, runs.lines(started), partial(runs.close, started))


@asks.post("/page/compare")
async def compare(body: studies.CompareRequest, request: Request) -> Response:
    return await _study(request, partial(studies.compare, request=body))


@asks.post("/page/certify")
async def certify(body: studies.CertifyRequest, request: Request) -> Response:
    return await _study(request, partial(studies.certify, request=body))


async def _study(request: Request, prepare: Callable[..., Awaitable[studies.Work]]) -> Response:
    studied = studies.Studied(server_of(request).models, client_of(request))
    try:
        work = await prepare(studied)
    except BaseException:
        studied.close()
        raise
    return LineStream(request, studies.study(studied, work), studied.close)


class LineStream(StreamingResponse):
    """Lines as server-sent events. However it ends, even before it began, what it reads from is
    closed. A reader who takes nothing for too long is dropped."""

    def __init__(
        self, request: Request, lines: AsyncIterator[list[Line]], close: Callable[[], None]
    ):
        headers = {**HEADERS, "X-Accel-Buffering": "no"}
        super().__init__(_events(lines), media_type="text/event-stream", headers=headers)
        self.close = close
        self.stalled = server_of(request).settings.stalled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), self.stalled)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            return
        finally:
            self.close()


async def _events(lines: AsyncIterator[list[Line]]) -> AsyncIterator[bytes]:
    async for some in lines:
        yield b"".join(map(event, some))
    yield DONE
