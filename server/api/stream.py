"""A reply as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple, ParamSpec

from aiohttp import web

from engine import HeadwaterError
from engine.text import Part
from server.api.common import Services
from server.api.dialect import Dialect, Event, Update
from server.api.gather import raw_output, weight_of_raw
from server.api.logprobs import LogprobsWriter
from server.api.order import Order
from server.errors import ApiError, ErrorObject, to_api_error
from server.generate import Choices, Entry, Piece
from server.sse import EventWriter, encode_event
from server.usage import Tally, headers, perf_metrics, tally

log = logging.getLogger("headwater.server")

P = ParamSpec("P")


def with_metrics(exc: HeadwaterError, services: Services, choices: Choices) -> ApiError:
    """Say what ended a request before its reply had begun, with what it had used until then."""
    error = to_api_error(exc, retry_after=services.config.retry_after)
    error.headers |= headers(perf_metrics(choices.choices, choices.timing))
    return error


class _Untold(NamedTuple):
    """Tokens of a choice that have no text yet: they go with the next event."""

    token_ids: tuple[int, ...] = ()
    entries: tuple[Entry, ...] = ()


class Stream:
    """One streamed reply."""

    def __init__(
        self,
        http: web.Request,
        services: Services,
        order: Order,
        dialect: Dialect,
        choices: Choices,
        writer: LogprobsWriter,
    ) -> None:
        self._http = http
        self._services = services
        self._order = order
        self._dialect = dialect
        self._choices = choices
        self._logprobs = writer
        self._begun: set[int] = set()
        self._untold: dict[int, _Untold] = {}
        self._ids: dict[int, list[int]] = {}
        self._tells_tokens = order.token_ids or order.logprobs is not None
        self._told = 0

    async def run(self) -> web.StreamResponse:
        """Send it all; return the response."""
        config = self._services.config
        try:
            # Until the first token the status is still open, so that an early failure keeps its own.
            piece = await self._choices.next(config.headers_after)
        except HeadwaterError as exc:
            raise with_metrics(exc, self._services, self._choices) from exc
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
            await self._send(writer, self._ends_long, self._failure, error.object, self._tally())
        else:
            if self._dialect.marks_done:
                await writer.done()
        return await writer.close()

    async def _tell(self, writer: EventWriter, piece: Piece | None) -> None:
        choices, order = self._choices, self._order
        await self._send(writer, order.long, self._dialect.begin, order, self._tally())
        while True:
            if piece is None:
                await writer.comment("waiting")
            else:
                sums = self._tally() if choices.ended else None
                await self._send(writer, self._is_long(piece), self._events, piece, sums)
            if choices.ended:
                break
            piece = await choices.next(self._services.config.heartbeat)
        await self._send(writer, self._ends_long, self._dialect.end, order, self._tally())

    async def _send(
        self,
        writer: EventWriter,
        long: bool,
        events: Callable[P, Iterable[Event]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Send events, made and written in a worker where that takes `long`."""

        def written() -> list[bytes]:
            return [encode_event(event.payload, event.name, long=long) for event in events(*args, **kwargs)]

        for data in await self._services.writers.run(long, written):
            await writer.send(data)

    def _is_long(self, piece: Piece) -> bool:
        """Whether it takes long to write what a piece says. The end of a choice may repeat all of it."""
        self._told += len(piece.entries)
        if piece.finish_reason is None:
            weight = len(piece.entries) + len(self._untold.get(piece.choice.index, _Untold()).entries)
        else:
            weight = self._told + (weight_of_raw(piece.choice) if self._order.raw else 0)
        return weight > self._services.config.long_reply_tokens

    @property
    def _ends_long(self) -> bool:
        """Whether it takes long to write what may repeat the whole reply."""
        return self._order.long or self._told > self._services.config.long_reply_tokens

    def _events(self, piece: Piece, sums: Tally | None) -> Iterable[Event]:
        """What a piece says; `sums` come with the last one."""
        for update in self._updates(piece):
            ended = update.finish_reason is not None
            yield from self._dialect.update(self._order, update, sums if ended else None)

    def _failure(self, error: ErrorObject, sums: Tally) -> Iterable[Event]:
        return [self._dialect.failure(self._order, error, sums)]

    def _tally(self) -> Tally:
        return tally(self._choices.choices, self._choices.timing)

    def _updates(self, piece: Piece) -> list[Update]:
        """What a piece says: text and calls first, then, by itself, the end."""
        index = piece.choice.index
        if self._order.raw:
            self._ids.setdefault(index, []).extend(piece.token_ids)
        untold = self._untold.pop(index, _Untold())
        untold = _Untold(untold.token_ids + piece.token_ids, untold.entries + piece.entries)
        updates = []
        if piece.parts or (self._dialect.opens_empty and index not in self._begun):
            updates.append(self._update(piece, piece.parts, piece.call_ids, untold, ended=False))
            untold = _Untold()
        if piece.finish_reason is not None:
            updates.append(self._update(piece, (), (), untold, ended=True))
        elif self._tells_tokens and untold.token_ids:
            self._untold[index] = untold
        return updates

    def _update(
        self,
        piece: Piece,
        parts: tuple[Part, ...],
        call_ids: tuple[str | None, ...],
        told: _Untold,
        *,
        ended: bool,
    ) -> Update:
        order, choice = self._order, piece.choice
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        logprobs = self._logprobs.write(told.entries) if told.entries else None
        raw = None
        if ended and order.raw:
            raw = raw_output(choice, tuple(self._ids[choice.index]), None, self._services)
        return Update(
            choice=choice.index,
            parts=parts,
            call_ids=call_ids,
            finish_reason=piece.finish_reason if ended else None,
            first=first,
            logprobs=logprobs,
            token_ids=told.token_ids if order.token_ids else None,
            prompt_ids=choice.request.prompt if order.token_ids and first else None,
            stop_text=choice.stop_text if ended else None,
            raw=raw,
        )

    def _headers(self) -> dict[str, str]:
        metrics = perf_metrics(self._choices.choices, self._choices.timing)
        metrics.pop("server-processing-time", None)
        return headers(metrics)
