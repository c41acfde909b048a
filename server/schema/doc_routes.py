"""What the server answers, path by path: the skeleton of the OpenAPI document."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from server.schema.anthropic import CountTokensRequest, MessagesRequest
from server.schema.anthropic_replies import AnthropicMessage, MessageEvent, MessageTokensCount
from server.schema.requests import ChatRequest, CompletionRequest
from server.schema.responses import ChatChunk, ChatCompletion, Completion, ModelCard, ModelList
from server.schema.responses_api import ResponsesRequest
from server.schema.responses_reply import InputTokens, Response, StreamEvent
from server.schema.tokens import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest

Struct = type[msgspec.Struct]


class Route(NamedTuple):
    """One operation. `paths` are its main path and the twins that answer the same.

    `reply` is a struct, or the media type of a text. `event` is what the stream's `data:` lines hold.
    `tells_cache`: the reply's headers tell what the cache did.
    """

    method: str
    paths: tuple[str, ...]
    name: str
    tag: str
    summary: str
    about: str
    request: Struct | None = None
    reply: Struct | str | None = None
    event: Any = None
    examples: tuple[tuple[str, dict[str, Any]], ...] = ()
    open: bool = False
    tells_cache: bool = False
    anthropic: bool = False


def routes() -> tuple[Route, ...]:
    """List every route, in the order in which people read of them."""
    return (*_generating(), *_tokens(), *_models(), *_stored(), *_operations())


def _twins(path: str) -> tuple[str, ...]:
    return path, "/inference" + path


def _generating() -> tuple[Route, ...]:
    return (
        Route(
            "post",
            _twins("/v1/chat/completions"),
            "createChatCompletion",
            "Generate",
            "Answer a chat",
            "A conversation in, the assistant's next turn out, whole or as server-sent events.",
            ChatRequest,
            ChatCompletion,
            ChatChunk,
            (
                ("A question", {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}),
                (
                    "A stream",
                    {
                        "messages": [
                            {"role": "system", "content": "Answer in one sentence."},
                            {"role": "user", "content": "Why is the sky blue?"},
                        ],
                        "max_tokens": 64,
                        "temperature": 0,
                        "stream": True,
                        "stream_options": {"include_usage": True},
                    },
                ),
            ),
            tells_cache=True,
        ),
        Route(
            "post",
            _twins("/v1/completions"),
            "createCompletion",
            "Generate",
            "Continue a text",
            "Texts or token ids in, how they go on out. A list of prompts gives a choice for each.",
            CompletionRequest,
            Completion,
            Completion,
            (("A text", {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}),),
            tells_cache=True,
        ),
        Route(
            "post",
            _twins("/v1/responses"),
            "createResponse",
            "Generate",
            "Answer in OpenAI's Responses dialect",
            "Stateless: nothing is stored, so each request brings its whole history in `input`.",
            ResponsesRequest,
            Response,
            StreamEvent,
            (("A question", {"input": "Why is the sky blue?", "max_output_tokens": 64}),),
            tells_cache=True,
        ),
        Route(
            "post",
            _twins("/v1/responses/input_tokens"),
            "countInputTokens",
            "Tokens",
            "Count the tokens of a prompt in the Responses dialect",
            "Takes the body of a response and generates nothing.",
            ResponsesRequest,
            InputTokens,
            examples=(("A question", {"input": "Why is the sky blue?"}),),
        ),
        Route(
            "post",
            _twins("/v1/messages"),
            "createMessage",
            "Generate",
            "Answer in Anthropic's dialect",
            "`input_tokens` counts neither cache reads nor writes, as there.",
            MessagesRequest,
            AnthropicMessage,
            MessageEvent,
            (
                (
                    "A question",
                    {"max_tokens": 64, "messages": [{"role": "user", "content": "Why is the sky blue?"}]},
                ),
            ),
            tells_cache=True,
            anthropic=True,
        ),
        Route(
            "post",
            _twins("/v1/messages/count_tokens"),
            "countMessageTokens",
            "Tokens",
            "Count a message's tokens in Anthropic's dialect",
            "The tokens that the same body, less its options, would run as a prompt.",
            CountTokensRequest,
            MessageTokensCount,
            examples=(("A question", {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}),),
            anthropic=True,
        ),
    )


def _tokens() -> tuple[Route, ...]:
    prefixes = ("", "/v1", "/inference/v1")
    return (
        Route(
            "post",
            tuple(prefix + "/tokenize" for prefix in prefixes),
            "tokenize",
            "Tokens",
            "Count or list a prompt's tokens",
            "The very token ids that a request with this text or chat would run.",
            TokenizeRequest,
            TokenizeReply,
            examples=(
                ("A text", {"prompt": "Hello world", "return_token_strs": True}),
                ("A chat", {"messages": [{"role": "user", "content": "Hello"}]}),
            ),
        ),
        Route(
            "post",
            tuple(prefix + "/detokenize" for prefix in prefixes),
            "detokenize",
            "Tokens",
            "Turn token ids back into text",
            "Control tokens give their spelling.",
            DetokenizeRequest,
            DetokenizeReply,
            examples=(("Three tokens", {"tokens": [1, 2, 3]}),),
        ),
    )


def _models() -> tuple[Route, ...]:
    return (
        Route(
            "get",
            _twins("/v1/models"),
            "listModels",
            "Models",
            "List the served models",
            "Every name that the served model answers to.",
            reply=ModelList,
        ),
        Route(
            "get",
            _twins("/v1/models/{model}"),
            "getModel",
            "Models",
            "Show one model",
            "Names may hold slashes.",
            reply=ModelCard,
        ),
    )


def _stored() -> tuple[Route, ...]:
    about = "Answers 404: nothing is stored. Clients that ask get this in their own error shape."
    found = (
        ("get", "", "getResponse", "Fetch a stored response"),
        ("delete", "", "deleteResponse", "Delete a stored response"),
        ("post", "/cancel", "cancelResponse", "Cancel a response"),
        ("get", "/input_items", "listInputItems", "List a stored response's input"),
    )
    stored = tuple(
        Route(method, _twins("/v1/responses/{id}" + end), name, "Not here", summary, about)
        for method, end, name, summary in found
    )
    words = "Answers 404: histories are shortened by `truncation` only."
    compact = Route(
        "post", _twins("/v1/responses/compact"), "compactResponse", "Not here", "Shorten a history", words
    )
    return (*stored, compact)


def _operations() -> tuple[Route, ...]:
    def of(path: str, name: str, summary: str, about: str, reply: Struct | str, **fields: Any) -> Route:
        paths = (path, "/inference/v1" + path)
        return Route("get", paths, name, "Operations", summary, about, reply=reply, open=True, **fields)

    return (
        of(
            "/health",
            "health",
            "Is the process alive?",
            "200 also while the model loads or the server drains.",
            "application/json",
        ),
        of(
            "/ready",
            "ready",
            "Are requests taken?",
            "503 with Retry-After while the model loads and once the server drains.",
            "application/json",
        ),
        of("/metrics", "metrics", "Prometheus metrics", "Prometheus' text format.", "text/plain"),
        Route(
            "get",
            ("/openapi.json",),
            "openapi",
            "Operations",
            "This document",
            "OpenAPI 3.1, made for the model that is served.",
            reply="application/json",
            open=True,
        ),
        Route(
            "get",
            ("/docs",),
            "docs",
            "Operations",
            "This document for people",
            "One HTML page that needs nothing from elsewhere.",
            reply="text/html",
            open=True,
        ),
    )
