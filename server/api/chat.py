"""POST /v1/chat/completions: a conversation in, the next turn out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from engine import ContextLengthExceeded, RequestError
from server.api.chat_dialect import ChatDialect
from server.api.common import SERVICES, Services, check_model, check_size, model_names, read_body
from server.api.grammar import compile_calls, compile_format
from server.api.order import Frame, Order, Prompt, make_order
from server.api.reply import reply
from server.schema.messages import read_messages
from server.schema.requests import ChatRequest, read_chat
from server.schema.tools import Choice, read_tools

if TYPE_CHECKING:
    from engine import TextCodec

Turns = list[dict[str, Any]]


async def handle(http: web.Request) -> web.StreamResponse:
    """Answer one request."""
    started = time.monotonic()
    services = http.app[SERVICES]
    with services.backend.answering():
        services.backend.require()
        body, long = await read_body(http, services, read_chat)
        order = await take_chat(http, services, body, prefix="chatcmpl-", long=long)
        return await reply(http, services, order, ChatDialect(), started)


async def take_chat(
    http: web.Request, services: Services, body: ChatRequest, *, prefix: str, long: bool
) -> Order:
    """Turn a checked chat body into an order: rendered, tokenized, its grammar compiled.

    `prefix` begins the reply's id; `long` says that rendering may take long. Raises ApiError, RequestError.
    """
    engine, _ = services.backend.require()
    check_model(body.model, model_names(engine.info, services.config))
    prompt, frame = await prepare_chat(services, body, long=long)
    return await make_order(
        http, services, body, [prompt], prefix=prefix, field="messages", frame=frame, long=long
    )


async def prepare_chat(services: Services, body: ChatRequest, *, long: bool) -> tuple[Prompt, Frame]:
    """Render and tokenize a chat, and compile what its reply must be, in a worker where it may take long.

    Raises RequestError.
    """
    _, codec = services.backend.require()
    heavy = long or body.response_format is not None or bool(body.tools or body.functions)
    return await services.workers.run(heavy, _prepare, services, codec, body)


def _encode_chat(
    services: Services, codec: TextCodec, body: ChatRequest, *, constrained: bool = False
) -> Prompt:
    """Render and tokenize a chat's prompt. `constrained`: a grammar holds for the reply. May take long.

    Raises RequestError.
    """
    if not codec.has_chat_template:
        raise RequestError("This model has no chat template: use /v1/completions", param="messages")
    tools = read_tools(body)
    turns = read_messages(body.messages, history=body.reasoning_history)
    check_size((turn["content"] for turn in turns), services, "messages")
    options = _template_options(codec, body, constrained=constrained)
    limit = body.prompt_truncate_len
    ids = _encode(codec, body, turns, tools, options)
    if limit is not None and len(ids) > limit:
        ids = _shorten(codec, body, turns, tools, options, limit)
    return Prompt(ids, opened=codec.opened_by(ids))


def _prepare(services: Services, codec: TextCodec, body: ChatRequest) -> tuple[Prompt, Frame]:
    tools = read_tools(body)
    grammar = compile_format(codec, body.response_format)
    if grammar is not None and tools.required:
        raise RequestError(
            "'response_format' and a 'tool_choice' that requires a call exclude each other",
            param="response_format",
        )
    grammar = grammar or compile_calls(codec, tools)
    prompt = _encode_chat(services, codec, body, constrained=grammar is not None)
    # Under a grammar all is content, but for what the prompt has opened.
    reasoning = codec.reasons and (grammar is None or bool(prompt.opened))
    return prompt, Frame(tools, reasoning, grammar)


def _shorten(
    codec: TextCodec, body: ChatRequest, turns: Turns, tools: Choice, options: Any, limit: int
) -> tuple[int, ...]:
    """Drop as few of the oldest turns as it takes; system turns and the last one stay."""
    droppable = [i for i, turn in enumerate(turns[:-1]) if turn["role"] != "system"]
    best = None
    few, many = 1, len(droppable)
    while few <= many:
        drop = (few + many) // 2
        gone = set(droppable[:drop])
        # Without the question before it an answer says nothing, nor does a result without its call.
        while drop < len(droppable) and turns[droppable[drop]]["role"] != "user":
            gone.add(droppable[drop])
            drop += 1
        ids = _encode(codec, body, [t for i, t in enumerate(turns) if i not in gone], tools, options)
        if len(ids) <= limit:
            best, many = ids, (few + many) // 2 - 1
        else:
            few = drop + 1
    if best is None:
        raise ContextLengthExceeded(
            f"The system turns and the last turn have more than 'prompt_truncate_len' {limit} tokens",
            param="prompt_truncate_len",
        )
    return best


def _encode(
    codec: TextCodec, body: ChatRequest, turns: Turns, tools: Choice, options: dict[str, Any]
) -> tuple[int, ...]:
    return tuple(
        codec.encode_chat(
            turns,
            tools=list(tools.tools) or None,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            extra=options,
        )
    )


def _template_options(codec: TextCodec, body: ChatRequest, *, constrained: bool) -> dict[str, Any]:
    """The template's variables: what the body gives, and whether the model is to reason.

    Raises RequestError where it can't, or where a variable is not for requests to set.
    """
    given = codec.check_template_options(body.chat_template_kwargs or {})
    effort = _effort(body)
    if effort is None:
        # A grammar holds from the first token on: there is no room to reason first.
        quiet = codec.thinking_options("none") if constrained else None
        return (quiet or {}) | given
    found = codec.thinking_options(effort)
    if found is None and effort != "none":
        name = "thinking" if body.thinking is not None else "reasoning_effort"
        raise RequestError(f"This model does not reason: '{name}' is not supported", param=name)
    return (found or {}) | given


def _effort(body: ChatRequest) -> str | None:
    """How much the body asks the model to reason, in one word; None where it says nothing."""
    if body.thinking is not None:
        return {"enabled": "medium", "disabled": "none", "adaptive": "medium"}[body.thinking.type]
    effort = body.reasoning_effort
    if effort is None or isinstance(effort, str):
        return effort
    if isinstance(effort, bool):
        return "medium" if effort else "none"
    return "medium" if effort > 0 else "none"
