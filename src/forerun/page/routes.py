"""What the page asks over HTTP: its own files, what there is, and streams of trace lines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from forerun.errors import ForerunError
from forerun.page import assets, runs, studies
from forerun.page.models import Models, about
from forerun.requests.traces import Line

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

Lines = AsyncIterator[list[Line]]


def page_router(models: Models) -> APIRouter:
    """The page at `/`, and what it asks under `/page/`."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def index() -> Response:
        return _asset("index.html")

    @router.get("/page/about")
    def tell_about() -> JSONResponse:
        return JSONResponse(about(models), headers=HEADERS)

    @router.get("/page/replay.html")
    def replay() -> Response:
        """An empty replay: the page puts a trace into it, for download."""
        return Response(assets.replay_html([]), media_type="text/plain", headers=HEADERS)

    @router.post("/page/load")
    async def load(request: Request) -> Response:
        async def ask() -> JSONResponse:
            await models.get(str((await request.json())["model"]))
            return JSONResponse(about(models), headers=HEADERS)

        return await _or_error(ask)

    @router.post("/page/run")
    async def run(request: runs.RunsRequest) -> Response:
        async def ask() -> StreamingResponse:
            return _stream(runs.lines(await runs.start(models, request)))

        return await _or_error(ask)

    @router.post("/page/compare")
    async def compare(request: studies.CompareRequest) -> Response:
        async def ask() -> StreamingResponse:
            return _stream(studies.study(await studies.compare(models, request)))

        return await _or_error(ask)

    @router.post("/page/certify")
    async def certify(request: studies.CertifyRequest) -> Response:
        async def ask() -> StreamingResponse:
            return _stream(studies.study(await studies.certify(models, request)))

        return await _or_error(ask)

    @router.get("/page/{name}")
    def asset(name: str) -> Response:
        return _asset(name)

    return router


async def _or_error(ask: Callable[[], Awaitable[Response]]) -> Response:
    """The answer, or the caller's mistake as JSON."""
    try:
        return await ask()
    except ForerunError as error:
        return JSONResponse({"error": str(error)}, status_code=400, headers=HEADERS)


def _asset(name: str) -> Response:
    found = assets.read(name)
    if found is None:
        return JSONResponse({"error": "there is no such file."}, status_code=404, headers=HEADERS)
    return Response(found.content, media_type=found.media_type, headers=HEADERS)


def _stream(lines: Lines) -> StreamingResponse:
    headers = {**HEADERS, "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(lines), media_type="text/event-stream", headers=headers)


async def _events(lines: Lines) -> AsyncIterator[str]:
    """Server-sent events, one for each line."""
    async for some in lines:
        yield "".join(f"data: {json.dumps(line)}\n\n" for line in some)
    yield "data: [DONE]\n\n"
