"""What the endpoints share: the services they work with, and the door that a body comes through."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
from aiohttp import web

from engine import ContextLengthExceeded, EngineInfo
from server.backend import Backend
from server.config import ServerConfig
from server.errors import ApiError
from server.metrics import Metrics
from server.schema.strict import shown
from server.workers import Workers

R = TypeVar("R")


class Services(msgspec.Struct, frozen=True):
    """What handlers work with; one an application. `workers` read long requests, `writers` set up and write
    long replies, `compilers` compile grammars."""

    config: ServerConfig
    backend: Backend
    metrics: Metrics
    workers: Workers
    writers: Workers
    compilers: Workers


_ACCOUNT = re.compile(r"\Aaccounts/[^/]+/models/")

SERVICES = web.AppKey("services", Services)


def model_names(info: EngineInfo, config: ServerConfig) -> tuple[str, ...]:
    """Names that the model answers to; the first is its own."""
    aliases = (name.strip() for name in config.served_model_name.split(","))
    return tuple(dict.fromkeys((info.model, *(name for name in aliases if name))))


async def read_body(request: web.Request, services: Services, read: Callable[[bytes], R]) -> tuple[R, bool]:
    """Read, decode and check the body; say also whether its prompt may be long.

    Raises ApiError (408, 413, 415) and RequestError.
    """
    _check_type(request)
    most = services.config.max_body_mb
    too_large = ApiError(
        413, f"The request's body is larger than {most} MB, the most that is taken", code="request_too_large"
    )
    if request.content_length is not None and request.content_length > most * 1_000_000:
        raise too_large
    try:
        async with asyncio.timeout(services.config.body_timeout):
            pieces = await _pieces(request, most * 1_000_000)
    except TimeoutError:
        raise ApiError(408, "The request's body did not arrive in time", code="timeout") from None
    if pieces is None:
        raise too_large
    size = sum(map(len, pieces))
    heavy = size > services.config.long_body_kb * 1000
    body = await services.workers.run(heavy, lambda: read(b"".join(pieces)))
    return body, size > services.config.long_prompt_bytes


async def _pieces(request: web.Request, most: int) -> list[bytes] | None:
    """A request's body as it comes, or None where it is longer than `most` bytes."""
    pieces, size = [], 0
    async for piece in request.content.iter_any():
        size += len(piece)
        if size > most:
            return None
        pieces.append(piece)
    return pieces


def check_model(name: str, names: Sequence[str]) -> str:
    """Return which of the served models is meant, which Fireworks' clients name with an account in front.

    Raises ApiError 404 where it is none of them.
    """
    for one in (name, _ACCOUNT.sub("", name)):
        if one in names:
            return one
    raise ApiError(
        404,
        f"The model {shown(name)} is not served here; there is: {', '.join(names)}",
        param="model",
        code="model_not_found",
    )


def check_size(texts: Iterable[str], services: Services, field: str) -> None:
    """Raise ContextLengthExceeded for texts so long that tokenizing them would be a waste."""
    engine, _ = services.backend.require()
    if sum(len(text.encode("utf-8", "replace")) for text in texts) > services.backend.max_prompt_bytes:
        raise ContextLengthExceeded(
            f"The prompt has far more tokens than the context of {engine.info.context_length} holds",
            param=field,
        )


def _check_type(request: web.Request) -> None:
    if not request.headers.get("Content-Type", "").strip():
        raise ApiError(
            415, "The header Content-Type is missing: send application/json", code="unsupported_media_type"
        )
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"Content-Type must be application/json; it is {shown(kind)}", code="unsupported_media_type"
        )
    charset = request.charset
    if charset is not None and charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, "The body's charset must be utf-8", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed request bodies are not taken", code="unsupported_media_type")
