"""From exceptions to OpenAI's error JSON, whatever raised them and wherever."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Mapping

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from engine import (
    EngineUnavailable,
    HeadwaterError,
    Overloaded,
    RequestError,
    StepFailed,
)

log = logging.getLogger("headwater.server")

INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"
SERVER = "server_error"

REQUEST_ID = web.RequestKey("request_id", str)
MAX_REQUEST_ID = 128


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every reply that is not a success."""

    error: ErrorObject


class ApiError(HeadwaterError):
    """An error with its HTTP status and headers, ready to be sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.object = ErrorObject(message, kind, param, code)
        self.headers = dict(headers or {})

    def response(self) -> web.Response:
        """Build the HTTP response."""
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(ErrorBody(self.object)),
            content_type="application/json",
            headers=self.headers,
        )


def to_api_error(exc: Exception, *, retry_after: int) -> ApiError:
    """Say any exception in the dialect; what nobody foresaw is a 500 that tells nothing."""
    wait = {"Retry-After": str(retry_after)}
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestError):
        return ApiError(400, str(exc), param=exc.param, code=exc.code)
    if isinstance(exc, Overloaded):
        return ApiError(503, str(exc), kind=UNAVAILABLE, code="server_is_overloaded", headers=wait)
    if isinstance(exc, EngineUnavailable):
        return ApiError(503, str(exc), kind=UNAVAILABLE, code="not_ready", headers=wait)
    if isinstance(exc, StepFailed):
        return ApiError(500, str(exc), kind=SERVER, code="step_failed")
    if isinstance(exc, web.HTTPException):
        return _from_http(exc)
    if isinstance(exc, web.RequestPayloadError):
        return ApiError(400, "The request's body is not valid HTTP", code="bad_http")
    return ApiError(500, "Internal error; the server's log has it", kind=SERVER, code="internal_error")


def _from_http(exc: web.HTTPException) -> ApiError:
    headers = {}
    message, code = exc.reason, None
    if isinstance(exc, web.HTTPMethodNotAllowed):
        headers["Allow"] = ", ".join(sorted(exc.allowed_methods))
        message, code = (
            f"Method {exc.method} is not allowed here: use {headers['Allow']}",
            "method_not_allowed",
        )
    elif isinstance(exc, web.HTTPNotFound):
        message, code = "There is nothing at this path", "not_found"
    kind = INVALID if exc.status < 500 else SERVER
    return ApiError(exc.status, message, kind=kind, code=code, headers=headers)


def request_id_from(header: str | None) -> str:
    """Return the client's request id, cleaned and capped, or a new one."""
    cleaned = re.sub(r"[^A-Za-z0-9._:/+=-]", "", (header or "")[: 4 * MAX_REQUEST_ID])[:MAX_REQUEST_ID]
    return cleaned or "req-" + uuid.uuid4().hex


def error_middleware(retry_after: int) -> Middleware:
    """Make the middleware that gives each reply its request id and each error its shape."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request_id_from(request.headers.get("x-request-id"))
        request[REQUEST_ID] = request_id
        response: web.StreamResponse
        try:
            response = await handler(request)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as exc:
            error = to_api_error(exc, retry_after=retry_after)
            if not isinstance(exc, HeadwaterError | web.HTTPException | web.RequestPayloadError):
                log.error("request %s failed: %s", request_id, exc, exc_info=exc)
            response = error.response()
        if not response.prepared:
            response.headers["x-request-id"] = request_id
        return response

    return middleware
