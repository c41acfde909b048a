"""POST /v1/responses: OpenAI's second dialect, answered without keeping anything."""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple, NoReturn

import msgspec
from aiohttp import web

from engine import RequestError
from server.api.chat import prepare_chat, take_chat
from server.api.common import SERVICES, Services, check_model, model_names, read_body
from server.api.reply import reply
from server.api.responses_dialect import ResponsesDialect
from server.errors import ApiError
from server.schema import strict
from server.schema.requests import ChatRequest, JsonSchema, ResponseFormat
from server.schema.responses_api import PRIORITY, ResponsesRequest, read_request
from server.schema.responses_items import read_turns
from server.schema.responses_options import FunctionTool, TextFormat, ToolChoice
from server.schema.responses_reply import InputTokens

# What a chat's fields are called here, for messages about them.
_NAMES = (
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"max_completion_tokens|max_tokens", "max_output_tokens"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"prompt_truncate_len", "truncation"),
    (r"messages", "input"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
)


class Asked(NamedTuple):
    """A request, and the chat that asks for the same."""

    request: ResponsesRequest
    chat: ChatRequest


def add_routes(app: web.Application, prefix: str) -> None:
    """Add the paths of this dialect, those of stored responses included."""
    path = prefix + "/v1/responses"
    app.router.add_post(path, handle)
    app.router.add_post(path + "/input_tokens", count)
    app.router.add_post(path + "/compact", unsupported)
    app.router.add_get(path + "/{id}", missing)
    app.router.add_delete(path + "/{id}", missing)
    app.router.add_post(path + "/{id}/cancel", missing)
    app.router.add_get(path + "/{id}/input_items", missing)


async def handle(http: web.Request) -> web.StreamResponse:
    """Answer one request."""
    started = time.monotonic()
    services = http.app[SERVICES]
    with services.backend.answering():
        services.backend.require()
        asked, long = await read_body(http, services, _read)
        chat = _truncated(asked, services)
        try:
            order = await take_chat(http, services, chat, prefix="resp_", long=long)
        except RequestError as exc:
            raise _in_our_words(exc) from exc
        return await reply(http, services, order, ResponsesDialect(asked.request), started)


async def count(http: web.Request) -> web.Response:
    """Count the tokens of a prompt, whether or not they fit."""
    services = http.app[SERVICES]
    with services.backend.answering():
        services.backend.require()
        asked, long = await read_body(http, services, _read)
        engine, _ = services.backend.require()
        check_model(asked.chat.model, model_names(engine.info, services.config))
        try:
            prompt, _ = await prepare_chat(services, asked.chat, long=long)
        except RequestError as exc:
            raise _in_our_words(exc) from exc
        body = msgspec.json.encode(InputTokens(len(prompt.ids)))
        return web.Response(body=body, content_type="application/json")


async def unsupported(http: web.Request) -> NoReturn:
    """Say that histories are not shortened here."""
    raise ApiError(
        404,
        'This server shortens no histories by itself: send what the model is to see, or truncation "auto"',
        code="not_supported",
    )


async def missing(http: web.Request) -> NoReturn:
    """Say that there are no stored responses."""
    name = strict.shown(http.match_info["id"])
    raise ApiError(
        404,
        f"There is no response {name}: this server stores none, whatever 'store' says",
        param="response_id",
        code="response_not_found",
    )


def _read(body: bytes) -> Asked:
    request = read_request(strict.loads(body))
    return Asked(request, _chat(request))


def _chat(request: ResponsesRequest) -> ChatRequest:
    return ChatRequest(
        model=request.model,
        messages=read_turns(request.input, request.instructions),
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=True if request.wants_logprobs else None,
        top_logprobs=request.top_logprobs or 0 if request.wants_logprobs else None,
        stream=request.stream,
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text.format) if request.text and request.text.format else None,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        service_tier="priority" if request.service_tier in PRIORITY else None,
        user=request.user,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_isolation_key=request.prompt_cache_isolation_key,
        cache_salt=request.cache_salt,
        prompt_cache_max_len=request.prompt_cache_max_len,
    )


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _choice(choice: str | ToolChoice | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type == "function":
        return {"type": "function", "function": {"name": choice.name}}
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools or ()]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _format(wanted: TextFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    framed = JsonSchema(
        name=wanted.name, schema=wanted.schema, strict=wanted.strict, description=wanted.description
    )
    return ResponseFormat(type="json_schema", json_schema=framed)


def _truncated(asked: Asked, services: Services) -> ChatRequest:
    """The chat, with the length to which its prompt is cut where the client lets it be."""
    if asked.request.truncation != "auto":
        return asked.chat
    engine, _ = services.backend.require()
    context = engine.info.context_length
    wanted = asked.request.max_output_tokens or services.config.default_max_tokens
    # Room for the reply, but never more than half of the context.
    room = min(wanted, context // 2)
    return msgspec.structs.replace(asked.chat, prompt_truncate_len=context - room)


def _in_our_words(error: RequestError) -> RequestError:
    """An error about the chat's fields as one about this dialect's."""
    message, param = str(error), error.param
    for name, ours in _NAMES:
        message = re.sub(rf"'(?:{name})(?=['.])", f"'{ours}", message)
        param = None if param is None else re.sub(rf"^(?:{name})(?=$|\.)", ours, param)
    return type(error)(message, param=param)
