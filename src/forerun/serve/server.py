"""What all routes of a server share, and who asks."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from fastapi import Request

from forerun.serve.errors import ApiError
from forerun.serve.metrics import Metrics
from forerun.serve.models import Models
from forerun.serve.settings import Settings
from forerun.serve.streams import Decodings


@dataclass(frozen=True)
class Server:
    """A server's parts."""

    settings: Settings
    models: Models
    decodings: Decodings
    metrics: Metrics

    @classmethod
    def of(cls, settings: Settings, models: Models | None = None) -> Server:
        models = models or Models(settings)
        metrics = Metrics()
        return cls(settings, models, Decodings(models, settings, metrics), metrics)


def server_of(request: Request) -> Server:
    """The server that a request came to."""
    found: Server = request.app.state.server
    return found


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def bearer_token(request: Request) -> str:
    """The key that a request brings; empty if it brings none."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key", "") or request.headers.get("api-key", "")


async def check_key(request: Request) -> None:
    """Refuse who has no key, where keys are asked for. The time taken says nothing of a key. It is
    `async` so that FastAPI calls it here and not in a thread."""
    keys = server_of(request).settings.api_keys
    if not keys:
        return
    given = digest(bearer_token(request))
    matches = [hmac.compare_digest(given, digest(key)) for key in keys]
    if not any(matches):
        raise ApiError(
            401,
            "a valid API key is needed: send 'Authorization: Bearer KEY'.",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def client_of(request: Request) -> str:
    """Who asks, for fair sharing and for who may read a trace: a key, or an address."""
    key = bearer_token(request)
    if key and server_of(request).settings.api_keys:
        return digest(key).hex()[:16]
    return request.client.host if request.client is not None else "local"
