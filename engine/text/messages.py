"""Brings chat messages into the one form that templates are written for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.errors import RequestError

# Templates write roles into their markers, so a role is never free text.
ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class Arguments(dict[str, Any]):
    """The arguments of a call, with the JSON text that they were `written` as."""

    def __init__(self, value: dict[str, Any], written: str) -> None:
        super().__init__(value)
        self.written = written


def normalise(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return new messages: content a string, tool arguments a dict, no empty tool_calls.

    A result need not name a call that is there: clients cut their histories. Raises RequestError naming the
    field at fault.
    """
    if not messages:
        raise RequestError("messages must hold at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}", param=where)
    found = {key: value for key, value in message.items() if value is not None}
    found["content"] = _content(message.get("content"), f"{where}.content")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(found.get(key, ""), str):
            raise RequestError(f"{where}.{key} must be a string", param=f"{where}.{key}")
    calls = found.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise RequestError(f"{where}: only the assistant calls tools", param=f"{where}.tool_calls")
        found["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    return found


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts", param=where)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise RequestError(f"{where}: this model takes text only, not a part of type {kind!r}", param=where)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}.{_TEXT_PARTS[kind]} must be a string", param=where)
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", param=where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{where} must hold a function with a name", param=where)
    if not isinstance(call.get("id"), str | None):
        raise RequestError(f"{where}.id must be a string, not {call['id']!r}", param=f"{where}.id")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = _read(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is not valid JSON: {error}", param=where) from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} must be a JSON object", param=where)
    return arguments


def _read(written: str) -> Any:
    """Decode JSON; an object comes with its text, unless that says more than the object holds."""
    pairs = keys = 0

    def count(found: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal pairs, keys
        made = dict(found)
        pairs, keys = pairs + len(found), keys + len(made)
        return made

    value = json.loads(written, object_pairs_hook=count)
    return Arguments(value, written.strip()) if isinstance(value, dict) and pairs == keys else value
