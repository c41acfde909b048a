"""Replies and events of chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType

from engine.text import Part
from server.api.completions import closing
from server.api.dialect import Call, Event, Reply, Update
from server.api.order import Order
from server.errors import ErrorObject
from server.schema.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ErrorEvent,
    FinishReason,
    FunctionText,
    ToolCall,
    ToolCallDelta,
)
from server.usage import Tally


class ChatDialect:
    """Writes one chat's reply."""

    marks_done = True
    opens_empty = True

    def whole(self, order: Order, replies: Sequence[Reply], tally: Tally) -> ChatCompletion:
        """Write a whole reply."""
        first = replies[0]
        return ChatCompletion(
            id=order.reply_id,
            created=order.created,
            model=order.model,
            system_fingerprint=order.fingerprint,
            choices=tuple(_choice(order, one) for one in replies),
            usage=tally.usage,
            service_tier=_unset(order.service_tier),
            perf_metrics=tally.perf if order.perf_metrics else UNSET,
            prompt_token_ids=UNSET if first.prompt_ids is None else first.prompt_ids,
        )

    def begin(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Nothing comes before the first piece."""
        return ()

    def update(self, order: Order, update: Update, tally: Tally | None) -> Iterable[Event]:
        """Write a piece, in as many events as it has parts of different kinds."""
        usage, perf = closing(order, tally)
        deltas = _deltas(order, update)
        for place, delta in enumerate(deltas):
            # What belongs to the piece as a whole goes with its first event.
            head = update if place == 0 else Update(update.choice, (), (), None, first=False)
            last = place == len(deltas) - 1
            yield Event(
                ChatChunk(
                    id=order.reply_id,
                    created=order.created,
                    model=order.model,
                    system_fingerprint=order.fingerprint,
                    choices=(_chunk_choice(order, head, delta, update if last else None),),
                    usage=usage,
                    service_tier=_unset(order.service_tier),
                    perf_metrics=UNSET if perf is None else perf,
                    prompt_token_ids=UNSET if head.prompt_ids is None else head.prompt_ids,
                )
            )

    def end(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Write usage by itself where it was asked for."""
        if not order.include_usage:
            return ()
        chunk = ChatChunk(
            id=order.reply_id,
            created=order.created,
            model=order.model,
            system_fingerprint=order.fingerprint,
            choices=(),
            usage=tally.usage,
            service_tier=_unset(order.service_tier),
        )
        return (Event(chunk),)

    def failure(self, order: Order, error: ErrorObject, tally: Tally) -> Event:
        """Write what ends a stream that can't go on."""
        return Event(ErrorEvent(error, tally.usage))


def _choice(order: Order, one: Reply) -> ChatChoice:
    return ChatChoice(
        index=one.choice,
        message=_message(order, one),
        logprobs=one.logprobs,
        finish_reason=_reason(order, one.finish_reason),
        token_ids=UNSET if one.token_ids is None else one.token_ids,
        raw_output=UNSET if one.raw is None else one.raw,
    )


def _message(order: Order, one: Reply) -> ChatMessage:
    reasoning: str | UnsetType = one.reasoning or UNSET
    # Beside calls an empty text is no text; by itself it is one.
    content = None if one.calls and not one.content else one.content
    if not one.calls:
        return ChatMessage(content=content, reasoning_content=reasoning)
    if order.legacy_calls:
        call = one.calls[0]
        return ChatMessage(
            content=content,
            reasoning_content=reasoning,
            function_call=FunctionText(name=call.name, arguments=call.arguments),
        )
    return ChatMessage(content=content, reasoning_content=reasoning, tool_calls=tuple(map(_call, one.calls)))


def _call(call: Call) -> ToolCall:
    return ToolCall(id=call.id, function=FunctionText(name=call.name, arguments=call.arguments))


def _deltas(order: Order, update: Update) -> list[ChatDelta]:
    """One delta a part; a choice's first carries the role, and the end's is empty."""
    found = [
        _delta(order, part, call_id) for part, call_id in zip(update.parts, update.call_ids, strict=True)
    ]
    if update.first:
        opening = found[0] if found else ChatDelta(content="" if update.finish_reason is None else UNSET)
        found[:1] = [_with_role(opening)]
    return found or [ChatDelta()]


def _with_role(delta: ChatDelta) -> ChatDelta:
    return ChatDelta(
        role="assistant",
        content=delta.content,
        reasoning_content=delta.reasoning_content,
        tool_calls=delta.tool_calls,
        function_call=delta.function_call,
    )


def _delta(order: Order, part: Part, call_id: str | None) -> ChatDelta:
    if part.kind == "content":
        return ChatDelta(content=part.text)
    if part.kind == "reasoning":
        return ChatDelta(reasoning_content=part.text)
    begins = part.name is not None
    function = FunctionText(name=UNSET if part.name is None else part.name, arguments=part.text)
    if order.legacy_calls:
        return ChatDelta(function_call=function)
    return ChatDelta(
        tool_calls=(
            ToolCallDelta(
                index=part.index,
                id=call_id if begins and call_id is not None else UNSET,
                type="function" if begins else UNSET,
                function=function,
            ),
        )
    )


def _chunk_choice(order: Order, head: Update, delta: ChatDelta, ending: Update | None) -> ChatChunkChoice:
    reason = None if ending is None else ending.finish_reason
    raw = None if ending is None else ending.raw
    return ChatChunkChoice(
        index=head.choice,
        delta=delta,
        logprobs=head.logprobs,
        finish_reason=None if reason is None else _reason(order, reason),
        token_ids=UNSET if head.token_ids is None else head.token_ids,
        raw_output=UNSET if raw is None else raw,
    )


def _reason(order: Order, reason: FinishReason) -> FinishReason:
    return "function_call" if order.legacy_calls and reason == "tool_calls" else reason


def _unset(value: str | None) -> str | UnsetType:
    return UNSET if value is None else value
