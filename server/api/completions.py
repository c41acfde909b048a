"""POST /v1/completions: text in, text out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import UNSET

from engine import RequestError
from server.api.common import SERVICES, Services, check_model, check_size, model_names, read_body
from server.api.dialect import Event, Reply, Update
from server.api.grammar import compile_grammar, wanted_format
from server.api.order import Frame, Order, Prompt, make_order
from server.api.reply import reply
from server.errors import ErrorObject
from server.schema.prompts import read_prompts
from server.schema.requests import CompletionRequest, read_completion
from server.schema.responses import Completion, CompletionChoice, ErrorEvent, UsageField
from server.usage import Tally

if TYPE_CHECKING:
    from engine import TextCodec


class CompletionDialect:
    """Replies and events of text completions, which have one shape."""

    marks_done = True
    opens_empty = False

    def whole(self, order: Order, replies: Sequence[Reply], tally: Tally) -> Completion:
        """Write a whole reply."""
        choices = tuple(_choice(one, one.content) for one in replies)
        return self._write(order, choices, tally.usage, tally.perf if order.perf_metrics else None)

    def begin(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Nothing comes before the first piece."""
        return ()

    def update(self, order: Order, update: Update, tally: Tally | None) -> Iterable[Event]:
        """Write a piece; the end of a choice has no text."""
        text = "".join(part.text for part in update.parts)
        usage, perf = closing(order, tally)
        return (Event(self._write(order, (_choice(update, text),), usage, perf)),)

    def end(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Write usage by itself where it was asked for."""
        return (Event(self._write(order, (), tally.usage, None)),) if order.include_usage else ()

    def failure(self, order: Order, error: ErrorObject, tally: Tally) -> Event:
        """Write what ends a stream that can't go on."""
        return Event(ErrorEvent(error, tally.usage))

    def _write(
        self,
        order: Order,
        choices: tuple[CompletionChoice, ...],
        usage: UsageField,
        perf: dict[str, str] | None,
    ) -> Completion:
        return Completion(
            id=order.reply_id,
            created=order.created,
            model=order.model,
            system_fingerprint=order.fingerprint,
            choices=choices,
            usage=usage,
            service_tier=UNSET if order.service_tier is None else order.service_tier,
            perf_metrics=UNSET if perf is None else perf,
        )


def closing(order: Order, tally: Tally | None) -> tuple[UsageField, dict[str, str] | None]:
    """What an event tells beside its choice: usage and perf_metrics with the last finish_reason, or null
    for usage where that comes by itself."""
    usage: UsageField = None if order.include_usage else UNSET
    if tally is None:
        return usage, None
    if order.include_usage is None:
        usage = tally.usage
    return usage, tally.perf if order.perf_metrics else None


def _choice(one: Reply | Update, text: str) -> CompletionChoice:
    return CompletionChoice(
        index=one.choice,
        text=text,
        logprobs=one.logprobs,
        # There is nothing to call in a completion.
        finish_reason=one.finish_reason,
        prompt_token_ids=UNSET if one.prompt_ids is None else one.prompt_ids,
        token_ids=UNSET if one.token_ids is None else one.token_ids,
        raw_output=UNSET if one.raw is None else one.raw,
    )


async def handle(http: web.Request) -> web.StreamResponse:
    """Answer one request."""
    started = time.monotonic()
    services = http.app[SERVICES]
    with services.backend.answering():
        services.backend.require()
        body, long = await read_body(http, services, read_completion)
        engine, codec = services.backend.require()
        check_model(body.model, model_names(engine.info, services.config))
        _check_reasoning(body)
        heavy = body.response_format is not None
        wanted = await services.workers.run(heavy, wanted_format, body.response_format)
        frame = Frame(grammar=await compile_grammar(services, wanted))
        prompts = await services.workers.run(long, _prepare, services, codec, body)
        order = await make_order(
            http, services, body, prompts, prefix="cmpl-", field="prompt", frame=frame, long=long
        )
        return await reply(http, services, order, CompletionDialect(), started)


def _prepare(services: Services, codec: TextCodec, body: CompletionRequest) -> list[Prompt]:
    engine, _ = services.backend.require()
    prompts = read_prompts(
        body.prompt,
        vocab_size=engine.info.vocab_size,
        # All prompts of a request wait at once before the first one runs.
        max_prompts=min(services.config.max_prompts, engine.config.max_waiting),
    )
    for one in prompts:
        if isinstance(one, str):
            check_size([one], services, "prompt")
    return [Prompt(tuple(codec.encode(one)), one) if isinstance(one, str) else Prompt(one) for one in prompts]


def _check_reasoning(body: CompletionRequest) -> None:
    # A prompt is read as it is given: whether the model reasons is for its writer to say in it.
    if body.reasoning_effort not in (None, False, "none"):
        raise RequestError(
            "'reasoning_effort' is for chats: a completions prompt is read as it is given",
            param="reasoning_effort",
        )
    if body.thinking is not None and body.thinking.type != "disabled":
        raise RequestError(
            "'thinking' is for chats: a completions prompt is read as it is given", param="thinking"
        )
