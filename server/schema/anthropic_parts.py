"""What bodies of Anthropic's Messages API are made of: turns, blocks, tools and options.

None is the same as absent everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Closed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct that refuses unknown names when it is converted from JSON."""


class CacheControl(Closed, frozen=True, kw_only=True):
    """A client's mark of where a prefix ends."""

    type: Annotated[Literal["ephemeral"], Meta(description="The only kind there is")]
    ttl: Annotated[
        Literal["5m", "1h"] | None,
        Meta(description="Accepted and ignored: how long entries stay depends on the use of the cache"),
    ] = None


CacheMark = Annotated[
    CacheControl | None,
    Meta(description="Accepted and ignored: every prompt is cached to its last token without a mark"),
]


class TextBlock(Closed, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of a turn, of the system prompt or of a tool's result."""

    text: Annotated[str, Meta(description="The text")]
    cache_control: CacheMark = None
    citations: Annotated[
        list[dict[str, Any]] | None, Meta(description="Accepted and ignored: the text alone is read")
    ] = None


class ToolUseBlock(Closed, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """An assistant's call of a tool, in the history."""

    id: Annotated[str, Meta(min_length=1, description="The call's id, to which its result refers")]
    name: Annotated[str, Meta(min_length=1, description="The tool's name")]
    input: Annotated[dict[str, Any], Meta(description="The arguments")]
    cache_control: CacheMark = None
    caller: Annotated[
        dict[str, Any] | None, Meta(description="Accepted and ignored: the model is the only caller")
    ] = None
    toolset_name: Annotated[None, Meta(description="Only null: there are no toolsets")] = None


class ToolResultBlock(Closed, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    """What a tool gave, in a user's turn after the call."""

    tool_use_id: Annotated[str, Meta(description="The id of the call in an earlier assistant's turn")]
    content: Annotated[
        str | list[TextBlock] | None, Meta(description="The result, as a text or as text blocks")
    ] = None
    is_error: Annotated[
        bool | None, Meta(description="Whether the tool failed: the model is shown 'Error: ' and the content")
    ] = None
    cache_control: CacheMark = None
    toolset_name: Annotated[None, Meta(description="Only null: there are no toolsets")] = None


class ThinkingBlock(Closed, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """An assistant's reasoning, in the history."""

    thinking: Annotated[str, Meta(description="The reasoning; the model's template decides if it is shown")]
    signature: Annotated[str | None, Meta(description="Accepted and ignored: a signature is not checked")] = (
        None
    )
    cache_control: CacheMark = None


class RedactedThinkingBlock(
    Closed,
    frozen=True,
    kw_only=True,
    tag_field="type",
    tag="redacted_thinking",
):
    """Reasoning that another server has encrypted."""

    data: Annotated[str, Meta(description="Accepted and ignored: this server can't read it")]
    cache_control: CacheMark = None


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class MessageTurn(Closed, frozen=True, kw_only=True):
    """One turn of a conversation. Neighbours of one role count as one turn."""

    role: Annotated[
        Literal["user", "assistant", "system"],
        Meta(description="Who speaks; a last turn of the assistant is gone on with"),
    ]
    content: Annotated[
        str | list[Block],
        Meta(
            description="A text or blocks: text in every turn, tool results in a user's, thinking and calls "
            "of tools in an assistant's"
        ),
    ]


class CustomTool(Closed, frozen=True, kw_only=True):
    """A tool that the client runs."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", description="The name that the model calls")]
    input_schema: Annotated[
        dict[str, Any], Meta(description="JSON schema of the arguments, which are an object")
    ]
    description: Annotated[str | None, Meta(description="What the tool does, for the model to read")] = None
    type: Annotated[Literal["custom"] | None, Meta(description="The only kind there is")] = None
    strict: Annotated[
        bool | None,
        Meta(description="Accepted and ignored: calls are held to the schema where tool_choice requires one"),
    ] = None
    cache_control: CacheMark = None
    allowed_callers: Annotated[
        list[str] | None, Meta(description="Accepted and ignored: the model is the only caller")
    ] = None
    defer_loading: Annotated[
        Literal[False] | None, Meta(description="Only false: every tool is part of the prompt")
    ] = None
    eager_input_streaming: Annotated[
        bool | None, Meta(description="Accepted and ignored: arguments are always streamed as they come")
    ] = None
    input_examples: Annotated[
        list[dict[str, Any]] | None, Meta(description="Accepted and ignored: put examples in 'description'")
    ] = None


Parallel = Annotated[bool | None, Meta(description="Whether one call at most may be made; false by default")]


class ToolChoiceAuto(Closed, frozen=True, kw_only=True, tag_field="type", tag="auto"):
    """The model decides; the default where there are tools."""

    disable_parallel_tool_use: Parallel = None


class ToolChoiceAny(Closed, frozen=True, kw_only=True, tag_field="type", tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: Parallel = None


class ToolChoiceTool(Closed, frozen=True, kw_only=True, tag_field="type", tag="tool"):
    """The model must call this tool."""

    name: Annotated[str, Meta(description="The name of one of 'tools'")]
    disable_parallel_tool_use: Parallel = None


class ToolChoiceNone(Closed, frozen=True, kw_only=True, tag_field="type", tag="none"):
    """The model must call none."""


Display = Annotated[
    Literal["summarized", "omitted"] | None,
    Meta(description="omitted: thinking blocks come without their text; else it is shown as it is"),
]


class ThinkingEnabled(Closed, frozen=True, kw_only=True, tag_field="type", tag="enabled"):
    """The model is to think; refused where it can't."""

    budget_tokens: Annotated[
        int, Meta(ge=1, description="Accepted and ignored: 'max_tokens' alone bounds thinking and reply")
    ]
    display: Display = None


class ThinkingAdaptive(Closed, frozen=True, kw_only=True, tag_field="type", tag="adaptive"):
    """The model is to think as much as it likes, if it can."""

    display: Display = None


class ThinkingDisabled(Closed, frozen=True, kw_only=True, tag_field="type", tag="disabled"):
    """The model is not to think, where its template can tell it so."""


class JsonSchemaFormat(Closed, frozen=True, kw_only=True):
    """Binds the reply to a JSON schema."""

    type: Annotated[Literal["json_schema"], Meta(description="The only kind there is")]
    schema: Annotated[dict[str, Any], Meta(description="The schema that the reply's text holds to")]


class OutputConfig(Closed, frozen=True, kw_only=True):
    """What the reply is to be like."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Meta(description="How much the model is to think, where its template knows degrees of it"),
    ] = None
    format: Annotated[JsonSchemaFormat | None, Meta(description="A JSON schema for the reply's text")] = None


class MessagesMetadata(Closed, frozen=True, kw_only=True):
    """About the request."""

    user_id: Annotated[
        str | None, Meta(description="Opaque name of the user; an affinity hint where 'user' is absent")
    ] = None
