"""From a checked order to the reply: whole or as a stream, in any endpoint's words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiohttp import web

from engine import HeadwaterError
from server.api.common import Services
from server.api.dialect import Dialect
from server.api.gather import Gathered, best, weight_of_raw
from server.api.logprobs import LogprobsWriter
from server.api.order import Order
from server.api.stream import Stream, with_metrics
from server.encoding import encode, encode_long
from server.generate import MANY, Choice, Choices
from server.usage import Timing, headers, tally

if TYPE_CHECKING:
    from engine import TextCodec


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
            return await Stream(http, services, order, dialect, choices, writer).run()
        return await _whole(services, order, dialect, choices, writer)


def _choices(order: Order, codec: TextCodec) -> list[Choice]:
    return [
        Choice(index, request, codec, order.rules[request.prompt_index])
        for index, request in enumerate(order.requests)
    ]


async def _whole(
    services: Services, order: Order, dialect: Dialect, choices: Choices, writer: LogprobsWriter
) -> web.Response:
    gathered = [Gathered() for _ in choices.choices]
    try:
        while not choices.ended:
            piece = await choices.next()
            if piece is not None:
                gathered[piece.choice.index].add(piece)
    except HeadwaterError as exc:
        raise with_metrics(exc, services, choices) from exc
    sums = tally(choices.choices, choices.timing)
    weight = sum(one.weight for one in gathered)
    if order.raw:
        weight += sum(weight_of_raw(choice) for choice in choices.choices)
    long = order.long or weight > services.config.long_reply_tokens

    def written() -> bytes:
        told = [
            gathered[index].reply(place, choices.choices[index], order, writer, services)
            for place, index in enumerate(best(order, gathered))
        ]
        return (encode_long if long else encode)(dialect.whole(order, told, sums))

    body = await services.writers.run(long, written)
    return web.Response(body=body, content_type="application/json", headers=headers(sums.perf))
