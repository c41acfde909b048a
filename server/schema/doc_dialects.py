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

    `absent` are fields that are not served, each with the values that ask for nothing, `refused` those of
    the struct that this path does not serve; `ignored` are taken whatever they hold. `words` says why.
    `parts` are the structs that its lists of objects hold, by where they stand: no type says it.
    """

    path: str
    struct: Struct
    absent: Values = _NOTHING
    ignored: frozenset[str] = frozenset()
    words: Mapping[str, str] = MappingProxyType({})
    parts: tuple[tuple[str, Struct], ...] = ()
    refused: Values = _NOTHING


_TURNS: tuple[tuple[str, Struct], ...] = (
    ("messages[]", messages.Message),
    ("messages[].content[]", messages.TextPart),
)
_TOOLS: tuple[tuple[str, Struct], ...] = (("tools[]", tools.Tool), ("tools[].function", tools.Function))
# Why fields do nothing or are refused, where the code has no words of its own for it.
WORDS: Mapping[str, str] = {
    "audio": "This model gives text only",
    "billing_policy": "Nobody is billed",
    "compaction": "Nothing is compacted",
    "container": "This server runs no tools",
    "context_management": "Nothing is dropped from a conversation",
    "fallback_credit_token": "Nobody is billed",
    "fallbacks": "There is one model",
    "include_routing_matrix": "Models here route nothing between experts",
    "inference_geo": "There is one place",
    "mcp_servers": "This server calls no others",
    "moderation": "There is no moderation model",
    "prompt_cache_options": "Every prompt is cached, to the token",
    "prompt_cache_retention": "Prompts are kept as long as there is room",
    "prompt_token_ids": "A list of ids is a 'prompt' of completions",
    "raw_output": "Not in this dialect",
    "refusal": "Nothing is refused by the model",
    "annotations": "Nothing is annotated",
    "safety_identifier": "Users are not watched",
    "sampling_mask": "Give 'logit_bias'",
    "speed": "There is one speed",
    "store": "Nothing is stored",
    "thread": "Nothing is stored: send the whole conversation",
    "verbosity": "Models served here know no such control",
    **neutral.WORDS,
}
UNSAID = "Not supported"
_FOR_CHATS: Mapping[str, str] = dict.fromkeys(
    (
        *("reasoning_effort", "thinking", "messages", "tools", "tool_choice", "parallel_tool_calls"),
        *("functions", "function_call", "prompt_truncate_len", "safe_tokenization"),
    ),
    "For chats: a completions prompt is read as it is given",
)

BODIES = (
    Body(
        "/v1/chat/completions",
        ChatRequest,
        neutral.CHAT_FIELDS,
        neutral.TOLERATED,
        WORDS,
        (*_TURNS, *_TOOLS),
    ),
    Body(
        "/v1/completions",
        CompletionRequest,
        neutral.COMPLETION_FIELDS,
        neutral.TOLERATED,
        {**WORDS, **_FOR_CHATS},
        refused={"reasoning_effort": ("none", False), "thinking": ({"type": "disabled"},)},
    ),
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
    Body("/v1/messages", MessagesRequest, anthropic.ABSENT, words=WORDS),
    Body("/v1/messages/count_tokens", CountTokensRequest, anthropic.ABSENT, words=WORDS),
    Body("/tokenize", tokens.TokenizeRequest, parts=(*_TURNS, *_TOOLS)),
    Body("/detokenize", tokens.DetokenizeRequest),
)
# Structs inside of typed fields, which have rules of their own.
INNER: tuple[Struct, ...] = (
    messages.ToolCall,
    messages.FunctionCall,
    requests.JsonSchema,
    requests.ResponseFormat,
    requests.Thinking,
    responses_options.TextFormat,
    responses_options.Reasoning,
    responses_options.ToolChoice,
    anthropic_parts.CustomTool,
    anthropic_parts.JsonSchemaFormat,
    anthropic_parts.MessageTurn,
    anthropic_parts.ToolUseBlock,
    anthropic_parts.ThinkingAdaptive,
    anthropic_parts.ThinkingDisabled,
)
# Fields of a message that are not served.
ABSENT_OF_PARTS: dict[Struct, Values] = {messages.Message: neutral.MESSAGE}
