"""What a caller of `Engine.submit` holds: the deltas of one request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from engine.types import CacheReceipt, Delta, EngineRequest, FinishReason

log = logging.getLogger("headwater.request")


class RequestStream:
    """Async iterator of deltas; the one with a finish reason is the last.

    A reader that is slow holds nothing back: what waits here is token ids, as many as max_tokens at most.
    Used with `async with`, leaving the block early aborts the request.
    """

    def __init__(self, request: EngineRequest, stop: Callable[[FinishReason], None]) -> None:
        self.request = request
        self.receipt: CacheReceipt | None = None
        self.finish_reason: FinishReason | None = None
        self._stop = stop
        self._deltas: deque[Delta] = deque()
        self._ready = asyncio.Event()
        self._submitted = time.monotonic()
        self._first_token: float | None = None
        self._generated = 0

    def abort(self) -> None:
        """The client is gone: stop within a step. Calling it again, or after the end, does nothing."""
        if self.finish_reason is None:
            self._stop("abort")

    def stop(self) -> None:
        """A stop string was found: end with "stop" within a step."""
        if self.finish_reason is None:
            self._stop("stop")

    def rebind(self, stop: Callable[[FinishReason], None]) -> None:
        """The request was queued anew: this ends it from now on."""
        self._stop = stop

    def push(self, delta: Delta) -> None:
        """Take a delta from the engine."""
        if delta.receipt is not None:
            self.receipt = delta.receipt
        if delta.token_ids and self._first_token is None:
            self._first_token = time.monotonic()
        self._generated += len(delta.token_ids)
        self._deltas.append(delta)
        self._ready.set()
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self._log(delta)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._deltas.popleft()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _log(self, delta: Delta) -> None:
        """One line a request."""
        now = time.monotonic()
        receipt = self.receipt
        log.info(
            "request %s prompt=%d cached=%d computed=%d generated=%d ttft_ms=%s total_ms=%.0f finish=%s%s",
            self.request.request_id,
            len(self.request.prompt),
            receipt.cached_tokens if receipt else 0,
            delta.prompt_rows,
            self._generated,
            "-" if self._first_token is None else f"{(self._first_token - self._submitted) * 1e3:.0f}",
            (now - self._submitted) * 1e3,
            delta.finish_reason,
            f" error={delta.error!r}" if delta.error else "",
        )
