"""The application: which path is answered by what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from server.api import chat, completions, messages, models, openapi, ops, responses, tokens
from server.api.common import SERVICES, Services
from server.backend import Backend
from server.config import ServerConfig
from server.cors import Cors
from server.errors import error_middleware, name_reply
from server.metrics import Metrics
from server.tenancy.access import KEYS, access_middleware, open_keys
from server.workers import Workers

if TYPE_CHECKING:
    from engine import Engine, TextCodec

PREFIXES = ("", "/inference")


def create_app(engine: Engine, codec: TextCodec, config: ServerConfig) -> web.Application:
    """Build the application around a loaded engine. Run it with `protocol.make_runner`."""
    backend = Backend()
    backend.start(engine, codec)
    return build_app(backend, config)


def build_app(backend: Backend, config: ServerConfig) -> web.Application:
    """Build the application around a backend that may still be loading. Raises ConfigError."""
    keys, cors = open_keys(config), Cors(config.cors_origins) if config.cors_origins else None
    app = web.Application(
        client_max_size=config.max_body_mb * 1_000_000,
        middlewares=[
            error_middleware(config.retry_after),
            *([cors.middleware] if cors else []),
            access_middleware(keys),
        ],
    )
    app.on_response_prepare.append(name_reply)
    if cors is not None:
        app.on_response_prepare.append(cors.on_prepare)
    if keys is not None:
        app[KEYS] = keys
        keys.announce()
    # A finished reply must not wait behind long prompts.
    workers, writers = Workers(config.text_threads), Workers(config.text_threads, "replies")
    compilers = Workers(1, "grammars", most=config.max_compiling)
    app[SERVICES] = Services(
        config=config,
        backend=backend,
        metrics=Metrics(backend),
        workers=workers,
        writers=writers,
        compilers=compilers,
    )
    for prefix in PREFIXES:
        app.router.add_post(prefix + "/v1/completions", completions.handle)
        app.router.add_post(prefix + "/v1/chat/completions", chat.handle)
        responses.add_routes(app, prefix)
        messages.add_routes(app, prefix)
        app.router.add_get(prefix + "/v1/models", models.list_models)
        app.router.add_get(prefix + "/v1/models/{name:.+}", models.get_model)
    tokens.add_routes(app.router)
    openapi.add_routes(app)
    for prefix in ("", "/inference/v1"):
        app.router.add_get(prefix + "/health", ops.health)
        app.router.add_get(prefix + "/ready", ops.ready)
        app.router.add_get(prefix + "/metrics", ops.metrics)

    async def close(_: web.Application) -> None:
        workers.close()
        writers.close()
        compilers.close()

    app.on_cleanup.append(close)
    return app
