"""The engine behind the endpoints: absent while it loads, refusing while it drains, gone once failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from engine import EngineUnavailable

if TYPE_CHECKING:
    from engine import Engine, TextCodec

Phase = Literal["loading", "serving", "draining", "failed"]

# A normalizer may shorten a text before it is cut into tokens, though not by much.
SLACK = 4

_REFUSALS: dict[Phase, str] = {
    "loading": "The model is still loading",
    "draining": "The server is shutting down",
    "failed": "The engine has failed",
}


class Backend:
    """Who answers, and whether it may. One object, owned by the application, changed by the lifecycle.

    A text of more than `max_prompt_bytes` has more tokens than the context, however it is cut into them:
    that is known without the long work of cutting it.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.codec: TextCodec | None = None
        self.phase: Phase = "loading"
        self.loaded_at = 0
        self.max_prompt_bytes = 0
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, engine: Engine, codec: TextCodec) -> None:
        """Begin to serve a loaded engine."""
        self.engine, self.codec = engine, codec
        self.phase = "serving"
        self.loaded_at = int(time.time())
        longest = max(len(codec.token_bytes(token_id)) for token_id in range(codec.vocab_size))
        self.max_prompt_bytes = SLACK * longest * engine.info.context_length

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be taken."""
        return self.phase == "serving" and self.engine is not None and self.engine.ready

    @property
    def open(self) -> int:
        """Number of requests that are being answered."""
        return self._open

    def require(self) -> tuple[Engine, TextCodec]:
        """Return engine and codec, or raise EngineUnavailable saying why there are none now."""
        if self.phase in _REFUSALS:
            raise EngineUnavailable(_REFUSALS[self.phase])
        assert self.engine is not None
        assert self.codec is not None
        if not self.engine.ready:
            raise EngineUnavailable("The engine takes no requests now")
        return self.engine, self.codec

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request from here to its last byte, so that a shutdown can wait for it."""
        self._open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if self._open == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()
