"""What the page asks over HTTP: its own files, what there is, and streams of trace lines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

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


class LoadRequest(BaseModel):
    """A model that is to be loaded, so that the page knows what it can do."""

    model: str


def page_router(models: Models) -> APIRouter:
    """The page at `/`, and what it asks under `/page/`."""
    page = Page(models)
    router = APIRouter(include_in_schema=False)
    router.get("/")(page.index)
    router.get("/page/about")(page.about)
    router.get("/page/replay.html")(page.replay)
    router.post("/page/load")(page.load)
    router.post("/page/run")(page.run)
    router.post("/page/compare")(page.compare)
    router.post("/page/certify")(page.certify)
    router.get("/page/{name}")(page.asset)  # last: it takes every name
    return router


class Page:
    """Answers what the page asks of some models."""

    def __init__(self, models: Models):
        self.models = models

    def index(self) -> Response:
        return self.asset("index.html")

    def asset(self, name: str) -> Response:
        found = assets.read(name)
        if found is None:
            error = {"error": "there is no such file."}
            return JSONResponse(error, status_code=404, headers=HEADERS)
        return Response(found.content, media_type=found.media_type, headers=HEADERS)

    def about(self) -> Response:
        return JSONResponse(about(self.models), headers=HEADERS)

    def replay(self) -> Response:
        """An empty replay as text: the page puts a trace into it, for download."""
        return Response(assets.replay_html([]), media_type="text/plain", headers=HEADERS)

    async def load(self, request: LoadRequest) -> Response:
        async def told() -> Response:
            await self.models.get(request.model)
            return self.about()

        return await _or_error(told())

    async def run(self, request: runs.RunsRequest) -> Response:
        async def started() -> Response:
            return _stream(runs.lines(await runs.start(self.models, request)))

        return await _or_error(started())

    async def compare(self, request: studies.CompareRequest) -> Response:
        async def started() -> Response:
            return _stream(studies.study(await studies.compare(self.models, request)))

        return await _or_error(started())

    async def certify(self, request: studies.CertifyRequest) -> Response:
        async def started() -> Response:
            return _stream(studies.study(await studies.certify(self.models, request)))

        return await _or_error(started())


async def _or_error(answer: Awaitable[Response]) -> Response:
    """The answer, or the caller's mistake as JSON."""
    try:
        return await answer
    except ForerunError as error:
        return JSONResponse({"error": str(error)}, status_code=400, headers=HEADERS)


def _stream(lines: Lines) -> StreamingResponse:
    headers = {**HEADERS, "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(lines), media_type="text/event-stream", headers=headers)


async def _events(lines: Lines) -> AsyncIterator[str]:
    """Server-sent events, one for each line."""
    async for some in lines:
        yield "".join(f"data: {json.dumps(line)}\n\n" for line in some)
    yield "data: [DONE]\n\n"
