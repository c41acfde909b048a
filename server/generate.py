"""From the engine's streams of tokens to pieces of text: one path for both endpoints and both modes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from engine import CacheReceipt, Delta, EngineRequest, EngineUnavailable, StepFailed
from engine.text import StopFilter
from server.schema.responses import FinishReason
from server.usage import Timing

if TYPE_CHECKING:
    from engine import Engine, RequestStream, TextCodec
    from server.metrics import Metrics

# Pieces that wait for a slow client before its choices wait too.
QUEUED_PIECES = 64


class Piece(NamedTuple):
    """What one choice adds: text that may be shown, the tokens behind it, and the end."""

    choice: Choice
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class Choice:
    """One choice of a reply while it is generated. Only its pump (see Choices) touches it."""

    def __init__(self, index: int, request: EngineRequest, codec: TextCodec, stops: Sequence[str]) -> None:
        self.index = index
        self.request = request
        self.receipt: CacheReceipt | None = None
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = codec.detokenizer(request.prompt)
        self._filter = StopFilter(stops)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.request.prompt)

    async def pieces(self, stream: RequestStream) -> AsyncIterator[Piece]:
        """Yield pieces until the choice ends; the last one has a finish reason.

        Raises StepFailed or EngineUnavailable where the engine ended the request.
        """
        async for delta in stream:
            self.receipt = delta.receipt or self.receipt
            if delta.finish_reason in ("error", "abort"):
                raise _failure(delta)
            if not delta.token_ids and delta.finish_reason is None:
                continue
            text, taken, stopped = self._take(delta.token_ids)
            if stopped:
                stream.stop()
                self.finish_reason = "stop"
            elif delta.finish_reason is not None:
                text += self._rest()
                self.finish_reason = "length" if delta.finish_reason == "length" else "stop"
            yield Piece(self, text, taken, self.finish_reason)
            if self.finish_reason is not None:
                return
        raise StepFailed("The engine ended the request without a finish reason")

    def _take(self, token_ids: tuple[int, ...]) -> tuple[str, tuple[int, ...], bool]:
        # Token by token, so that what counts as generated does not depend on how deltas are cut.
        text = ""
        for taken, token_id in enumerate(token_ids, start=1):
            self.completion_tokens += 1
            shown, stopped = self._filter.push(self._detokenizer.push((token_id,)))
            text += shown
            if stopped:
                return text, token_ids[:taken], True
        return text, token_ids, False

    def _rest(self) -> str:
        shown, stopped = self._filter.push(self._detokenizer.flush())
        return shown if stopped else shown + self._filter.flush()


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
            for choice in self.choices:
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


def _failure(delta: Delta) -> StepFailed | EngineUnavailable:
    if delta.finish_reason == "abort":
        return EngineUnavailable("The server stopped before the reply was complete")
    return StepFailed(delta.error or "The step that ran this request failed")
