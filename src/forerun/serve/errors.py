"""Errors as clients of OpenAI's interface expect them: four keys, the right status, and our own
words. Nothing of the machine gets into an answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from forerun.errors import (
    BadCheckpoint,
    EngineStopped,
    ForerunError,
    NoRoom,
    TooLate,
)

log = logging.getLogger("forerun.serve")

INVALID = "invalid_request_error"
SERVER = "server_error"
# The argument that one of our messages begins with.
ARGUMENT = re.compile(r"([a-z_]+)(?==|: | has | is | must )")
FIELDS = {"schema": "response_format"}  # arguments that clients know by another name


class ApiError(Exception):
    """What a client is told. `code` is for programs, the message for people."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client asked for something that cannot be."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, seconds: int) -> ApiError:
    """Too much is waiting already."""
    headers = {"Retry-After": str(seconds)}
    return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=headers)


def unavailable(message: str, code: str, seconds: int = 5) -> ApiError:
    """Not now."""
    headers = {"Retry-After": str(seconds)}
    return ApiError(503, message, type=SERVER, code=code, headers=headers)


def too_late(message: str) -> ApiError:
    return ApiError(504, message, type="timeout_error", code="deadline_exceeded")


def internal() -> ApiError:
    return ApiError(500, "the server failed; its log says why.", type=SERVER, code="internal_error")


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineStopped):
        log.error("engine stopped: %s", error)
        return unavailable("the engine of this model has stopped.", "engine_stopped")
    if isinstance(error, TooLate):
        return too_late(str(error))
    if isinstance(error, NoRoom | BadCheckpoint):
        log.error("%s: %s", type(error).__name__, error)
        return unavailable("this model, or its draft, cannot be loaded here.", "not_loaded")
    if isinstance(error, ForerunError):
        argument = ARGUMENT.match(str(error))
        name = argument[1] if argument else None
        return refused(str(error), FIELDS.get(name, name) if name else None)
    log.error("internal error", exc_info=error)
    return internal()
