"""From the engine's streams of tokens to parts of replies: one path for all endpoints and both modes."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from engine import (
    CacheReceipt,
    ConstraintFailed,
    Delta,
    EngineRequest,
    EngineUnavailable,
    HeadwaterError,
    Overloaded,
    StepFailed,
    TokenLogprob,
)
from engine.text import Part, ReplyParser, StopFilter, join_parts
from server.usage import Timing

if TYPE_CHECKING:
    from engine import Engine, RequestStream, TextCodec
    from server.metrics import Metrics

# Pieces that wait for a slow client before its choices wait too.
QUEUED_PIECES = 64

MANY = 16
"""Choices that are set up at one go: more take long enough for others to have their turn meanwhile."""

Ending = Literal["stop", "length", "tool_calls"]


class Rules(NamedTuple):
    """How a choice's tokens become a reply.

    `calls`: what stands where calls do is taken for calls; `several`: not only for the first; `forced`: there
    is nothing else. `reasoning`: it is told apart. `logprobs`: pieces tell them. `echo` is the text in front
    of the reply, `echoed` the number of the prompt's tokens behind it, `offsets` where in it they begin,
    where pieces tell them.
    """

    stops: tuple[str, ...] = ()
    calls: bool = False
    several: bool = True
    forced: bool = False
    reasoning: bool = False
    opened: str = ""
    logprobs: bool = False
    echo: str = ""
    echoed: int = 0
    offsets: tuple[int, ...] = ()


class Entry(NamedTuple):
    """A token of a choice's text. `logprob` is None for a prompt's first token; `offset` is where its text
    begins in the choice's."""

    token_id: int
    logprob: TokenLogprob | None
    offset: int


class Piece(NamedTuple):
    """What one choice adds: parts that may be shown, the tokens behind them, and the end.

    `call_ids` has an id for each part that belongs to a call, None for others.
    """

    choice: Choice
    parts: tuple[Part, ...]
    call_ids: tuple[str | None, ...]
    token_ids: tuple[int, ...]
    entries: tuple[Entry, ...]
    finish_reason: Ending | None

    @property
    def text(self) -> str:
        """What is shown as content."""
        return "".join(part.text for part in self.parts if part.kind == "content")


class Choice:
    """One choice of a reply while it is generated. Only its pump (see Choices) touches it."""

    def __init__(self, index: int, request: EngineRequest, codec: TextCodec, rules: Rules) -> None:
        self.index = index
        self.request = request
        self.receipt: CacheReceipt | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.finish_reason: Ending | None = None
        self._codec = codec
        self._rules = rules
        parsed = rules.calls or rules.reasoning
        shown = codec.reply_markers(tools=rules.calls) if parsed else frozenset()
        self._detokenizer = codec.detokenizer(request.prompt, shown=shown)
        self._filter = StopFilter(rules.stops)
        self._parser: ReplyParser | None = None
        if parsed:
            self._parser = codec.reply_parser(
                tools=rules.calls, reasoning=rules.reasoning, opened=rules.opened
            )
        self._call_ids: list[str] = []
        self._arguments = ""  # of the last call, as far as they have come
        self._offset = len(rules.echo)
        self._thinking = False

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.request.prompt)

    @property
    def echoed_ids(self) -> tuple[int, ...]:
        """The prompt's tokens that stand in front of the reply."""
        return self.request.prompt[self.prompt_tokens - self._rules.echoed :]

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the choice, if one did."""
        return self._filter.found

    def call_ids(self, parts: Iterable[Part]) -> tuple[str | None, ...]:
        """An id for each part that belongs to a call, None for others."""
        return tuple(self._call_id(part.index) if part.kind == "call" else None for part in parts)

    def _call_id(self, index: int) -> str:
        while len(self._call_ids) <= index:
            self._call_ids.append("call_" + uuid.uuid4().hex[:24])
        return self._call_ids[index]

    async def pieces(self, stream: RequestStream) -> AsyncIterator[Piece]:
        """Yield pieces until the choice ends; the last one has a finish reason.

        Raises StepFailed or EngineUnavailable where the engine ended the request.
        """
        begun = False
        async for delta in stream:
            self.receipt = delta.receipt or self.receipt
            if delta.finish_reason in ("error", "abort", "shed"):
                raise _failure(delta)
            if not delta.token_ids and delta.finish_reason is None:
                continue
            entries = [] if begun else self._echoed(delta)
            parts = [Part("content", self._rules.echo)] if self._rules.echo and not begun else []
            begun = True
            taken, stopped = self._take(delta, parts, entries)
            if stopped:
                stream.stop()
                self.finish_reason = "stop"
            elif delta.finish_reason is not None:
                self.finish_reason = "length" if delta.finish_reason == "length" else "stop"
            if self.finish_reason is not None:
                parts += self._rest(cut=stopped)
            yield self._piece(parts, taken, entries)
            if self.finish_reason is not None:
                return
        raise StepFailed("The engine ended the request without a finish reason")

    def _take(self, delta: Delta, parts: list[Part], entries: list[Entry]) -> tuple[tuple[int, ...], bool]:
        # Token by token, so that what counts as generated does not depend on how deltas are cut.
        logprobs = iter(delta.logprobs)
        for taken, token_id in enumerate(delta.token_ids, start=1):
            self.completion_tokens += 1
            logprob = next(logprobs, None)
            if self._rules.logprobs:
                entries.append(Entry(token_id, logprob, self._offset))
            # The token that stops a reply is no more shown than a text that does.
            stops = delta.finish_reason == "stop" and taken == len(delta.token_ids)
            hidden = stops and token_id in self.request.params.stop_token_ids
            text = "" if hidden else self._detokenizer.push((token_id,))
            self._offset += len(text)
            shown, stopped = self._filter.push(text)
            more = self._parse(shown)
            if not self._rules.several and any(map(_further, more)):
                parts += [part for part in more if not _further(part)]
                return delta.token_ids[:taken], True
            parts += more
            if stopped:
                return delta.token_ids[:taken], True
        return delta.token_ids, False

    def _parse(self, text: str) -> list[Part]:
        if self._parser is None:
            return [Part("content", text)] if text else []
        parts = self._parser.push(text) if text else []
        if parts:
            self._thinking = parts[-1].kind == "reasoning"
        self.reasoning_tokens += self._thinking
        return parts

    def _rest(self, *, cut: bool) -> list[Part]:
        """What was held back. Where the reply was cut, nothing that follows the cut."""
        parts: list[Part] = []
        if not cut:
            shown, stopped = self._filter.push(self._detokenizer.flush())
            parts += self._parse(shown if stopped else shown + self._filter.flush())
        if self._parser is not None:
            parts += self._parser.finish()
        return parts if self._rules.several else [part for part in parts if not _further(part)]

    def _piece(self, parts: list[Part], token_ids: tuple[int, ...], entries: list[Entry]) -> Piece:
        if self._rules.forced:
            # What is no call is the beginning of one that was cut.
            parts = [part for part in parts if part.kind != "content" or part.text == self._rules.echo]
        joined = tuple(join_parts(parts))
        call_ids = self.call_ids(joined)
        self._follow_calls(joined)
        if self._call_ids and self.finish_reason == "stop" and not self._cut_call:
            self.finish_reason = "tool_calls"
        return Piece(self, joined, call_ids, token_ids, tuple(entries), self.finish_reason)

    def _follow_calls(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.kind == "call":
                self._arguments = part.text if part.name is not None else self._arguments + part.text

    @property
    def _cut_call(self) -> bool:
        """Whether a stop string ended the reply within a call, which then can't be made."""
        return self.stop_text is not None and not _is_json(self._arguments)

    def _echoed(self, delta: Delta) -> list[Entry]:
        """The prompt's own tokens, where they are shown."""
        # They have none where log-probabilities serve only to tell the best choices.
        if self.request.prompt_logprobs is None:
            return []
        rows = zip(self.echoed_ids, delta.prompt_logprobs, self._rules.offsets, strict=True)
        return [Entry(*row) for row in rows]


class Choices:
    """All choices of one request: submitted together, pumped into one queue, ended together.

    `async with` holds them; on the way out, however that is, whatever still runs is aborted.
    """

    def __init__(self, engine: Engine, choices: Sequence[Choice], timing: Timing, metrics: Metrics) -> None:
        self.choices = tuple(choices)
        self.timing = timing
        self._engine = engine
        self._metrics = metrics
        self._streams: list[RequestStream] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(QUEUED_PIECES)
        self._open = len(self.choices)

    async def __aenter__(self) -> Self:
        try:
            for number, choice in enumerate(self.choices):
                if number and number % MANY == 0:
                    await asyncio.sleep(0)
                self._streams.append(self._engine.submit(choice.request))
        except BaseException:
            self._abort()
            raise
        self._pumps = [
            asyncio.create_task(self._pump(choice, stream), name=f"pump-{choice.request.request_id}")
            for choice, stream in zip(self.choices, self._streams, strict=True)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    @property
    def ended(self) -> bool:
        """Whether every choice's last piece has been handed out."""
        return self._open == 0

    async def next(self, within: float | None = None) -> Piece | None:
        """Return the next piece of any choice, or None after `within` seconds without one.

        Raises what ended a choice early.
        """
        try:
            async with asyncio.timeout(within if self._queue.empty() else None):
                piece = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(piece, Exception):
            raise piece
        if piece.finish_reason is not None:
            self._open -= 1
            if self.ended:
                self.timing.ended = time.monotonic()
        return piece

    async def _pump(self, choice: Choice, stream: RequestStream) -> None:
        last: float | None = None
        try:
            async for piece in choice.pieces(stream):
                now = time.monotonic()
                if self.timing.first_token is None:
                    self.timing.first_token = now
                    self._metrics.first_token(now - self.timing.started)
                elif last is not None and piece.token_ids:
                    self._metrics.tokens(len(piece.token_ids), now - last)
                last = now
                await self._queue.put(piece)
        except Exception as exc:
            await self._queue.put(exc)

    def _abort(self) -> None:
        for choice, stream in zip(self.choices, self._streams, strict=False):
            if choice.finish_reason is None:
                stream.abort()


def offsets_of(codec: TextCodec, ids: Sequence[int], text: str) -> tuple[int, ...]:
    """Where in `text` each of the tokens behind it begins."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    at, found = 0, []
    for token_id in ids:
        found.append(min(at, len(text)))
        spelled = decoder.decode(codec.token_bytes(token_id))
        # A control token that the tokenizer added stands nowhere in what the client wrote.
        if text.startswith(spelled, at) or not codec.is_control(token_id):
            at += len(spelled)
    return tuple(found)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _further(part: Part) -> bool:
    """Whether a part belongs to a call behind the first."""
    return part.kind == "call" and part.index > 0


def _failure(delta: Delta) -> HeadwaterError:
    if delta.finish_reason == "shed":
        return Overloaded("The queue is full, and a request of higher priority took this one's place")
    if delta.finish_reason == "abort":
        return EngineUnavailable("The server stopped before the reply was complete")
    if delta.fault == "constraint":
        return ConstraintFailed(delta.error or "What the reply must be can't be followed any further")
    return StepFailed(delta.error or "The step that ran this request failed")
