"""The application: all routes, and what every request goes through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from forerun import __version__
from forerun.requests.jobs import Bell
from forerun.serve import chat, completions, fill, handlers, responses, status, tokens, wire
from forerun.serve.middleware import BodyLimit, RequestLog
from forerun.serve.server import Server
from forerun.serve.settings import Settings

DESCRIPTION = "OpenAI's interface in front of exact speculative decoding, and real infilling."


def create_app(
    settings: Settings, routers: Sequence[APIRouter] = (), server: Server | None = None
) -> FastAPI:
    """An application that serves what the settings say, and further `routers`."""
    made = server or Server.of(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        Bell.of(asyncio.get_running_loop()).pause = settings.stream_interval
        yield
        made.decodings.drain()
        made.decodings.end_all()
        made.models.close()

    app = FastAPI(
        title="Forerun",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        telemetry={
            "tracing": settings.telemetry,
            "metrics": settings.telemetry,
            "logs": settings.telemetry,
            "auto_configure": settings.telemetry,
        },
    )
    app.state.server = made
    for module in (completions, chat, responses, fill, tokens, status):
        app.include_router(module.router)
    app.include_router(status.guarded)
    for router in routers:
        app.include_router(router)
    handlers.install(app, wire.field_names)
    app.add_middleware(BodyLimit, most=settings.max_body)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.add_middleware(RequestLog, server=made)
    return app
