"""The replies of Anthropic's Messages API, and the events of its streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
Count = Annotated[int, Meta(ge=0)]


class TextContent(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text of a reply."""

    text: Annotated[str, Meta(description="The text")]
    citations: Annotated[None, Meta(description="Always null")] = None


class ThinkingContent(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning of a reply."""

    thinking: Annotated[str, Meta(description="The reasoning; empty where its display is omitted")]
    signature: Annotated[
        str, Meta(description="Opaque: clients send it back with the block, and nothing checks it")
    ] = ""


class ToolUseContent(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of one of the client's tools."""

    id: Annotated[str, Meta(description="The call's id, to which the result is to refer")]
    name: Annotated[str, Meta(description="The tool's name")]
    input: Annotated[
        dict[str, Any],
        Meta(description="The arguments; empty where the model did not write a whole JSON object"),
    ]


Content = TextContent | ThinkingContent | ToolUseContent


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens newly stored, by the time they are to stay. Here all stay as long as they are used."""

    ephemeral_5m_input_tokens: Annotated[int, Meta(ge=0, description="All tokens newly stored")]
    ephemeral_1h_input_tokens: Annotated[int, Meta(ge=0, description="Always 0")] = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the generated tokens were spent on."""

    thinking_tokens: Annotated[int, Meta(ge=0, description="Of the output tokens, those of reasoning")]


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request. The prompt has input_tokens and both kinds of cache tokens together."""

    input_tokens: Annotated[
        int, Meta(ge=0, description="Tokens of the prompt neither read from the cache nor newly stored in it")
    ]
    cache_creation_input_tokens: Annotated[int, Meta(ge=0, description="Tokens newly stored in the cache")]
    cache_read_input_tokens: Annotated[int, Meta(ge=0, description="Tokens read from the cache")]
    cache_creation: Annotated[CacheCreation, Meta(description="The tokens newly stored, by time to live")]
    output_tokens: Annotated[int, Meta(ge=0, description="Tokens generated, the end mark included")]
    output_tokens_details: Annotated[OutputTokensDetails, Meta(description="What they were spent on")]
    service_tier: Annotated[
        Literal["standard", "priority"], Meta(description="The tier that the request was served in")
    ]


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Reply of POST /v1/messages."""

    id: Annotated[str, Meta(description="The reply's id")]
    role: Annotated[Literal["assistant"], Meta(description="Always assistant")] = "assistant"
    model: Annotated[str, Meta(description="The model's name as requested")]
    content: Annotated[tuple[Content, ...], Meta(description="Thinking, text and calls of tools")]
    stop_reason: Annotated[
        StopReason | None, Meta(description="Why the reply ended; null at a stream's start")
    ]
    stop_sequence: Annotated[str | None, Meta(description="Which of stop_sequences ended the reply")] = None
    usage: Annotated[MessageUsage, Meta(description="Tokens of the request")]


class MessageTokensCount(msgspec.Struct, frozen=True):
    """Reply of POST /v1/messages/count_tokens."""

    input_tokens: Annotated[int, Meta(ge=0, description="Tokens of the prompt as a request would run it")]


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    """A stream's first event: the message without content."""

    message: AnthropicMessage


class ContentBlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: Count
    content_block: Content


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block, just before it ends."""

    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of a call's arguments, as JSON text."""

    partial_json: str


class ContentBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """A block goes on."""

    index: Count
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: Count


class StopDelta(msgspec.Struct, frozen=True):
    """How the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """After the last block: how the message ended, and its whole usage."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The stream's last event."""


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """Nothing but a sign of life."""


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
)
