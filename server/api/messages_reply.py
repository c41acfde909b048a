"""How Anthropic's Messages API writes replies and events."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from server.api.dialect import Event, Reply, Update
from server.errors import ErrorObject, anthropic_error
from server.schema.anthropic import MessagesRequest
from server.schema.anthropic_parts import ThinkingAdaptive, ThinkingEnabled
from server.schema.anthropic_replies import (
    AnthropicMessage,
    CacheCreation,
    Content,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)
from server.schema.responses import Usage

if TYPE_CHECKING:
    from engine.text import Part
    from server.api.order import Order
    from server.generate import Ending
    from server.usage import Tally


class MessagesDialect:
    """Replies and events of one request."""

    marks_done = False
    opens_empty = True

    def __init__(self, request: MessagesRequest) -> None:
        self._request = request
        thinking = request.thinking
        omitted = isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) and thinking.display == "omitted"
        self._blocks = Blocks(show_thinking=not omitted)
        self._show_thinking = not omitted
        self._stop: StopDelta | None = None

    def whole(self, order: Order, replies: Sequence[Reply], tally: Tally) -> AnthropicMessage:
        """Write a whole reply."""
        (reply,) = replies
        stop = self._ended(order, reply.finish_reason, reply.stop_text)
        return AnthropicMessage(
            id=order.reply_id,
            model=order.model,
            content=tuple(self._contents(reply)),
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=self._usage(tally.usage),
        )

    def begin(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Open the stream: the message with its id and the prompt's side of the usage."""
        message = AnthropicMessage(
            id=order.reply_id,
            model=order.model,
            content=(),
            stop_reason=None,
            usage=self._usage(tally.usage),
        )
        return [_event(MessageStart(message)), _event(Ping())]

    def update(self, order: Order, update: Update, tally: Tally | None) -> Iterable[Event]:
        """Write what the reply has grown by."""
        for part, call_id in zip(update.parts, update.call_ids, strict=True):
            yield from map(_event, self._blocks.push(part, call_id))
        if update.finish_reason is not None:
            self._stop = self._ended(order, update.finish_reason, update.stop_text)

    def end(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Close the last block and the message."""
        assert self._stop is not None
        yield from map(_event, self._blocks.finish())
        yield _event(MessageDelta(self._stop, self._usage(tally.usage)))
        yield _event(MessageStop())

    def failure(self, order: Order, error: ErrorObject, tally: Tally) -> Event:
        """End a stream that can't go on."""
        return Event(anthropic_error(error), "error")

    def _contents(self, reply: Reply) -> Iterator[Content]:
        said = [part for part in reply.parts if part.kind == "call" or part.text.strip()]
        for part, call_id in zip(reply.parts, reply.call_ids, strict=True):
            if part.kind == "call":
                yield ToolUseContent(tool_use_id(call_id or ""), part.name or "", input_of(part.text))
            elif part.kind == "reasoning" and part.text.strip():
                shown = part.text if self._show_thinking else ""
                yield ThinkingContent(shown, _signature(hashlib.sha256(part.text.encode())))
            # White space around calls and thinking is no text.
            elif part.kind == "content" and (part.text.strip() or not said):
                yield TextContent(part.text)

    def _ended(self, order: Order, finish_reason: Ending, stop_text: str | None) -> StopDelta:
        if stop_text is not None:
            # Also where it cut a call, which then must not be run.
            return StopDelta("stop_sequence", stop_text)
        reason: StopReason = "tool_use" if finish_reason == "tool_calls" else "end_turn"
        if finish_reason == "length":
            room = order.requests[0].params.max_tokens
            reason = "max_tokens" if room >= self._request.max_tokens else "model_context_window_exceeded"
        return StopDelta(reason, None)

    def _usage(self, usage: Usage) -> MessageUsage:
        read = usage.prompt_tokens_details.cached_tokens
        written = usage.prompt_tokens_details.cache_write_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - read - written,
            cache_creation_input_tokens=written,
            cache_read_input_tokens=read,
            cache_creation=CacheCreation(ephemeral_5m_input_tokens=written),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                thinking_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
            service_tier="priority" if self._request.service_tier == "priority" else "standard",
        )


class Blocks:
    """The content blocks of a stream, one open at a time.

    White space alone begins no block, since a model's layout between calls and thinking is no text: it is
    kept back until text follows, and shown at the end only where the reply has nothing else.
    """

    def __init__(self, *, show_thinking: bool) -> None:
        self._show_thinking = show_thinking
        self._index = -1
        self._open: Literal["content", "reasoning", "call"] | None = None
        self._kept = ""
        self._kept_kind: Literal["content", "reasoning", "call"] = "content"
        self._thought = hashlib.sha256()

    def push(self, part: Part, call_id: str | None) -> Iterator[MessageEvent]:
        """Yield the events of one more part."""
        if part.kind == "call":
            if part.name is not None:
                yield from self._begin("call", ToolUseContent(tool_use_id(call_id or ""), part.name, {}))
            if part.text:
                yield ContentBlockDelta(self._index, InputJsonDelta(part.text))
            return
        text = part.text
        if not text:
            return
        if self._open != part.kind:
            text = (self._kept if self._kept_kind == part.kind else "") + text
            if not text.strip():
                self._kept, self._kept_kind = text, part.kind
                return
            yield from self._begin(
                part.kind, TextContent("") if part.kind == "content" else ThinkingContent("")
            )
        if part.kind == "content":
            yield ContentBlockDelta(self._index, TextDelta(text))
        else:
            self._thought.update(text.encode())
            if self._show_thinking:
                yield ContentBlockDelta(self._index, ThinkingDelta(text))

    def finish(self) -> Iterator[MessageEvent]:
        """Yield the events that close the last block."""
        if self._index < 0 and self._kept and self._kept_kind == "content":
            text = self._kept
            yield from self._begin("content", TextContent(""))
            yield ContentBlockDelta(self._index, TextDelta(text))
        yield from self._close()

    def _begin(self, kind: Literal["content", "reasoning", "call"], block: Content) -> Iterator[MessageEvent]:
        yield from self._close()
        self._index += 1
        self._open, self._kept = kind, ""
        yield ContentBlockStart(self._index, block)

    def _close(self) -> Iterator[MessageEvent]:
        if self._open is None:
            return
        if self._open == "reasoning":
            yield ContentBlockDelta(self._index, SignatureDelta(_signature(self._thought)))
            self._thought = hashlib.sha256()
        yield ContentBlockStop(self._index)
        self._open = None


def tool_use_id(call_id: str) -> str:
    """Say a call's id with the prefix that Anthropic's clients know."""
    return "toolu_" + call_id.removeprefix("call_")


def input_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; none where they are no whole JSON object.

    So it is where max_tokens cut the call: half of its arguments might well be run as something else.
    """
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _event(payload: MessageEvent) -> Event:
    return Event(payload, str(payload.__struct_config__.tag))


def _signature(digest: Any) -> str:
    # Clients drop thinking that has no signature, and with it the prompt's prefix.
    return str(digest.hexdigest())
