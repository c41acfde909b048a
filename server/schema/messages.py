"""The turns of a chat, checked and brought to the form that chat templates take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine import RequestError
from server.schema import neutral, strict


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an earlier reply called."""

    name: str
    arguments: Annotated[
        str | dict[str, Any] | None, Meta(description="A JSON object, as text or as it is")
    ] = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of an earlier reply."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: Annotated[
        str | None, Meta(description="Given to the model's chat template, which may not show it")
    ] = None
    reasoning_content: Annotated[str | None, Meta(description="What the assistant thought")] = None
    tool_calls: Annotated[list[ToolCall] | None, Meta(description="What the assistant called")] = None
    tool_call_id: Annotated[str | None, Meta(description="For role tool: the call that this answers")] = None
    function_call: Annotated[FunctionCall | None, Meta(description="Older form of tool_calls")] = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a turn whose content is a list."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Annotated[
        Any, Meta(description="Accepted and ignored: every prefix is cached, to the token")
    ] = None


def read_messages(messages: list[dict[str, Any]], *, history: str | None = None) -> list[dict[str, Any]]:
    """Check a chat's turns and bring them to the form that chat templates take.

    `history` "disabled" leaves out what earlier turns thought. Raises RequestError naming turn and field.
    """
    if not messages:
        raise RequestError("'messages' must hold at least one message", param="messages")
    turns = [_read_message(f"messages.{i}.", fields) for i, fields in enumerate(messages)]
    if history == "disabled":
        for turn in turns:
            turn.pop("reasoning_content", None)
    return turns


def _read_message(at: str, fields: dict[str, Any]) -> dict[str, Any]:
    message = strict.convert(neutral.take_neutral(fields, neutral.MESSAGE, at=at), Message, at=at)
    calls = _calls(message)
    if message.content is None and not calls:
        raise RequestError(f"'{at}content' is required", param=at + "content")
    for name in ("tool_calls", "function_call", "reasoning_content"):
        if getattr(message, name) and message.role != "assistant":
            raise RequestError(f"'{at}{name}' is for messages of the assistant", param=at + name)
    content = message.content
    if isinstance(content, list):
        content = "".join(_read_part(f"{at}content.{i}.", part) for i, part in enumerate(content))
    turn: dict[str, Any] = {"role": _role(message), "content": content or ""}
    if message.name is not None:
        turn["name"] = message.name
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if calls:
        turn["tool_calls"] = calls
    return turn


def _role(message: Message) -> str:
    # Newer and older names of roles that every template knows by one.
    return {"developer": "system", "function": "tool"}.get(message.role, message.role)


def _calls(message: Message) -> list[dict[str, Any]]:
    calls = list(message.tool_calls or ())
    if message.function_call is not None:
        calls.append(ToolCall(function=message.function_call))
    return [
        {
            **({} if call.id is None else {"id": call.id}),
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in calls
    ]


def _read_part(at: str, fields: Any) -> str:
    if not isinstance(fields, dict):
        raise RequestError(f"'{at[:-1]}' must be an object; given: {strict.shown(fields)}", param=at[:-1])
    kind = fields.get("type")
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise RequestError(
            f"'{at}type' {strict.shown(kind)} is not supported by this server: it reads text only",
            param=at + "type",
        )
    if kind == "refusal":
        fields = {"type": "text", "text": fields.get("refusal")}
    return strict.convert(fields, TextPart, at=at).text
