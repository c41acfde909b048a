"""Tools for models whose chat template knows none, in the Hermes convention.

Tools stand in the system message between <tools> tags; a call is JSON between <tool_call> tags, a result
stands between <tool_response> tags in a user message.
"""

from __future__ import annotations

import json
from typing import Any

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
    """Return the messages with the tools described at the end of the system message, made if missing."""
    block = _BLOCK.format(tools=json.dumps(tools, ensure_ascii=False))
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


def _call(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
