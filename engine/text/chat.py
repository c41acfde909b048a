"""From chat messages to prompt text, with users' spellings of control tokens hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import RequestError
from engine.text.guard import Guard, Placeholders, characters
from engine.text.messages import normalise
from engine.text.template import ChatTemplate, TemplateError
from engine.text.tools import describe_tools, merge_system, shorten_ids, spell_out_calls

Messages = list[dict[str, Any]]


class Rendered(NamedTuple):
    """Prompt text; `hidden`, where not None, holds the texts behind its placeholders."""

    text: str
    hidden: Placeholders | None


class ChatRenderer:
    """Renders conversations with one model's template. Safe in several threads at once."""

    def __init__(self, template: ChatTemplate, guard: Guard) -> None:
        self._template = template
        self._guard = guard

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return the prompt text. With `continue_final_message` it ends with the last message's content.

        `extra` are variables for the template. Raises RequestError, or TemplateError from the template.
        """
        try:
            return self._render(
                messages, tools, add_generation_prompt, continue_final_message, dict(extra or {})
            )
        except RecursionError:
            raise RequestError("messages or tools are nested too deeply", param="messages") from None

    def end_of_turn(self, tokens: Mapping[str, int]) -> int | None:
        """The id of the token that the template writes after an assistant's reply, if it writes one."""
        reply = "probe"
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}]
        try:
            text = self._template.render(messages, None, add_generation_prompt=False)
        except TemplateError:
            return None
        after = text.rpartition(reply)[2].lstrip()
        found = max((token for token in tokens if after.startswith(token)), key=len, default=None)
        return None if found is None else tokens[found]

    def _render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: dict[str, Any],
    ) -> Rendered:
        if reserved := sorted(self._template.reserved & extra.keys()):
            raise RequestError(f"{reserved[0]!r} belongs to the chat template", param="chat_template_kwargs")
        conversation = normalise(messages)
        if continue_final_message and not _continues(conversation):
            raise RequestError(
                "the message to continue must be the assistant's, with content and without tool_calls",
                param="messages",
            )
        conversation, described = self._shape(conversation, _tools(tools))
        hidden: Placeholders | None = None
        users = [conversation, described, extra]
        if continue_final_message or self._guard.needs_hiding(users):
            hidden = Placeholders(characters(*users))
            if self._guard.needs_hiding(users):
                conversation, described, extra = self._guard.hide(users, hidden)
        end = ""
        if continue_final_message:
            assert hidden is not None
            end = hidden.put("")
            conversation[-1] = {**conversation[-1], "content": conversation[-1]["content"] + end}
        text = self._template.render(
            conversation,
            described,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            extra=extra,
        )
        if end:
            if end not in text:
                raise TemplateError("the chat template does not show the final message", param="messages")
            text = text[: text.rindex(end)]
        return Rendered(text, hidden)

    def _shape(self, conversation: Messages, tools: Messages | None) -> tuple[Messages, Messages | None]:
        """Fit a conversation to what the template can show; return it with the tools left to show."""
        template = self._template
        if not template.takes_developer:
            conversation = [{**m, "role": "system"} if m["role"] == "developer" else m for m in conversation]
        if not template.takes_tools:
            conversation = spell_out_calls(conversation)
            conversation = describe_tools(conversation, tools) if tools else conversation
            tools = None
        elif not template.takes_any_id:
            conversation = shorten_ids(conversation)
        if template.wants_null_content:
            conversation = [
                {**m, "content": m["content"] or None} if "tool_calls" in m else m for m in conversation
            ]
        return (conversation if template.takes_system else merge_system(conversation)), tools


def _tools(tools: Sequence[Any] | None) -> Messages | None:
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise RequestError(f"tools[{i}] must be an object", param="tools")
    return list(tools) if tools else None


def _continues(conversation: Messages) -> bool:
    last = conversation[-1]
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
