"""From a body of Anthropic's Messages API to the chat that it asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from engine import RequestError
from server.schema.anthropic import Conversation, MessagesRequest
from server.schema.anthropic_parts import (
    Block,
    MessageTurn,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoiceAny,
    ToolChoiceAuto,
    ToolChoiceNone,
    ToolChoiceTool,
    ToolResultBlock,
    ToolUseBlock,
)
from server.schema.requests import ChatRequest, JsonSchema, ResponseFormat, Thinking

# What the model reads before the result of a tool that failed.
ERROR_MARK = "Error: "
# Characters up to which a user's name is taken as it is.
SHORT_USER = 64


def to_chat(request: MessagesRequest) -> ChatRequest:
    """Say a request in the form that chats have. Raises RequestError."""
    return ChatRequest(
        **_conversation(request),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or None,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        service_tier="priority" if request.service_tier == "priority" else None,
        user=_user_name(request),
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_isolation_key=request.prompt_cache_isolation_key,
        prompt_cache_max_len=request.prompt_cache_max_len,
    )


def to_prompt(request: Conversation) -> ChatRequest:
    """Say a request's prompt alone in the form that chats have. Raises RequestError."""
    return ChatRequest(**_conversation(request))


def _user_name(request: MessagesRequest) -> str | None:
    if request.user is not None or request.metadata is None or request.metadata.user_id is None:
        return request.user
    # Only a hint: a long one need not be refused for its length.
    user_id = request.metadata.user_id
    return user_id if len(user_id) <= SHORT_USER else hashlib.sha256(user_id.encode()).hexdigest()


def _conversation(request: Conversation) -> dict[str, Any]:
    continued = request.messages[-1].role == "assistant"
    if continued and any(isinstance(block, ToolUseBlock) for block in _blocks(request.messages[-1])):
        raise RequestError(
            "'messages' end with a call of a tool: give its result as a tool_result block in a user's turn",
            param="messages",
        )
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": _turns(request),
        "continue_final_message": True if continued else None,
        "response_format": _response_format(request),
    }
    return fields | _tools(request) | _thinking(request)


def _turns(request: Conversation) -> list[dict[str, Any]]:
    system = joined(request.system) if request.system else ""
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for role, group in groupby(request.messages, key=lambda turn: turn.role):
        blocks = [block for turn in group for block in _blocks(turn)]
        if role == "assistant":
            found.append(_assistant(blocks))
        elif role == "user":
            found += _user(blocks)
        else:
            found.append({"role": "system", "content": joined(_texts(blocks))})
    return found


def _blocks(turn: MessageTurn) -> Sequence[Block]:
    return [TextBlock(text=turn.content)] if isinstance(turn.content, str) else turn.content


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    # Put together without any seam: the blocks of one reply, as the model wrote it.
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
    }
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if reasoning:
        turn["reasoning_content"] = reasoning
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call(block: ToolUseBlock) -> dict[str, Any]:
    try:
        arguments = json.dumps(block.input, ensure_ascii=False)
    except RecursionError:
        raise RequestError("'messages' holds an 'input' nested too deeply", param="messages") from None
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for is_result, group in groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            found += [_result(block) for block in group if isinstance(block, ToolResultBlock)]
        else:
            found.append({"role": "user", "content": joined(_texts(group))})
    return found or [{"role": "user", "content": ""}]


def _result(block: ToolResultBlock) -> dict[str, Any]:
    content = joined(block.content or "")
    if block.is_error:
        content = ERROR_MARK + content
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _texts(blocks: Iterable[Block]) -> list[TextBlock]:
    return [block for block in blocks if isinstance(block, TextBlock)]


def joined(content: str | Sequence[TextBlock]) -> str:
    """Put blocks of text together, on a new line each where nothing else would keep them apart."""
    if isinstance(content, str):
        return content
    pieces: list[str] = []
    for block in content:
        if not block.text:
            continue
        if pieces and not pieces[-1][-1].isspace() and not block.text[0].isspace():
            pieces.append("\n")
        pieces.append(block.text)
    return "".join(pieces)


def _tools(request: Conversation) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    **({"description": tool.description} if tool.description else {}),
                    "parameters": {"type": "object"} | tool.input_schema,
                    **({"strict": True} if tool.strict else {}),
                },
            }
            for tool in request.tools
        ]
        fields["tool_choice"] = _tool_choice(request)
    choice = request.tool_choice
    if (
        isinstance(choice, ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool)
        and choice.disable_parallel_tool_use
    ):
        fields["parallel_tool_calls"] = False
    return fields


def _tool_choice(request: Conversation) -> str | dict[str, Any]:
    choice = request.tool_choice
    if isinstance(choice, ToolChoiceTool):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, ToolChoiceAny):
        return "required"
    return "none" if isinstance(choice, ToolChoiceNone) else "auto"


def _thinking(request: Conversation) -> dict[str, Any]:
    # A chat takes one of the two; a degree of effort says more than that there is to be any.
    thinking = request.thinking
    if isinstance(thinking, ThinkingDisabled):
        return {"thinking": Thinking(type="disabled")}
    if request.output_config is not None and request.output_config.effort is not None:
        return {"reasoning_effort": request.output_config.effort}
    if thinking is None:
        return {}
    return {"thinking": Thinking(type="enabled" if isinstance(thinking, ThinkingEnabled) else "adaptive")}


def _response_format(request: Conversation) -> ResponseFormat | None:
    wanted = request.output_config.format if request.output_config is not None else None
    if isinstance(request, MessagesRequest):
        wanted = wanted or request.output_format
    if wanted is None:
        return None
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchema(name="output", schema=wanted.schema, strict=True)
    )
