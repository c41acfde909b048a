"""The output items of a response while they grow, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from server.schema.responses import ContentLogprobs, Logprobs, TokenLogprobs
from server.schema.responses_items import Status
from server.schema.responses_reply import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseLogprob,
    ResponseTopLogprob,
    StreamEvent,
)

Kind = Literal["content", "reasoning", "call"]
_PREFIXES: dict[Kind, str] = {"content": "msg", "reasoning": "rs", "call": "fc"}


class Item:
    """One item: a message, a piece of reasoning or a call. `index` is its place in the output.

    Its events have no number yet: the stream counts them.
    """

    def __init__(self, kind: Kind, reply_id: str, index: int, *, name: str = "", call_id: str = "") -> None:
        self.kind = kind
        self.index = index
        self.status: Status = "in_progress"
        self._id = f"{_PREFIXES[kind]}_{reply_id.removeprefix('resp_')}_{index}"
        self._name, self._call_id = name, call_id
        self._pieces: list[str] = []
        self._logprobs: list[ResponseLogprob] = []

    def add(self, text: str, logprobs: Sequence[ResponseLogprob] = ()) -> None:
        """Add text, and the tokens that it is made of."""
        self._pieces.append(text)
        self._logprobs.extend(logprobs)

    def written(self) -> OutputItem:
        """Write the item as it is now. One in progress is only announced: its text is still to come."""
        status, begun = self.status, self.status != "in_progress"
        text = "".join(self._pieces)
        if self.kind == "call":
            return OutputCall(
                id=self._id,
                status=status,
                call_id=self._call_id,
                name=self._name,
                arguments=text if begun else "",
            )
        if self.kind == "reasoning":
            content = (ReasoningText(text=text),) if begun else ()
            return OutputReasoning(id=self._id, status=status, content=content)
        return OutputMessage(id=self._id, status=status, content=(self._part(),) if begun else ())

    def opening(self) -> Iterator[StreamEvent]:
        """Tell that the item begins."""
        yield StreamEvent(type="response.output_item.added", output_index=self.index, item=self.written())
        if self.kind == "call":
            return
        empty = OutputText(text="") if self.kind == "content" else ReasoningText(text="")
        yield StreamEvent(
            type="response.content_part.added",
            item_id=self._id,
            output_index=self.index,
            content_index=0,
            part=empty,
        )

    def delta(self, text: str, logprobs: Sequence[ResponseLogprob] = ()) -> StreamEvent:
        """Add text and tell it."""
        self.add(text, logprobs)
        if self.kind == "call":
            return StreamEvent(
                type="response.function_call_arguments.delta",
                item_id=self._id,
                output_index=self.index,
                delta=text,
            )
        if self.kind == "reasoning":
            return StreamEvent(
                type="response.reasoning_text.delta",
                item_id=self._id,
                output_index=self.index,
                content_index=0,
                delta=text,
            )
        return StreamEvent(
            type="response.output_text.delta",
            item_id=self._id,
            output_index=self.index,
            content_index=0,
            delta=text,
            logprobs=tuple(logprobs),
        )

    def closing(self) -> Iterator[StreamEvent]:
        """Tell the whole item once more, now that it has ended."""
        text = "".join(self._pieces)
        if self.kind == "call":
            yield StreamEvent(
                type="response.function_call_arguments.done",
                item_id=self._id,
                output_index=self.index,
                name=self._name,
                arguments=text,
            )
        else:
            yield from self._closing_part(text)
        yield StreamEvent(type="response.output_item.done", output_index=self.index, item=self.written())

    def _closing_part(self, text: str) -> Iterator[StreamEvent]:
        if self.kind == "reasoning":
            yield StreamEvent(
                type="response.reasoning_text.done",
                item_id=self._id,
                output_index=self.index,
                content_index=0,
                text=text,
            )
        else:
            yield StreamEvent(
                type="response.output_text.done",
                item_id=self._id,
                output_index=self.index,
                content_index=0,
                text=text,
                logprobs=tuple(self._logprobs),
            )
        yield StreamEvent(
            type="response.content_part.done",
            item_id=self._id,
            output_index=self.index,
            content_index=0,
            part=ReasoningText(text=text) if self.kind == "reasoning" else self._part(),
        )

    def _part(self) -> OutputText:
        return OutputText(text="".join(self._pieces), logprobs=tuple(self._logprobs))


def entries_of(logprobs: Logprobs | None) -> tuple[TokenLogprobs, ...]:
    """The tokens that a reply or an update tells, or none."""
    return logprobs.content if isinstance(logprobs, ContentLogprobs) else ()


def tokens_of(
    text: str, entries: Sequence[TokenLogprobs], *, behind: str = ""
) -> tuple[list[ResponseLogprob], int]:
    """Find the tokens that a text is made of, and how many of `entries` they and those before them are.

    The entries tell all tokens of a reply, those of reasoning, calls and the marks around them, too; a
    message tells its own. `behind` is a text that comes before. Where the text isn't found (a byte that
    is no UTF-8 is shown in another way) all entries are taken.
    """
    spelled = [bytes(entry.bytes or ()) for entry in entries]
    if not entries:
        return [], 0
    joined = b"".join(spelled)
    wanted = text.encode()
    before = joined.find(behind.encode())
    start = joined.find(wanted, before + len(behind.encode()) if before >= 0 else 0)
    if start < 0:
        return [_logprob(entry) for entry in entries], len(entries)
    found, end, taken = [], 0, 0
    for count, (entry, its_bytes) in enumerate(zip(entries, spelled, strict=True), start=1):
        begin, end = end, end + len(its_bytes)
        if begin < start + len(wanted) and end > start:
            found.append(_logprob(entry))
            taken = count
    return found, taken


def _logprob(entry: TokenLogprobs) -> ResponseLogprob:
    return ResponseLogprob(
        token=entry.token,
        bytes=entry.bytes or (),
        # A reply's own tokens all have one; only a prompt's first has none.
        logprob=entry.logprob or 0.0,
        top_logprobs=tuple(
            ResponseTopLogprob(token=top.token, bytes=top.bytes or (), logprob=top.logprob)
            for top in entry.top_logprobs
        ),
    )
