"""The dialects that the server speaks, for the documents: which struct is which body, and what it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from server.schema import (
    anthropic,
    anthropic_parts,
    messages,
    neutral,
    requests,
    responses_items,
    responses_options,
    tokens,
    tools,
)
from server.schema.anthropic import CountTokensRequest, MessagesRequest
from server.schema.requests import ChatRequest, CompletionRequest
from server.schema.responses_api import ResponsesRequest

Struct = type[msgspec.Struct]
Values = Mapping[str, tuple[Any, ...]]
_NOTHING: Values = MappingProxyType({})


class Body(NamedTuple):
    """A request's body.

    `absent` are fields that are not served, each with the values that ask for nothing; `ignored` are taken
    whatever they hold. `parts` are the structs that its lists of objects hold, by where they stand: the types
    of the struct don't say it.
    """

    path: str
    struct: Struct
    absent: Values = _NOTHING
    ignored: frozenset[str] = frozenset()
    words: Mapping[str, str] = MappingProxyType({})
    parts: tuple[tuple[str, Struct], ...] = ()


_TURNS: tuple[tuple[str, Struct], ...] = (
    ("messages[]", messages.Message),
    ("messages[].content[]", messages.TextPart),
)
_TOOLS: tuple[tuple[str, Struct], ...] = (("tools[]", tools.Tool), ("tools[].function", tools.Function))

BODIES = (
    Body(
        "/v1/chat/completions",
        ChatRequest,
        neutral.CHAT_FIELDS,
        neutral.TOLERATED,
        neutral.WORDS,
        (*_TURNS, *_TOOLS),
    ),
    Body("/v1/completions", CompletionRequest, neutral.COMPLETION_FIELDS, neutral.TOLERATED, neutral.WORDS),
    Body(
        "/v1/responses",
        ResponsesRequest,
        parts=(
            *((f"input[] of type {kind}", item) for kind, item in responses_items.ITEMS.items()),
            ("input[].content[] of type input_text", responses_items.InputText),
            ("input[].content[] of type output_text", responses_items.SaidText),
            ("input[].content[] of type refusal", responses_items.SaidRefusal),
            ("input[].content[] of type reasoning_text", responses_items.SaidReasoning),
            ("tools[]", responses_options.FunctionTool),
        ),
    ),
    Body("/v1/messages", MessagesRequest, anthropic.ABSENT),
    Body("/v1/messages/count_tokens", CountTokensRequest, anthropic.ABSENT),
    Body("/tokenize", tokens.TokenizeRequest, parts=(*_TURNS, *_TOOLS)),
    Body("/detokenize", tokens.DetokenizeRequest),
)
# Structs inside of typed fields, which have rules of their own.
INNER: tuple[Struct, ...] = (
    messages.ToolCall,
    messages.FunctionCall,
    requests.JsonSchema,
    requests.ResponseFormat,
    responses_options.TextFormat,
    responses_options.ToolChoice,
    anthropic_parts.CustomTool,
    anthropic_parts.JsonSchemaFormat,
    anthropic_parts.MessageTurn,
    anthropic_parts.ToolUseBlock,
)
# Fields of a message that are not served.
ABSENT_OF_PARTS: dict[Struct, Values] = {messages.Message: neutral.MESSAGE}
