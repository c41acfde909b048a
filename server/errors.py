"""From exceptions to the error JSON of OpenAI, or of Anthropic under its path, whatever raised them."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Mapping

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from msgspec import UNSET, UnsetType

from engine import (
    ConstraintFailed,
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

# Anthropic's types by status. Overload keeps our 503, which everything between here and the client knows;
# Anthropic's own 529 is retried by its clients in the same way.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_PATH = re.compile(r"(/inference)?/v1/messages(/.*)?", re.DOTALL)

REQUEST_ID = web.RequestKey("request_id", str)
MAX_REQUEST_ID = 128


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of a reply that is not a success."""

    error: ErrorObject


class AnthropicErrorDetails(msgspec.Struct, frozen=True):
    """What Anthropic's clients act on where the type says too little."""

    error_code: str


class AnthropicError(msgspec.Struct, frozen=True):
    """Anthropic's error object."""

    type: str
    message: str
    details: AnthropicErrorDetails | UnsetType = UNSET


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Anthropic's body of a reply that is not a success, and the payload of its `error` event."""

    type: str = "error"
    error: AnthropicError
    request_id: str | None = None


def speaks_anthropic(path: str) -> bool:
    """Whether replies of a path are in Anthropic's words."""
    return _ANTHROPIC_PATH.fullmatch(path) is not None


def anthropic_error(
    error: ErrorObject, *, status: int | None = None, request_id: str | None = None
) -> AnthropicErrorBody:
    """Say an error in Anthropic's words; `status` is None where a stream has begun."""
    if status is None:
        status = {INVALID: 400, UNAVAILABLE: 503}.get(error.type, 500)
    kind = ANTHROPIC_TYPES.get(status, INVALID if status < 500 else "api_error")
    details = UNSET if error.code is None else AnthropicErrorDetails(error.code)
    return AnthropicErrorBody(error=AnthropicError(kind, error.message, details), request_id=request_id)


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

    def response(self, path: str = "/", request_id: str | None = None) -> web.Response:
        """Build the HTTP response to a request for `path`."""
        body: msgspec.Struct = ErrorBody(self.object)
        if speaks_anthropic(path):
            body = anthropic_error(self.object, status=self.status, request_id=request_id)
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(body),
            content_type="application/json",
            headers=self.headers,
        )


def to_api_error(exc: Exception, *, retry_after: int) -> ApiError:
    """Say any exception in the dialect; what nobody foresaw is a 500 that tells nothing."""
    error = _translate(exc)
    if error.status in (429, 503):
        error.headers.setdefault("Retry-After", str(retry_after))
    return error


def _translate(exc: Exception) -> ApiError:
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestError):
        return ApiError(400, str(exc), param=exc.param, code=exc.code)
    if isinstance(exc, Overloaded):
        return ApiError(503, str(exc), kind=UNAVAILABLE, code="server_is_overloaded")
    if isinstance(exc, EngineUnavailable):
        return ApiError(503, str(exc), kind=UNAVAILABLE, code="not_ready")
    if isinstance(exc, ConstraintFailed):
        return ApiError(400, str(exc), code="constraint_failed")
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
    """Make the middleware that gives each request its id and each error its shape."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request_id_from(request.headers.get("x-request-id"))
        request[REQUEST_ID] = request_id
        try:
            return await handler(request)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as exc:
            error = to_api_error(exc, retry_after=retry_after)
            if not isinstance(exc, HeadwaterError | web.HTTPException | web.RequestPayloadError):
                log.error("request %s failed: %s", request_id, exc, exc_info=exc)
            if request.writer.output_size > 0:
                raise ConnectionError("part of another answer is sent already") from exc
            return error.response(request.path, request_id)

    return middleware


async def name_reply(request: web.Request, response: web.StreamResponse) -> None:
    """Give a reply that is about to go out its request's id, under the names that clients read."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers["x-request-id"] = request_id
        if speaks_anthropic(request.path):
            response.headers["request-id"] = request_id
