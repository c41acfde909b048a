"""POST /v1/chat/completions: a conversation in, the next turn out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from engine import RequestError
from engine.text import texts_of
from server.api.chat_dialect import ChatDialect
from server.api.common import SERVICES, Services, check_model, check_size, model_names, read_body
from server.api.grammar import Wanted, compile_grammar, wanted_calls, wanted_format
from server.api.order import Frame, Order, Prompt, make_order
from server.api.reply import reply
from server.api.shorten import Turns, shorten, size_of
from server.schema.messages import read_messages
from server.schema.requests import ChatRequest, read_chat
from server.schema.tools import Choice, read_tools

if TYPE_CHECKING:
    from engine import TextCodec


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
    """Compile what a chat's reply must be, then render and tokenize it, in workers where that may take long.

    Raises RequestError, and Overloaded where too many grammars are to be compiled.
    """
    _, codec = services.backend.require()
    heavy = long or body.response_format is not None or bool(body.tools or body.functions)
    tools, wanted = await services.workers.run(heavy, _wanted, codec, body)
    grammar = await compile_grammar(services, wanted)
    prompt = await services.workers.run(
        heavy, _encode_chat, services, codec, body, tools, constrained=grammar is not None
    )
    # Under a grammar all is content, but for what the prompt has opened.
    reasoning = codec.reasons and (grammar is None or bool(prompt.opened))
    return prompt, Frame(tools, reasoning, grammar)


def _wanted(codec: TextCodec, body: ChatRequest) -> tuple[Choice, Wanted | None]:
    tools, form = read_tools(body), wanted_format(body.response_format)
    if form is not None and tools.required:
        raise RequestError(
            "'response_format' and a 'tool_choice' that requires a call exclude each other",
            param="response_format",
        )
    return tools, form or wanted_calls(codec, tools)


def _encode_chat(
    services: Services, codec: TextCodec, body: ChatRequest, tools: Choice, *, constrained: bool
) -> Prompt:
    """Render and tokenize a chat's prompt. `constrained`: a grammar holds for the reply. May take long.

    Raises RequestError.
    """
    if not codec.has_chat_template:
        raise RequestError("This model has no chat template: use /v1/completions", param="messages")
    turns = read_messages(body.messages, history=body.reasoning_history)
    options = _template_options(codec, body, constrained=constrained)

    def encode(kept: Turns) -> tuple[int, ...]:
        return tuple(
            codec.encode_chat(
                kept,
                tools=list(tools.tools) or None,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                extra=options,
            )
        )

    if body.prompt_truncate_len is None:
        check_size(texts_of([turns, list(tools.tools)]), services, "messages")
        ids = encode(turns)
    else:
        engine, _ = services.backend.require()
        limit = min(body.prompt_truncate_len, engine.info.context_length)
        most = services.backend.max_prompt_bytes * limit // engine.info.context_length
        ids = shorten(turns, size_of(list(tools.tools)), encode, limit, most)
    return Prompt(ids, opened=codec.opened_by(ids))


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
