"""From a checked order to the reply: whole or as a stream, in any endpoint's words."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol

from aiohttp import web

from engine import HeadwaterError
from engine.text import GrammarSpec, Part
from server.api.common import Services
from server.api.logprobs import Logprobs, LogprobsWriter
from server.api.order import Order
from server.encoding import encode, encode_long
from server.errors import ApiError, ErrorObject, to_api_error
from server.generate import MANY, Choice, Choices, Ending, Entry, Piece, merge_parts
from server.schema.responses import RawOutput
from server.sse import EventWriter, encode_event
from server.usage import Tally, Timing, headers, perf_metrics, tally

if TYPE_CHECKING:
    from engine import TextCodec

log = logging.getLogger("headwater.server")

P = ParamSpec("P")

# Tokens that take as long to write as one with its log-probabilities.
LIGHT_TOKENS = 16


class Event(NamedTuple):
    """A server-sent event: one JSON value, and the name of its kind where the dialect has names."""

    payload: Any
    name: str | None = None


class Call(NamedTuple):
    """A whole call; `arguments` is JSON text as the model wrote it, cut short where the reply was."""

    id: str
    name: str
    arguments: str


class Reply(NamedTuple):
    """All that one choice says, by kind, and in order as `parts` with their `call_ids`.

    `token_ids`, `prompt_ids`, `logprobs` and `raw` are None unless asked for; `stop_text` is the stop string
    that ended the choice, or None.
    """

    choice: int
    content: str
    reasoning: str
    calls: tuple[Call, ...]
    finish_reason: Ending
    logprobs: Logprobs | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    stop_text: str | None = None
    raw: RawOutput | None = None
    parts: tuple[Part, ...] = ()
    call_ids: tuple[str | None, ...] = ()


class Update(NamedTuple):
    """What one choice adds in a stream; the fields are a Reply's. `first` marks a choice's first update,
    `call_ids` has an id for each part of a call."""

    choice: int
    parts: tuple[Part, ...]
    call_ids: tuple[str | None, ...]
    finish_reason: Ending | None
    first: bool
    logprobs: Logprobs | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    stop_text: str | None = None
    raw: RawOutput | None = None


class Dialect(Protocol):
    """How an endpoint writes one reply; made anew for each.

    A stream is `begin`, then an `update` for each piece, then `end`, or `failure` instead of what is left.
    `update` gets the tally with the last piece of the last choice. `marks_done`: [DONE] ends the stream.
    `opens_empty`: a choice begins with an update of its own even while it has nothing to show.
    """

    @property
    def marks_done(self) -> bool: ...

    @property
    def opens_empty(self) -> bool: ...

    def whole(self, order: Order, replies: Sequence[Reply], tally: Tally) -> Any:
        """Write a whole reply."""

    def begin(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Write what comes before the first piece."""

    def update(self, order: Order, update: Update, tally: Tally | None) -> Iterable[Event]:
        """Write a piece."""

    def end(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Write what comes after the last piece."""

    def failure(self, order: Order, error: ErrorObject, tally: Tally) -> Event:
        """Write what ends a stream that can't go on."""


async def reply(
    http: web.Request, services: Services, order: Order, dialect: Dialect, started: float
) -> web.StreamResponse:
    """Run an order and answer it. `started` is when the request came, by time.monotonic."""
    engine, codec = services.backend.require()
    many = len(order.requests) > MANY
    choices = Choices(
        engine,
        await services.writers.run(many, _choices, order, codec),
        Timing(started, time.monotonic(), services.backend.open),
        services.metrics,
    )
    writer = LogprobsWriter(codec, order.logprobs, order.top)
    async with choices:
        if order.stream:
            return await _Stream(http, services, order, dialect, choices, writer).run()
        return await _whole(services, order, dialect, choices, writer)


def _choices(order: Order, codec: TextCodec) -> list[Choice]:
    return [
        Choice(index, request, codec, order.rules[request.prompt_index])
        for index, request in enumerate(order.requests)
    ]


async def _whole(
    services: Services, order: Order, dialect: Dialect, choices: Choices, writer: LogprobsWriter
) -> web.Response:
    gathered = [_Gathered() for _ in choices.choices]
    try:
        while not choices.ended:
            piece = await choices.next()
            if piece is not None:
                gathered[piece.choice.index].add(piece)
    except HeadwaterError as exc:
        raise _with_metrics(exc, services, choices) from exc
    sums = tally(choices.choices, choices.timing)
    weight = sum(one.weight for one in gathered)
    if order.raw:
        weight += sum(_weight_of_raw(choice) for choice in choices.choices)
    long = order.long or weight > services.config.long_reply_tokens

    def written() -> bytes:
        told = [
            gathered[index].reply(place, choices.choices[index], order, writer, services)
            for place, index in enumerate(_best(order, gathered))
        ]
        return (encode_long if long else encode)(dialect.whole(order, told, sums))

    body = await services.writers.run(long, written)
    return web.Response(body=body, content_type="application/json", headers=headers(sums.perf))


def _weight_of_raw(choice: Choice) -> int:
    return (choice.prompt_tokens + choice.completion_tokens) // LIGHT_TOKENS


def _best(order: Order, gathered: Sequence[_Gathered]) -> list[int]:
    """Which choices are told, the likeliest of each prompt first where more were generated than asked for."""
    if order.generated == order.shown:
        return list(range(len(gathered)))
    told: list[int] = []
    for start in range(0, len(gathered), order.generated):
        ranked = sorted(
            range(start, start + order.generated), key=lambda i: gathered[i].likelihood, reverse=True
        )
        told += ranked[: order.shown]
    return told


class _Gathered:
    """What one choice has said so far."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.token_ids: list[int] = []
        self._parts: list[Part] = []
        self._call_ids: list[str | None] = []

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        self.entries += piece.entries
        self.token_ids += piece.token_ids
        self._parts += piece.parts
        self._call_ids += piece.call_ids

    @property
    def weight(self) -> int:
        """How long it takes to write, counted in tokens with their log-probabilities."""
        return len(self.entries) + len(self.token_ids) // LIGHT_TOKENS

    @property
    def likelihood(self) -> float:
        """Mean log-probability of the generated tokens."""
        found = [e.logprob.logprob for e in self.entries[-len(self.token_ids) :] if e.logprob is not None]
        return sum(found) / len(found) if found else float("-inf")

    def reply(
        self, place: int, choice: Choice, order: Order, writer: LogprobsWriter, services: Services
    ) -> Reply:
        """All of it."""
        assert choice.finish_reason is not None
        ids = tuple(self.token_ids)
        logprobs = writer.write(self.entries)
        parts, call_ids = merge_parts(self._parts, self._call_ids)
        return Reply(
            choice=place,
            content="".join(part.text for part in parts if part.kind == "content"),
            reasoning="".join(part.text for part in parts if part.kind == "reasoning"),
            calls=tuple(
                Call(call_id or "", part.name or "", part.text)
                for part, call_id in zip(parts, call_ids, strict=True)
                if part.kind == "call"
            ),
            finish_reason=choice.finish_reason,
            logprobs=logprobs,
            token_ids=ids if order.token_ids else None,
            prompt_ids=choice.request.prompt if order.token_ids else None,
            stop_text=choice.stop_text,
            raw=_raw(choice, ids, logprobs, services) if order.raw else None,
            parts=parts,
            call_ids=call_ids,
        )


def _raw(choice: Choice, ids: tuple[int, ...], logprobs: Logprobs | None, services: Services) -> RawOutput:
    _, codec = services.backend.require()
    request, constraint = choice.request, choice.request.constraint
    # An echoed prompt counts as come out, so that ids and log-probabilities stand side by side.
    ids = choice.echoed_ids + ids
    return RawOutput(
        prompt_fragments=(codec.decode(request.prompt, skip_special=False),),
        prompt_token_ids=request.prompt,
        completion=codec.decode(ids, skip_special=False),
        completion_token_ids=ids,
        completion_logprobs=logprobs,
        grammar=None if constraint is None else GrammarSpec.parse(constraint.source).text or None,
    )


def _with_metrics(exc: HeadwaterError, services: Services, choices: Choices) -> ApiError:
    error = to_api_error(exc, retry_after=services.config.retry_after)
    error.headers |= headers(perf_metrics(choices.choices, choices.timing))
    return error


class _Untold(NamedTuple):
    """Tokens of a choice that have no text yet: they go with the next event."""

    token_ids: tuple[int, ...] = ()
    entries: tuple[Entry, ...] = ()


class _Stream:
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
            weight = self._told + (_weight_of_raw(piece.choice) if self._order.raw else 0)
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
            raw = _raw(choice, tuple(self._ids[choice.index]), None, self._services)
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
