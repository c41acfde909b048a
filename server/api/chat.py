"""POST /v1/chat/completions: a conversation in, the next turn out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import UNSET

from engine import RequestError
from server.api.common import (
    SERVICES,
    Order,
    Services,
    build_order,
    check_model,
    check_size,
    model_names,
    read_body,
)
from server.api.reply import Said, reply
from server.schema.requests import ChatRequest, read_chat, read_messages
from server.schema.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    FinishReason,
    Usage,
    UsageField,
)

if TYPE_CHECKING:
    from engine import TextCodec


class ChatDialect:
    """Replies and events of chats."""

    opens_empty = True

    def whole(
        self, order: Order, said: Sequence[Said], usage: Usage, metrics: dict[str, str] | None
    ) -> ChatCompletion:
        """Write a whole reply."""
        return ChatCompletion(
            id=order.reply_id,
            created=order.created,
            model=order.model,
            system_fingerprint=order.fingerprint,
            choices=tuple(
                ChatChoice(
                    index=one.choice,
                    message=ChatMessage(content=one.text),
                    finish_reason=_ended(one),
                    token_ids=UNSET if one.token_ids is None else one.token_ids,
                )
                for one in said
            ),
            usage=usage,
            perf_metrics=UNSET if metrics is None else metrics,
            prompt_token_ids=UNSET if said[0].prompt_ids is None else said[0].prompt_ids,
        )

    def event(
        self, order: Order, said: Said | None, usage: UsageField, metrics: dict[str, str] | None
    ) -> ChatChunk:
        """Write one event; a choice's first one carries the role."""
        return ChatChunk(
            id=order.reply_id,
            created=order.created,
            model=order.model,
            system_fingerprint=order.fingerprint,
            choices=() if said is None else (_chunk_choice(said),),
            usage=usage,
            perf_metrics=UNSET if metrics is None else metrics,
            prompt_token_ids=UNSET if said is None or said.prompt_ids is None else said.prompt_ids,
        )


def _chunk_choice(said: Said) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=said.choice,
        delta=ChatDelta(
            role="assistant" if said.first else UNSET,
            content=said.text if said.finish_reason is None else UNSET,
        ),
        finish_reason=said.finish_reason,
        token_ids=UNSET if said.token_ids is None else said.token_ids,
    )


def _ended(said: Said) -> FinishReason:
    assert said.finish_reason is not None
    return said.finish_reason


async def handle(http: web.Request) -> web.StreamResponse:
    """Answer one request."""
    started = time.monotonic()
    services = http.app[SERVICES]
    with services.backend.answering():
        services.backend.require()
        body, long = await read_body(http, services, read_chat)
        engine, codec = services.backend.require()
        check_model(body.model, model_names(engine.info, services.config))
        prompt = await services.workers.run(long, _encode, services, codec, body)
        order = build_order(http, services, body, [prompt], prefix="chatcmpl-", field="messages")
        return await reply(http, services, order, ChatDialect(), started)


def _encode(services: Services, codec: TextCodec, body: ChatRequest) -> tuple[int, ...]:
    if not codec.has_chat_template:
        raise RequestError("This model has no chat template: use /v1/completions", param="messages")
    messages = read_messages(body)
    check_size((message["content"] for message in messages), services, "messages")
    return tuple(codec.encode_chat(messages))
