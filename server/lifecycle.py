"""A server's life: bind, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from aiohttp import web

from engine import Engine, EngineConfig, EngineInfo, HeadwaterError, TextCodec
from engine.models.store import resolve
from server.app import build_app
from server.backend import Backend
from server.config import ServerConfig
from server.protocol import make_runner
from server.tenancy.access import KEYS

log = logging.getLogger("headwater.server")

BACKLOG = 1024
_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class End(NamedTuple):
    """How a server ended: the process's exit code, and the reason where it is a failure."""

    code: int
    reason: str | None = None


async def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal or a failure ends it; return the exit code.

    The first SIGINT or SIGTERM drains, the second cancels; SIGHUP reads the API keys again. While the model
    is loading the first ends the start with 128 + its number: threads may then still run, and their work is
    nothing to wait for. Raises ConfigError, ModelError, and OSError when it can't listen; all but ModelError
    and what only the model shows are found out before anything listens.
    """
    Engine.judge(engine_config)
    set_up_logging(server_config.log_level)
    backend = Backend()
    app = build_app(backend, server_config)
    sockets = bind(server_config.host, server_config.port)
    runner = make_runner(app, server_config)
    keys = app.get(KEYS)
    with Signals(hang_up=keys.reload if keys else None) as signals:
        try:
            await runner.setup()
            for sock in sockets:
                await web.SockSite(runner, sock, backlog=BACKLOG).start()
                log.info("listening on %s", _url(sock))
            end = await _live(backend, engine_config, server_config, signals)
        finally:
            await runner.cleanup()
            for sock in sockets:
                sock.close()
    if end.reason is not None:
        log.error("%s", end.reason)
    return end.code


def bind(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of `host`, all on one port (any free one for 0).

    From here on the port is taken, so that a second start fails before it loads anything. Raises OSError.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            same_port = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(_listen(family, kind, protocol, (address[0], same_port, *address[2:])))
            except OSError as exc:
                # A name may have addresses of a family that this machine lacks; one that works is enough.
                if exc.errno not in _NO_SUCH_FAMILY or (not sockets and address is found[-1][4]):
                    raise
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def set_up_logging(level: str) -> None:
    """Log to stderr, one line a record; libraries only when something is wrong."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in ("aiohttp", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


class Signals:
    """Counts SIGINT and SIGTERM while it is entered, instead of dying of them; SIGHUP calls `hang_up`.

    Without `hang_up` a SIGHUP ends the process as usual, for example when its terminal closes.
    """

    def __init__(self, *, hang_up: Callable[[], None] | None = None) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.number = 0
        """The first signal's."""
        self._calls: dict[int, Callable[[], None]] = {
            number: partial(self._count, number) for number in (signal.SIGINT, signal.SIGTERM)
        }
        if hang_up is not None:
            self._calls[signal.SIGHUP] = hang_up

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number, call in self._calls.items():
            loop.add_signal_handler(number, call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._calls:
            loop.remove_signal_handler(number)

    def _count(self, number: int) -> None:
        self.number = self.number or number
        (self.second if self.first.is_set() else self.first).set()


async def _live(backend: Backend, engine_config: EngineConfig, config: ServerConfig, signals: Signals) -> End:
    log.info("loading %s", engine_config.model)
    loading = asyncio.create_task(_load(engine_config), name="load")
    await _race(None, loading, signals.first.wait())
    if loading.cancelled():
        log.info("stopped while loading")
        return End(128 + signals.number)
    engine, codec = loading.result()
    backend.start(engine, codec)
    for line in banner(engine.info):
        log.info("%s", line)
    failure = asyncio.create_task(engine.failed(), name="engine-failed")
    try:
        await _race(None, asyncio.shield(failure), signals.first.wait())
        if not failure.done():
            await _drain(backend, engine, failure, config, signals)
        if failure.done():
            backend.phase = "failed"
            return End(1, f"the engine has failed: {failure.result()}")
        return End(0)
    finally:
        failure.cancel()
        await engine.close()
        # Whoever was cut off is told so before the connections close.
        await _race(config.close_timeout, backend.idle())


async def _load(config: EngineConfig) -> tuple[Engine, TextCodec]:
    # Not asyncio's own threads: the loop's end would wait for them.
    helper = ThreadPoolExecutor(1, thread_name_prefix="load")
    try:
        codec = await asyncio.get_running_loop().run_in_executor(helper, _load_codec, config.model)
    finally:
        helper.shutdown(wait=False)
    engine = await Engine.start(config)
    # All that is here now stays: no garbage collection need walk it while requests are answered.
    gc.collect()
    gc.freeze()
    return engine, codec


def _load_codec(model: str) -> TextCodec:
    """The codec, warm: what the first grammar needs would keep the interpreter's lock for long then."""
    codec = TextCodec.load(resolve(model).path)
    try:
        codec.grammars.warm()
    except HeadwaterError as error:
        log.warning("grammars can't be used: %s", error)
    return codec


async def _drain(
    backend: Backend,
    engine: Engine,
    failure: asyncio.Task[BaseException],
    config: ServerConfig,
    signals: Signals,
) -> None:
    async def finished() -> None:
        await engine.drain()
        await backend.idle()

    backend.phase = "draining"
    limit = config.drain_timeout
    log.info("draining %d requests, %g s at most; a second signal cuts them off", backend.open, limit)
    await _race(limit, finished(), asyncio.shield(failure), signals.second.wait())
    if backend.open == 0:
        log.info("drained")
    elif not failure.done():
        log.info("cutting off %d request%s", backend.open, "" if backend.open == 1 else "s")


async def _race(seconds: float | None, *runners: Awaitable[object]) -> None:
    """Wait until the first of them is done, or for so many seconds; cancel the others."""
    tasks = [asyncio.ensure_future(runner) for runner in runners]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def banner(info: EngineInfo) -> list[str]:
    """Say what was started, in a few lines for people. The engine has told its notes as warnings."""
    # One page holds zeros and is never lent: /metrics doesn't count it either.
    pages = info.num_pages - 1
    bits = "yes" if info.bit_identical else "NO"
    return [
        f"model {info.model}, {info.dtype}, executor {info.executor}, {info.threads} threads, "
        f"context {info.context_length} tokens",
        f"KV pool: {pages} pages of {info.page_size} = {pages * info.page_size} tokens, "
        f"{info.kv_bytes / 1e9:.2f} GB",
        f"same bits warm and cold on this machine: {bits} (numerics {info.fingerprint})",
        "ready",
    ]


def _listen(family: int, kind: int, protocol: int, address: tuple[str | int, ...]) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        # A restart must not wait for the last connections of the one before (TIME_WAIT).
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"
