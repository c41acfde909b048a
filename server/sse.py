"""Server-sent events to one client, at the pace at which it reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from server.encoding import encode, encode_long

log = logging.getLogger("headwater.server")

# Line ends to sloppy parsers of event streams (and to str.splitlines), so they are always escaped.
_ESCAPES = tuple((char.encode(), rb"\u%04x" % ord(char)) for char in ("\u0085", "\u2028", "\u2029"))


class ClientGone(ConnectionError):
    """The client left, or stopped reading for too long and was dropped."""


def encode_event(payload: Any, name: str | None = None, *, long: bool = False) -> bytes:
    """Write one JSON value as one `data:` line and the empty line that ends the event.

    `name` is of its kind, if it has one. `long`: see encoding.encode_long.
    """
    data = encode_long(payload) if long else encode(payload)
    if not data.isascii():
        for raw, escaped in _ESCAPES:
            data = data.replace(raw, escaped)
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


class EventWriter:
    """Writes events, waiting whenever the client's buffer is full.

    The buffer is bounded (see protocol.py); a client that takes nothing for `write_timeout` seconds is
    cut off, which raises ClientGone.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str], *, write_timeout: float) -> None:
        self._request = request
        self._timeout = write_timeout
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )

    async def start(self) -> None:
        """Send the status line and the headers."""
        async with self._limit():
            await self._response.prepare(self._request)

    async def send(self, event: bytes) -> None:
        """Send one event, as `encode_event` writes it."""
        await self._write(event)

    async def comment(self, text: str) -> None:
        """Send a comment, which clients skip: it keeps the connection alive."""
        await self._write(b": " + text.encode() + b"\n\n")

    async def done(self) -> None:
        """Send the dialect's end mark."""
        await self._write(b"data: [DONE]\n\n")

    async def close(self) -> web.StreamResponse:
        """End the response and return it."""
        async with self._limit():
            await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> None:
        async with self._limit():
            await self._response.write(data)
            # write() itself waits only once in 64 kB.
            await self._request.writer.drain()

    @asynccontextmanager
    async def _limit(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            log.warning("dropped %s: it read nothing for %g s", self._request.remote, self._timeout)
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone("the client stopped reading") from None
