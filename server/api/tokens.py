"""POST /tokenize and /detokenize: what a prompt is to the model, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET

from engine import ContextLengthExceeded
from server.api.chat import prepare_chat
from server.api.common import SERVICES, Services, check_model, check_size, model_names, read_body
from server.schema.prompts import check_ids
from server.schema.tokens import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
    read_detokenize,
    read_tokenize,
)

PATHS = ("", "/v1", "/inference/v1")


def add_routes(router: web.UrlDispatcher) -> None:
    """Put both endpoints at their paths."""
    for prefix in PATHS:
        router.add_post(prefix + "/tokenize", tokenize)
        router.add_post(prefix + "/detokenize", detokenize)


async def tokenize(http: web.Request) -> web.Response:
    """Answer one request."""
    services = http.app[SERVICES]
    with services.backend.answering():
        services.backend.require()
        body, long = await read_body(http, services, read_tokenize)
        _check_name(services, body.model)
        if body.messages is None:
            return _json(await services.workers.run(long, _tokenize, services, body))
        # The same way as a chat that is to be answered, so that the ids are the same.
        prompt, _ = await prepare_chat(services, body.chat(), long=long)
        return _json(await services.workers.run(long, _reply, services, body, prompt.ids))


async def detokenize(http: web.Request) -> web.Response:
    """Answer one request."""
    services = http.app[SERVICES]
    with services.backend.answering():
        services.backend.require()
        body, long = await read_body(http, services, read_detokenize)
        _check_name(services, body.model)
        return _json(await services.workers.run(long, _detokenize, services, body))


def _check_name(services: Services, name: str | None) -> None:
    engine, _ = services.backend.require()
    if name is not None:
        check_model(name, model_names(engine.info, services.config))


def _tokenize(services: Services, body: TokenizeRequest) -> bytes:
    _, codec = services.backend.require()
    text = body.prompt or ""
    check_size([text], services, "prompt")
    ids = codec.encode(text, add_special=body.add_special_tokens is not False)
    return _reply(services, body, ids)


def _reply(services: Services, body: TokenizeRequest, ids: Sequence[int]) -> bytes:
    engine, codec = services.backend.require()
    texts = tuple(map(codec.token_text, ids)) if body.return_token_strs else UNSET
    context = engine.info.context_length
    reply = TokenizeReply(tokens=tuple(ids), count=len(ids), max_model_len=context, token_strs=texts)
    return msgspec.json.encode(reply)


def _detokenize(services: Services, body: DetokenizeRequest) -> bytes:
    engine, codec = services.backend.require()
    if len(body.tokens) > services.backend.max_prompt_bytes:
        raise ContextLengthExceeded(
            f"'tokens' holds {len(body.tokens)} ids, far more than the context of "
            f"{engine.info.context_length} tokens",
            param="tokens",
        )
    ids = check_ids(body.tokens, codec.vocab_size, "tokens")
    return msgspec.json.encode(DetokenizeReply(prompt=codec.decode(ids, skip_special=False)))


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
