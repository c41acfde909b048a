"""Tools for models whose chat template knows none, in the Hermes convention.

Tools stand in the system message between <tools> tags; a call is JSON between <tool_call> tags, a result
stands between <tool_response> tags in a user message.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from engine.text.messages import Arguments

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_BLOCK = """\
# Tools

You can call functions to help with the request. Their signatures are this JSON list:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between tool_call tags, one pair \
of tags for each call:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>"""


def describe_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the tools described at the end of the system message, made if missing.

    The description is the same whatever the choice of tools: it stands at the beginning of the prompt, and
    wording that changes with the request would keep the cache from all that follows. That a call is
    required, or which, is for the grammar of the reply to enforce.
    """
    block = _BLOCK.format(tools=_json(tools))
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": block}, *messages]
    content = messages[0]["content"]
    return [{**messages[0], "content": f"{content}\n\n{block}" if content else block}, *messages[1:]]


def spell_out_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with tool calls and tool results written as text.

    Neighbouring results become one user message, since many templates want user and assistant in turn.
    """
    found: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if after_result:
                found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{text}"}
            else:
                found.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            texts = [message["content"], *calls] if message["content"] else calls
            found.append({**rest, "content": "\n".join(texts)})
        else:
            found.append(message)
        after_result = is_result
    return found


def merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a leading system message put in front of the first user message."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return messages
    content = f"{messages[0]['content']}\n\n{messages[1]['content']}"
    return [{**messages[1], "content": content}, *messages[2:]]


def shorten_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with ids of calls that are nine letters and digits, as some templates demand.

    Equal ids stay equal, from turn to turn too; a missing one is made from its place.
    """
    return [_with_short_ids(message, i) for i, message in enumerate(messages)]


def _with_short_ids(message: dict[str, Any], place: int) -> dict[str, Any]:
    found = dict(message)
    if message["role"] == "tool":
        found["tool_call_id"] = _short_id(message.get("tool_call_id") or f"{place}")
    if "tool_calls" in message:
        found["tool_calls"] = [
            {**call, "id": _short_id(call.get("id") or f"{place}.{i}")}
            for i, call in enumerate(message["tool_calls"])
        ]
    return found


def _short_id(given: str) -> str:
    if _SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


def _call(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    # As the model wrote them, so that the cache knows the reply again.
    written = arguments.written if isinstance(arguments, Arguments) else _json(arguments)
    return f'<tool_call>\n{{"name": {_json(function["name"])}, "arguments": {written}}}\n</tool_call>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
