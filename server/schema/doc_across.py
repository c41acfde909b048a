"""Rules across the fields of a request, as JSON Schema: what can't be said of one field alone."""

from __future__ import annotations

from typing import Any

from server.schema.anthropic_parts import MessageTurn
from server.schema.doc_dialects import Struct
from server.schema.messages import Message
from server.schema.requests import ChatRequest, ResponseFormat
from server.schema.responses_api import ResponsesRequest
from server.schema.responses_items import MessageItem
from server.schema.responses_options import TextFormat, ToolChoice
from server.schema.tokens import TokenizeRequest

Json = dict[str, Any]

_NULL: Json = {"type": "null"}
_SET: Json = {"not": _NULL}
_OFF: Json = {"enum": [False, None]}
_SOME: Json = {"type": "array", "minItems": 1}


def rules_of(struct: Struct, fields: set[str]) -> list[Json]:
    """Return the rules of a struct with these fields."""
    common = [rule for names, rule in _COMMON if names <= fields]
    return common + list(_OWN.get(struct, ()))


def _given(**fields: Json) -> Json:
    return {"required": list(fields), "properties": fields}


def _if(given: Json, then: Json) -> Json:
    return {"if": given, "then": then}


def _excludes(field: str, *others: str) -> Json:
    return _if(_given(**{field: _SET}), {"properties": dict.fromkeys(others, _NULL)})


def _content(*kinds: str) -> Json:
    """A turn's content: a text, or parts of these kinds."""
    part = {"properties": {"type": {"enum": list(kinds)}}}
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}


# Wherever a request has all of these fields. Few: who generates requests from a schema multiplies the rules
# out. Pairs of which one alone may be given say so in their descriptions.
_COMMON: tuple[tuple[set[str], Json], ...] = (
    (
        {"stream", "stream_options"},
        _if(_given(stream_options=_SET), _given(stream={"const": True})),
    ),
    ({"thinking", "reasoning_effort"}, _excludes("thinking", "reasoning_effort")),
    (
        {"top_logprobs", "logprobs"},
        _if(
            _given(top_logprobs={"type": "integer", "minimum": 1}),
            _given(logprobs={"const": True}),
        ),
    ),
    (
        {"output_format", "output_config"},
        _if(
            _given(output_format=_SET),
            {"properties": {"output_config": {"properties": {"format": _NULL}}}},
        ),
    ),
)
_NEEDS_TOOLS = _if(_given(tool_choice={"enum": ["required", "any"]}), _given(tools=_SOME))
_OWN: dict[Struct, tuple[Json, ...]] = {
    ResponsesRequest: (_NEEDS_TOOLS,),
    ChatRequest: (
        _NEEDS_TOOLS,
        {
            "properties": {
                name: {"anyOf": [{"type": "integer", "minimum": 1}, _NULL]}
                for name in ("max_tokens", "max_completion_tokens")
            }
        },
    ),
    TokenizeRequest: (
        {"oneOf": [_given(prompt={"type": "string"}), _given(messages={"type": "array"})]},
        _excludes("prompt", "messages", "tools", "chat_template_kwargs"),
        _excludes("prompt", "add_generation_prompt", "continue_final_message"),
        _excludes("messages", "add_special_tokens"),
    ),
    Message: (
        {
            **_if(
                _given(role={"const": "assistant"}),
                {"anyOf": [_given(content=_SET), _given(tool_calls=_SOME), _given(function_call=_SET)]},
            ),
            "else": {
                "required": ["content"],
                "properties": {
                    "content": _SET,
                    "tool_calls": {"enum": [None, []]},
                    "function_call": _NULL,
                    "reasoning_content": {"enum": [None, ""]},
                },
            },
        },
    ),
    ResponseFormat: (
        _if(_given(type={"const": "grammar"}), _given(grammar={"type": "string"})),
        _if(
            _given(type={"const": "json_schema"}),
            {"anyOf": [_given(schema=_SET), _given(json_schema=_given(schema=_SET))]},
        ),
    ),
    MessageItem: (
        {
            **_if(
                _given(role={"const": "assistant"}),
                {"properties": {"content": _content("output_text", "refusal")}},
            ),
            "else": {"properties": {"content": _content("input_text")}},
        },
    ),
    TextFormat: (
        {
            **_if(
                _given(type={"const": "json_schema"}),
                _given(name={"type": "string"}, schema={"type": "object"}),
            ),
            "else": {"properties": {"name": _NULL, "schema": _NULL}},
        },
    ),
    ToolChoice: (
        {
            **_if(
                _given(type={"const": "function"}),
                {"required": ["name"], "properties": {"name": _SET, "mode": _NULL, "tools": _NULL}},
            ),
            "else": {
                "required": ["mode", "tools"],
                "properties": {"name": _NULL, "mode": _SET, "tools": _SOME},
            },
        },
    ),
    MessageTurn: tuple(
        _if(_given(role={"const": role}), {"properties": {"content": _content(*kinds)}})
        for role, kinds in {
            "user": ("text", "tool_result"),
            "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
            "system": ("text",),
        }.items()
    ),
}
