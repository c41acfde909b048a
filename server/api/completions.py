"""POST /v1/completions: text in, text out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import UNSET

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
from server.schema.requests import read_completion, read_prompts
from server.schema.responses import Completion, CompletionChoice, Usage, UsageField

if TYPE_CHECKING:
    from engine import TextCodec


class CompletionDialect:
    """Replies and events of text completions, which have one shape."""

    opens_empty = False

    def whole(
        self, order: Order, said: Sequence[Said], usage: Usage, metrics: dict[str, str] | None
    ) -> Completion:
        """Write a whole reply."""
        return self._write(order, said, usage, metrics)

    def event(
        self, order: Order, said: Said | None, usage: UsageField, metrics: dict[str, str] | None
    ) -> Completion:
        """Write one event."""
        return self._write(order, () if said is None else (said,), usage, metrics)

    def _write(
        self, order: Order, said: Sequence[Said], usage: UsageField, metrics: dict[str, str] | None
    ) -> Completion:
        return Completion(
            id=order.reply_id,
            created=order.created,
            model=order.model,
            system_fingerprint=order.fingerprint,
            choices=tuple(
                CompletionChoice(
                    index=one.choice,
                    text=one.text,
                    finish_reason=one.finish_reason,
                    prompt_token_ids=UNSET if one.prompt_ids is None else one.prompt_ids,
                    token_ids=UNSET if one.token_ids is None else one.token_ids,
                )
                for one in said
            ),
            usage=usage,
            perf_metrics=UNSET if metrics is None else metrics,
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
        prompts = await services.workers.run(long, _encode, services, codec, body.prompt)
        order = build_order(http, services, body, prompts, prefix="cmpl-", field="prompt")
        return await reply(http, services, order, CompletionDialect(), started)


def _encode(services: Services, codec: TextCodec, prompt: object) -> list[tuple[int, ...]]:
    engine, _ = services.backend.require()
    prompts = read_prompts(
        prompt,
        vocab_size=engine.info.vocab_size,
        # All prompts of a request wait at once before the first one runs.
        max_prompts=min(services.config.max_prompts, engine.config.max_waiting),
    )
    for one in prompts:
        if isinstance(one, str):
            check_size([one], services, "prompt")
    return [tuple(codec.encode(one)) if isinstance(one, str) else one for one in prompts]
