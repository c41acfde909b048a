"""Worker threads for what would hold the event loop up: reading long requests and writing long replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Workers:
    """A few threads of our own, so that long requests queue behind each other and not before others."""

    def __init__(self, threads: int, name: str = "text") -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, heavy: bool, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call in a worker when `heavy`, else right here."""
        if not heavy:
            return call(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """Let running calls end on their own; forget the queued ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)
