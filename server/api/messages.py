"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from engine import ContextLengthExceeded, RequestError
from server.api.chat import prepare_chat, take_chat
from server.api.common import SERVICES, check_model, model_names, read_body
from server.api.messages_chat import to_chat, to_prompt
from server.api.messages_reply import MessagesDialect
from server.api.reply import reply
from server.schema.anthropic import CountTokensRequest, MessagesRequest, read_count_tokens, read_messages
from server.schema.anthropic_replies import MessageTokensCount
from server.schema.requests import ChatRequest

if TYPE_CHECKING:
    from engine import TextCodec

# Names of a chat's fields, and what they are called here.
_NAMES = (
    (re.compile(r"response_format\.json_schema\.schema"), "output_config.format.schema"),
    (re.compile(r"response_format"), "output_config.format"),
    (re.compile(r"reasoning_effort"), "output_config.effort"),
    (re.compile(r"tools\.(\d+)\.function\.parameters"), r"tools.\1.input_schema"),
    (re.compile(r"tools\.(\d+)\.function\.(\w+)"), r"tools.\1.\2"),
    (re.compile(r"stop"), "stop_sequences"),
)
_QUOTED = re.compile(r"'([\w.]+)'")


def add_routes(app: web.Application, prefix: str) -> None:
    """Put both endpoints at their paths under `prefix`."""
    app.router.add_post(prefix + "/v1/messages", handle)
    app.router.add_post(prefix + "/v1/messages/count_tokens", count)


async def handle(http: web.Request) -> web.StreamResponse:
    """Answer one request."""
    started = time.monotonic()
    services = http.app[SERVICES]
    with services.backend.answering():
        services.backend.require()
        (request, chat), long = await read_body(http, services, _read)
        _, codec = services.backend.require()
        with _own_names():
            order = await take_chat(http, services, _within_ability(codec, chat), prefix="msg_", long=long)
        return await reply(http, services, order, MessagesDialect(request), started)


async def count(http: web.Request) -> web.Response:
    """Count the tokens of a prompt, whether or not they fit."""
    services = http.app[SERVICES]
    with services.backend.answering():
        services.backend.require()
        (_, chat), long = await read_body(http, services, _read_count)
        engine, codec = services.backend.require()
        check_model(chat.model, model_names(engine.info, services.config))
        with _own_names():
            prompt, _ = await prepare_chat(services, _within_ability(codec, chat), long=long)
        body = msgspec.json.encode(MessageTokensCount(len(prompt.ids)))
        return web.Response(body=body, content_type="application/json")


def _read(body: bytes) -> tuple[MessagesRequest, ChatRequest]:
    request = read_messages(body)
    return request, to_chat(request)


def _read_count(body: bytes) -> tuple[CountTokensRequest, ChatRequest]:
    request = read_count_tokens(body)
    return request, to_prompt(request)


def _within_ability(codec: TextCodec, chat: ChatRequest) -> ChatRequest:
    """Drop the wish to think as much as is useful where the model can't: then that is not at all."""
    if codec.reasons or (chat.thinking is not None and chat.thinking.type == "enabled"):
        return chat
    return msgspec.structs.replace(chat, thinking=None, reasoning_effort=None)


@contextmanager
def _own_names() -> Iterator[None]:
    """Name the field at fault as it is called here, and in the message: errors have no other place for it."""
    try:
        yield
    except RequestError as exc:
        message = _QUOTED.sub(lambda found: f"'{_own_name(found[1])}'", str(exc))
        param = _own_name(exc.param or "")
        if param and f"'{param}'" not in message and not isinstance(exc, ContextLengthExceeded):
            message = f"'{param}': {message}"
        raise RequestError(message, param=param or None) from None


def _own_name(name: str) -> str:
    for theirs, ours in _NAMES:
        if found := theirs.fullmatch(name):
            return found.expand(ours)
    return name
