"""The tables behind `doc_rules`: shapes of fields and rules across them, as JSON Schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from server.schema.anthropic import CountTokensRequest, MessagesRequest
from server.schema.anthropic_parts import (
    CustomTool,
    JsonSchemaFormat,
    ThinkingAdaptive,
    ThinkingDisabled,
)
from server.schema.doc_dialects import Struct
from server.schema.messages import FunctionCall, Message, TextPart
from server.schema.prompts import MAX_BIAS, MAX_STOP_IDS
from server.schema.requests import (
    MAX_METADATA,
    MAX_STOPS,
    ChatRequest,
    CompletionRequest,
    JsonSchema,
    ResponseFormat,
    Thinking,
)
from server.schema.responses_api import ResponsesRequest
from server.schema.responses_items import (
    ITEMS,
    CallItem,
    CallOutputItem,
    InputText,
    MessageItem,
    ReasoningItem,
    SaidReasoning,
    SaidRefusal,
    SaidText,
)
from server.schema.responses_options import FunctionTool, Reasoning, TextFormat
from server.schema.tokens import DetokenizeRequest, TokenizeRequest
from server.schema.tools import MAX_TOOLS, NAME, Function, Tool

Json = dict[str, Any]
Ref = Callable[[Struct], Json]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one running server allows. Lengths in tokens, characters or items, as named."""

    models: tuple[str, ...]
    vocab_size: int
    context_length: int
    max_prompt_chars: int
    max_prompts: int
    max_stop_chars: int
    max_key_chars: int
    reasons: bool = False
    keys: bool = False


class Shapes(NamedTuple):
    """Shapes of fields: wherever one of this name stands, in one struct only; and schemas of their own."""

    common: dict[str, Json]
    of: dict[Struct, dict[str, Json]]
    more: Json


def shapes(limits: Limits, ref: Ref) -> Shapes:
    """Collect the shapes. `ref` refers to a struct's schema."""
    chat = _chat(ref)
    if not limits.reasons:
        chat[ChatRequest]["reasoning_effort"] = {"enum": ["none", False, 0]}
    return Shapes(
        _common(limits),
        {
            **({} if limits.reasons else _silent(ref)),
            CompletionRequest: {"prompt": _prompt(limits), "metadata": _METADATA},
            **chat,
            **_responses(ref),
            CustomTool: {"input_schema": _SCHEMA},
            JsonSchemaFormat: {"schema": _SCHEMA},
            DetokenizeRequest: {"tokens": _list(_token(limits), maxItems=limits.max_prompt_chars)},
        },
        {"AnySchema": _ANY_SCHEMA},
    )


def _common(limits: Limits) -> dict[str, Json]:
    key = {"type": "string", "maxLength": limits.max_key_chars}
    stop = {"type": "string", "minLength": 1, "maxLength": limits.max_stop_chars}
    bias = {"type": "number", "minimum": -100, "maximum": 100}
    return {
        "model": {"type": "string", "enum": list(limits.models)},
        "prompt": _text(limits),
        "stop": {"anyOf": [stop, _list(stop, maxItems=MAX_STOPS)]},
        "stop_sequences": _list(stop, maxItems=MAX_STOPS),
        "stop_token_ids": _list(_token(limits), maxItems=MAX_STOP_IDS),
        "logit_bias": {
            "type": "object",
            "maxProperties": MAX_BIAS,
            "propertyNames": {"pattern": f"^{below(limits.vocab_size)}$"},
            "additionalProperties": bias,
        },
        "user": key,
        "prompt_cache_key": key,
        "prompt_cache_isolation_key": key,
        "cache_salt": key,
    }


def _silent(ref: Ref) -> dict[Struct, dict[str, Json]]:
    """A model that does not reason can only be told not to."""
    quiet = {"anyOf": [ref(ThinkingAdaptive), ref(ThinkingDisabled)]}
    return {
        Thinking: {"type": {"const": "disabled"}},
        Reasoning: {"effort": {"const": "none"}},
        MessagesRequest: {"thinking": quiet},
        CountTokensRequest: {"thinking": quiet},
    }


def _chat(ref: Ref) -> dict[Struct, dict[str, Json]]:
    turns = _list(ref(Message), minItems=1)
    functions = _list(ref(Function), maxItems=MAX_TOOLS)
    tools = _list(ref(Tool), maxItems=MAX_TOOLS)
    named = _object({"name": {"type": "string", "pattern": NAME}}, "name")
    one = _object({"type": {"const": "function"}, "function": named}, "type", "function")
    some = _object({"mode": {"enum": ["auto", "required"]}, "tools": _list(one, minItems=1)}, "tools")
    schema = {"anyOf": [_SCHEMA, {"type": "string", "contentMediaType": "application/json"}]}
    return {
        ChatRequest: {
            "messages": turns,
            "metadata": _METADATA,
            "tools": tools,
            "functions": functions,
            "tool_choice": {
                "anyOf": [
                    {"enum": ["none", "auto", "required", "any"]},
                    one,
                    _object(
                        {"type": {"const": "allowed_tools"}, "allowed_tools": some}, "type", "allowed_tools"
                    ),
                ]
            },
            "function_call": {"anyOf": [{"enum": ["none", "auto"]}, named]},
        },
        TokenizeRequest: {"messages": turns, "tools": tools},
        Message: {"content": {"anyOf": [{"type": "string"}, _list(ref(TextPart))]}},
        Tool: {"function": ref(Function)},
        Function: {"parameters": _SCHEMA},
        FunctionCall: {
            "name": {"type": "string", "minLength": 1},
            "arguments": {"anyOf": [{"type": "object"}, _ARGUMENTS]},
        },
        JsonSchema: {"schema": schema},
        ResponseFormat: {"schema": schema, "grammar": {"type": "string", "pattern": "root"}},
    }


def _responses(ref: Ref) -> dict[Struct, dict[str, Json]]:
    items = [ref(item) for item in ITEMS.values()]
    inputs = {"anyOf": [{"type": "string"}, _list(ref(InputText))]}
    return {
        ResponsesRequest: {
            "input": {"anyOf": [{"type": "string"}, _list({"anyOf": items}, minItems=1)]},
        },
        MessageItem: {
            "content": {
                "anyOf": [
                    {"type": "string"},
                    _list({"anyOf": [ref(InputText), ref(SaidText), ref(SaidRefusal)]}),
                ]
            }
        },
        CallItem: {"arguments": _ARGUMENTS},
        CallOutputItem: {"output": inputs},
        ReasoningItem: {"content": _list(ref(SaidReasoning))},
        FunctionTool: {
            "parameters": _SCHEMA,
            "allowed_callers": _list({"const": "direct"}),
        },
        TextFormat: {"schema": _SCHEMA},
    }


def _text(limits: Limits) -> Json:
    return {"type": "string", "minLength": 1, "maxLength": limits.max_prompt_chars}


def _token(limits: Limits) -> Json:
    return {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}


def _prompt(limits: Limits) -> Json:
    tokens = _list(_token(limits), minItems=1, maxItems=limits.context_length - 1)
    several = {"minItems": 1, "maxItems": limits.max_prompts}
    return {"anyOf": [_text(limits), _list(_text(limits), **several), tokens, _list(tokens, **several)]}


def _list(items: Json, **bounds: int) -> Json:
    return {"type": "array", "items": items, **bounds}


def _object(properties: Json, *required: str) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def below(limit: int) -> str:
    """Return a regular expression of the decimal integers from 0 to `limit` - 1, without leading zeros."""
    digits = str(limit)
    choices = ["0"] if limit > 0 else []
    choices += ["[1-9]" + f"[0-9]{{{n}}}" * (n > 0) for n in range(len(digits) - 1)]
    for at, digit in enumerate(digits):
        low = 1 if at == 0 else 0
        if int(digit) > low:
            rest = len(digits) - at - 1
            choices.append(digits[:at] + f"[{low}-{int(digit) - 1}]" + f"[0-9]{{{rest}}}" * (rest > 0))
    return "(" + "|".join(choices) + ")"


_METADATA: Json = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}
# A JSON Schema, as far as grammars take one.
_SCHEMA: Json = {"$ref": "#/components/schemas/AnySchema"}
_ANY_SCHEMA: Json = {
    "type": "object",
    "description": "A JSON Schema; keywords that can't be kept to while generating are refused.",
    "properties": {
        "type": {"enum": ["object", "array", "string", "integer", "number", "boolean", "null"]},
        "description": {"type": "string"},
        "properties": {"type": "object", "additionalProperties": _SCHEMA},
        "required": _list({"type": "string"}),
        "items": _SCHEMA,
        "enum": _list({"type": ["string", "integer", "boolean", "null"]}, minItems=1),
    },
}
_ARGUMENTS: Json = {
    "type": "string",
    "description": "A JSON object as text",
    "contentMediaType": "application/json",
    "pattern": r"^\s*(\{[\s\S]*\})?\s*$",
}
