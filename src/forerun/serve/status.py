"""Is the server well, what does it serve, and what has it done?"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from forerun import __version__
from forerun.serve.encoding import JsonResponse
from forerun.serve.errors import ApiError
from forerun.serve.server import check_key, client_of, server_of

router = APIRouter()
guarded = APIRouter(dependencies=[Depends(check_key)])


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the process works; 503 once an engine has failed for good."""
    failure = server_of(request).models.failure
    if failure is None:
        return JsonResponse({"status": "ok"})
    return JsonResponse({"status": "failed", "reason": failure}, 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while requests are taken."""
    server = server_of(request)
    if server.decodings.draining or server.models.failure is not None:
        return JsonResponse({"status": "draining"}, 503)
    return JsonResponse({"status": "ready"})


@router.get("/version")
async def version() -> Response:
    """The version of this program."""
    return JsonResponse({"version": __version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """What Prometheus reads."""
    text = server_of(request).metrics.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@guarded.get("/v1/models")
async def models(request: Request) -> Response:
    """The models that are served here."""
    told = [served.describe() for served in server_of(request).models]
    return JsonResponse({"object": "list", "data": told})


@guarded.get("/v1/models/{id:path}")
async def model(id: str, request: Request) -> Response:
    """One of them."""
    return JsonResponse(server_of(request).models.served(id).describe())


@guarded.get("/v1/traces/{id}")
async def trace(id: str, request: Request) -> Response:
    """What was decided when, of a request that asked for its trace to be kept."""
    kept = server_of(request).decodings.traces.get(id, client_of(request))
    if kept is None:
        raise ApiError(404, f"no trace of {id!r} is kept here.", param="id", code="no_trace")
    told = {"id": id, "object": "trace", "model": kept.model, "method": kept.method}
    return JsonResponse({**told, "events": kept.lines})
