"""How OpenAI's Responses API writes replies and the events of streams."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from server.api.dialect import Event, Reply, Update
from server.api.responses_items import Item, Kind, entries_of, tokens_of
from server.errors import INVALID, ErrorObject
from server.schema.responses_api import PRIORITY, ResponsesRequest
from server.schema.responses_reply import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    Response,
    ResponseError,
    ResponseUsage,
    StreamEvent,
)

if TYPE_CHECKING:
    from server.api.order import Order
    from server.schema.responses import TokenLogprobs, Usage
    from server.usage import Tally

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsesDialect:
    """Replies and events of one request."""

    marks_done = False
    opens_empty = True

    def __init__(self, request: ResponsesRequest) -> None:
        self._echo = _echo(request)
        self._sequence = 0
        self._items: list[Item] = []
        self._open: Item | None = None
        self._call: int | None = None
        self._blank: tuple[Kind, str] = ("content", "")
        self._untold: list[TokenLogprobs] = []
        self._status: Status = "in_progress"

    def whole(self, order: Order, replies: Sequence[Reply], tally: Tally) -> Response:
        """Write a whole reply."""
        (reply,) = replies
        # A whole reply is a stream of one piece whose events nobody hears.
        for _ in self.update(
            order,
            Update(
                choice=reply.choice,
                parts=reply.parts,
                call_ids=reply.call_ids,
                finish_reason=reply.finish_reason,
                first=True,
                logprobs=reply.logprobs,
            ),
            tally,
        ):
            pass
        return self._response(order, tally.usage)

    def begin(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Open the stream with the response as it is before its first item."""
        response = self._response(order)
        return [
            self._event(StreamEvent(type=kind, response=response))
            for kind in ("response.created", "response.in_progress")
        ]

    def update(self, order: Order, update: Update, tally: Tally | None) -> Iterator[Event]:
        """Write what the reply has grown by."""
        self._untold += entries_of(update.logprobs)
        for part, call_id in zip(update.parts, update.call_ids, strict=True):
            if part.kind != "call":
                yield from self._push_text(order, part.kind, part.text)
                continue
            if part.index != self._call:
                self._call = part.index
                yield from self._begin(self._add(order, "call", name=part.name or "", call_id=call_id or ""))
            yield from self._tell(part.text)
        if update.finish_reason is not None:
            self._status = "incomplete" if update.finish_reason == "length" else "completed"
            if not self._items:
                yield from self._begin(self._add(order, "content"))
                yield from self._tell(self._blank[1])
            yield from self._close()

    def end(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Close the stream with the whole response."""
        response = self._response(order, tally.usage)
        return [self._event(StreamEvent(type=f"response.{self._status}", response=response))]

    def failure(self, order: Order, error: ErrorObject, tally: Tally) -> Event:
        """End a stream that can't go on."""
        self._status = "failed"
        if self._open is not None:
            self._open.status = "incomplete"
        code = "invalid_prompt" if error.type == INVALID else "server_error"
        response = self._response(order, tally.usage, ResponseError(code, error.message))
        return self._event(StreamEvent(type="response.failed", response=response))

    def _push_text(self, order: Order, kind: Kind, text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            # White space around calls and reasoning is no text: it waits for more, and is dropped without.
            waiting = self._blank[1] if self._blank[0] == kind else ""
            self._blank = (kind, waiting + text)
            if not self._blank[1].strip():
                return
            text = self._blank[1]
            yield from self._begin(self._add(order, kind))
        yield from self._tell(text)

    def _add(self, order: Order, kind: Kind, *, name: str = "", call_id: str = "") -> Item:
        item = Item(kind, order.reply_id, len(self._items), name=name, call_id=call_id)
        self._items.append(item)
        return item

    def _begin(self, item: Item) -> Iterator[Event]:
        yield from self._close()
        self._open, self._blank = item, ("content", "")
        yield from map(self._event, item.opening())

    def _tell(self, text: str) -> Iterator[Event]:
        assert self._open is not None
        tokens, taken = tokens_of(text, self._untold)
        del self._untold[:taken]
        if text:
            yield self._event(self._open.delta(text, tokens))

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            self._open.status = "incomplete" if self._status == "incomplete" else "completed"
            yield from map(self._event, self._open.closing())
        self._open = None

    def _event(self, event: StreamEvent) -> Event:
        numbered = msgspec.structs.replace(event, sequence_number=self._sequence)
        self._sequence += 1
        return Event(numbered, numbered.type)

    def _response(
        self, order: Order, usage: Usage | None = None, error: ResponseError | None = None
    ) -> Response:
        params = order.requests[0].params
        return Response(
            id=order.reply_id,
            created_at=order.created,
            completed_at=int(time.time()) if self._status == "completed" else None,
            status=self._status,
            error=error,
            incomplete_details=IncompleteDetails() if self._status == "incomplete" else None,
            model=order.model,
            output=tuple(item.written() for item in self._items),
            usage=None if usage is None else _usage(usage),
            temperature=params.temperature,
            top_p=params.top_p,
            system_fingerprint=order.fingerprint,
            **self._echo,
        )


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.prompt_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(details.cached_tokens, details.cache_write_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request, as it took effect."""
    text, reasoning, choice = request.text, request.reasoning, request.tool_choice
    wanted = text.format if text is not None and text.format is not None else None
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "top_logprobs": request.top_logprobs or 0,
        "tools": tuple(
            {
                "type": tool.type,
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in request.tools or ()
        ),
        "tool_choice": "auto" if choice is None else _given(choice),
        "text": {
            "format": {"type": "text"} if wanted is None else _given(wanted),
            "verbosity": (text.verbosity if text is not None else None) or "medium",
        },
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "truncation": request.truncation or "disabled",
        "service_tier": "priority" if request.service_tier in PRIORITY else "default",
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
    }


def _given(value: Any) -> Any:
    """The fields of a struct that hold something, as plain data."""
    if not isinstance(value, msgspec.Struct):
        return value
    found = msgspec.to_builtins(value)
    return {name: field for name, field in found.items() if field is not None}
