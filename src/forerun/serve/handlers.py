"""Every error of an application, answered in one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from forerun.errors import ForerunError, unknown
from forerun.serve.encoding import JsonResponse
from forerun.serve.errors import ApiError, as_api_error, refused

FieldNames = Callable[[Any, Sequence[str]], Sequence[str]]


def response_to(error: ApiError) -> Response:
    return JsonResponse(error.body(), error.status, error.headers)


def of_validation(error: RequestValidationError, field_names: FieldNames) -> ApiError:
    """A body that is not of the right shape: the first thing that is wrong with it."""
    first = error.errors()[0]
    where = [str(part) for part in first.get("loc", ()) if part not in ("body", "query", "path")]
    name = ".".join(where)
    if first["type"] == "json_invalid":
        return refused(f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
    if first["type"] == "extra_forbidden":
        message = str(unknown("field", where[-1], field_names(error.body, where)))
        return refused(message, name, "unknown_field")
    return refused(f"{name or 'the body'}: {first['msg']}.", name or None)


def install(app: FastAPI, field_names: FieldNames) -> None:
    """Have every error of an application answered in this shape. `field_names` says what may stand
    beside an unknown field of a body."""

    async def api_error(_: Request, error: Exception) -> Response:
        return response_to(as_api_error(error))

    async def validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return response_to(of_validation(error, field_names))

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = {404: "there is no such path here.", 405: "this path takes another method."}
        message = words.get(error.status_code, str(error.detail))
        return response_to(ApiError(error.status_code, message, headers=error.headers))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(ForerunError, api_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, api_error)
