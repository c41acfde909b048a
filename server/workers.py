"""Worker threads for what would hold the event loop up: reading long requests and writing long replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from engine import Overloaded

P = ParamSpec("P")
R = TypeVar("R")


class Workers:
    """A few threads of our own, so that long requests queue behind each other and not before others.

    At most `most` calls wait or run at once, where that is given.
    """

    def __init__(self, threads: int, name: str = "text", most: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = most
        self._open = 0

    async def run(self, heavy: bool, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call in a worker when `heavy`, else right here. Raises Overloaded where too many wait."""
        if not heavy:
            return call(*args, **kwargs)
        if self._open == self._most:
            raise Overloaded("Too much work of this kind is waiting; try again later")
        loop = asyncio.get_running_loop()
        self._open += 1
        # One whose client has left is counted until it has run.
        done = loop.run_in_executor(self._pool, lambda: call(*args, **kwargs))
        done.add_done_callback(self._close_one)
        return await done

    def _close_one(self, done: asyncio.Future[R]) -> None:
        self._open -= 1

    def close(self) -> None:
        """Let running calls end on their own; forget the queued ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)
