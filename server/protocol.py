"""aiohttp's connection handling, with our error shape, our buffers and our time limits."""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from server.config import ServerConfig
from server.errors import INVALID, REQUEST_ID, SERVER, ApiError, request_id_from, to_api_error
from server.schema.strict import SHOWN_CHARS

log = logging.getLogger("headwater.server")

_QUOTED = re.compile(r"""(bytearray\()?\bb['"]""")


class ApiProtocol(RequestHandler):
    """One client's connection."""

    __slots__ = ("_silence", "_silent", "_write_buffer")

    def __init__(self, manager: web.Server, *, write_buffer: int, silence: float, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._write_buffer = write_buffer
        self._silence = silence
        self._silent: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound what is held for this client, and the time it may take for its first request's head."""
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.set_write_buffer_limits(high=self._write_buffer)
        # aiohttp limits the wait between requests, but not the wait for the first.
        self._silent = self._loop.call_later(self._silence, self._close_if_silent)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the client."""
        if self._silent is not None:
            self._silent.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what never became a request (a broken or huge head) in the same shape as the rest."""
        if isinstance(exc, ConnectionError):
            # The client is gone, or has part of an answer already: the connection ends, and that is all.
            raise exc
        if status < 500:
            log.debug("bad request from %s: %s", request.remote, message)
        else:
            log.error("failed to answer %s", request.remote, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("part of another answer is sent already")
        detail = _detail(message) if message and status < 500 else HTTPStatus(status).phrase
        error = ApiError(status, detail, kind=INVALID if status < 500 else SERVER, code="bad_http")
        response = error.response()
        response.headers["x-request-id"] = request_id_from(None)
        response.force_close()
        return response

    def _close_if_silent(self) -> None:
        if self._request_count == 0 and self.transport is not None:
            self.transport.close()


def _detail(message: str) -> str:
    # The parser's first line, without the bytes of the request that it quotes as Python writes them.
    what = _QUOTED.split("".join(message.splitlines()[:1]), maxsplit=1)[0].strip(" :")
    return f"The request is not valid HTTP: {what[:SHOWN_CHARS]}"


def _refusing(handler: Handler, retry_after: int) -> Handler:
    # An Expect header that aiohttp doesn't know is refused before any middleware runs.
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPExpectationFailed as exc:
            request[REQUEST_ID] = request_id_from(request.headers.get("x-request-id"))
            return to_api_error(exc, retry_after=retry_after).response(request.path, request[REQUEST_ID])

    return handle


class ApiServer(web.Server):
    """Makes an ApiProtocol for each connection."""

    def __init__(self, *args: Any, write_buffer: int, silence: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write_buffer = write_buffer
        self._silence = silence

    def __call__(self) -> RequestHandler:
        """Make the protocol of one connection."""
        return ApiProtocol(
            self,
            write_buffer=self._write_buffer,
            silence=self._silence,
            loop=self._loop,
            **self._kwargs,
        )


class ApiRunner(web.AppRunner):
    """Runs an application on ApiServer; handlers are cancelled when their client leaves."""

    def __init__(self, app: web.Application, config: ServerConfig) -> None:
        super().__init__(
            app,
            handler_cancellation=True,
            access_log=None,
            # Compressed bodies are refused, so nothing may inflate before that.
            auto_decompress=False,
            keepalive_timeout=config.keepalive_timeout,
            shutdown_timeout=config.close_timeout,
        )
        self._config = config

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return ApiServer(
            _refusing(plain.request_handler, self._config.retry_after),
            request_factory=plain.request_factory,
            handler_cancellation=plain.handler_cancellation,
            loop=asyncio.get_running_loop(),
            write_buffer=self._config.write_buffer_kb * 1000,
            silence=self._config.keepalive_timeout,
            **plain._kwargs,
        )


def make_runner(app: web.Application, config: ServerConfig) -> web.AppRunner:
    """Make the runner of an application: `await runner.setup()`, then add sites."""
    return ApiRunner(app, config)
