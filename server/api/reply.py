"""From a checked order to the reply: whole or as a stream, in either endpoint's words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from aiohttp import web

from engine import HeadwaterError
from server.api.common import Order, Services
from server.errors import REQUEST_ID, ApiError, ErrorObject, to_api_error
from server.generate import Choice, Choices, Piece
from server.schema.responses import FinishReason, Usage, UsageField
from server.sse import EventWriter
from server.usage import Timing, headers, perf_metrics, usage_of

log = logging.getLogger("headwater.server")


class Said(NamedTuple):
    """What one choice says, in a whole reply or in one event.

    `first` marks a choice's first event. `token_ids` and `prompt_ids` are None unless asked for.
    """

    choice: int
    text: str
    finish_reason: FinishReason | None
    first: bool
    token_ids: tuple[int, ...] | None
    prompt_ids: tuple[int, ...] | None


class Dialect(Protocol):
    """How an endpoint writes replies and events.

    `opens_empty`: a choice begins with an event of its own even while it has no text yet.
    """

    @property
    def opens_empty(self) -> bool: ...

    def whole(self, order: Order, said: Sequence[Said], usage: Usage, metrics: dict[str, str] | None) -> Any:
        """Write a whole reply."""

    def event(
        self,
        order: Order,
        said: Said | None,
        usage: UsageField,
        metrics: dict[str, str] | None,
    ) -> Any:
        """Write one event; without `said` it has no choices."""


class ErrorEvent(msgspec.Struct, frozen=True):
    """What ends a stream that can't go on. `usage` tells what had been used until then."""

    error: ErrorObject
    usage: Usage


async def reply(
    http: web.Request, services: Services, order: Order, dialect: Dialect, started: float
) -> web.StreamResponse:
    """Run an order and answer it. `started` is when the request came, by time.monotonic."""
    engine, codec = services.backend.require()
    choices = Choices(
        engine,
        [Choice(index, request, codec, order.stops) for index, request in enumerate(order.requests)],
        Timing(started),
        services.metrics,
    )
    async with choices:
        if order.stream:
            return await _Stream(http, services, order, dialect, choices).run()
        return await _whole(services, order, dialect, choices)


async def _whole(services: Services, order: Order, dialect: Dialect, choices: Choices) -> web.Response:
    texts: list[list[str]] = [[] for _ in choices.choices]
    ids: list[list[int]] = [[] for _ in choices.choices]
    try:
        while not choices.ended:
            piece = await choices.next()
            if piece is not None:
                texts[piece.choice.index].append(piece.text)
                ids[piece.choice.index].extend(piece.token_ids)
    except HeadwaterError as exc:
        raise _with_metrics(exc, services, choices) from exc
    metrics = perf_metrics(choices.choices, choices.timing)
    said = [
        Said(
            choice=choice.index,
            text="".join(texts[choice.index]),
            finish_reason=choice.finish_reason,
            first=True,
            token_ids=tuple(ids[choice.index]) if order.token_ids else None,
            prompt_ids=choice.request.prompt if order.token_ids else None,
        )
        for choice in choices.choices
    ]
    body = dialect.whole(order, said, usage_of(choices.choices), metrics if order.perf_metrics else None)
    return web.Response(
        body=msgspec.json.encode(body), content_type="application/json", headers=headers(metrics)
    )


def _with_metrics(exc: HeadwaterError, services: Services, choices: Choices) -> ApiError:
    error = to_api_error(exc, retry_after=services.config.retry_after)
    error.headers |= headers(perf_metrics(choices.choices, choices.timing))
    return error


class _Stream:
    """One streamed reply."""

    def __init__(
        self, http: web.Request, services: Services, order: Order, dialect: Dialect, choices: Choices
    ) -> None:
        self._http = http
        self._services = services
        self._order = order
        self._dialect = dialect
        self._choices = choices
        self._begun: set[int] = set()
        self._untold: dict[int, tuple[int, ...]] = {}

    async def run(self) -> web.StreamResponse:
        config = self._services.config
        try:
            # Until the first token the status is still open, so that an early failure keeps its own.
            piece = await self._choices.next(config.headers_after)
        except HeadwaterError as exc:
            raise _with_metrics(exc, self._services, self._choices) from exc
        writer = EventWriter(self._http, self._headers(), write_timeout=config.write_timeout)
        await writer.start()
        try:
            await self._tell(writer, piece)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as exc:
            error = to_api_error(exc, retry_after=config.retry_after)
            if not isinstance(exc, HeadwaterError):
                log.error("stream %s failed: %s", self._order.reply_id, exc, exc_info=exc)
            await writer.event(ErrorEvent(error.object, usage_of(self._choices.choices)))
        else:
            await writer.done()
        return await writer.close()

    async def _tell(self, writer: EventWriter, piece: Piece | None) -> None:
        choices, order = self._choices, self._order
        while True:
            if piece is None:
                await writer.comment("waiting")
            else:
                for event in self._events(piece):
                    await writer.event(event)
            if choices.ended:
                break
            piece = await choices.next(self._services.config.heartbeat)
        if order.include_usage:
            await writer.event(self._dialect.event(order, None, usage_of(choices.choices), None))

    def _events(self, piece: Piece) -> list[Any]:
        index, order = piece.choice.index, self._order
        untold = self._untold.pop(index, ()) + piece.token_ids
        events = []
        if piece.text or (self._dialect.opens_empty and index not in self._begun):
            events.append(self._event(piece.choice, piece.text, None, untold))
            untold = ()
        if piece.finish_reason is not None:
            events.append(self._event(piece.choice, "", piece.finish_reason, untold))
        elif untold and order.token_ids:
            # These tokens have no text yet: their ids go with the next event.
            self._untold[index] = untold
        return events

    def _event(
        self, choice: Choice, text: str, finish_reason: FinishReason | None, token_ids: tuple[int, ...]
    ) -> Any:
        order, first = self._order, choice.index not in self._begun
        self._begun.add(choice.index)
        said = Said(
            choice=choice.index,
            text=text,
            finish_reason=finish_reason,
            first=first,
            token_ids=token_ids if order.token_ids else None,
            prompt_ids=choice.request.prompt if order.token_ids and first else None,
        )
        usage: UsageField = None if order.include_usage else msgspec.UNSET
        metrics = None
        if finish_reason is not None and self._choices.ended:
            if order.include_usage is None:
                usage = usage_of(self._choices.choices)
            if order.perf_metrics:
                metrics = perf_metrics(self._choices.choices, self._choices.timing)
        return self._dialect.event(order, said, usage, metrics)

    def _headers(self) -> dict[str, str]:
        metrics = perf_metrics(self._choices.choices, self._choices.timing)
        metrics.pop("server-processing-time", None)
        return headers(metrics) | {"x-request-id": self._http[REQUEST_ID]}
