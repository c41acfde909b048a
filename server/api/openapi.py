"""GET /openapi.json and /docs: what this server takes and answers, for programs and for people."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec
from aiohttp import web

from server.api.common import SERVICES, Services, model_names
from server.schema.doc_shapes import Limits
from server.schema.document import build
from server.ui.page import Page, render


class _Built(NamedTuple):
    limits: Limits
    json: bytes
    page: Page


class Document:
    """The document of one application, built in a worker when it is first asked for."""

    def __init__(self) -> None:
        self._built: _Built | None = None
        self._building = asyncio.Lock()

    async def get(self, services: Services) -> _Built:
        """Return the document of what is served now. Raises EngineUnavailable while that is nothing."""
        limits = limits_of(services)
        async with self._building:
            if self._built is None or self._built.limits != limits:
                self._built = await services.workers.run(True, _build, limits)
            return self._built


DOCUMENT = web.AppKey("document", Document)


def add_routes(app: web.Application) -> None:
    """Put both endpoints at their paths."""
    app[DOCUMENT] = Document()
    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/docs", docs)


async def openapi(http: web.Request) -> web.Response:
    """The document as JSON."""
    built = await http.app[DOCUMENT].get(http.app[SERVICES])
    return web.Response(body=built.json, content_type="application/json")


async def docs(http: web.Request) -> web.Response:
    """The document as a page."""
    built = await http.app[DOCUMENT].get(http.app[SERVICES])
    headers = {
        "Content-Security-Policy": built.page.policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return web.Response(body=built.page.html, content_type="text/html", charset="utf-8", headers=headers)


def limits_of(services: Services) -> Limits:
    """Collect what requests are checked against."""
    engine, codec = services.backend.require()
    config = services.config
    return Limits(
        models=model_names(engine.info, config),
        vocab_size=codec.vocab_size,
        context_length=engine.info.context_length,
        max_prompt_chars=services.backend.max_prompt_bytes,
        max_prompts=config.max_prompts,
        max_stop_chars=config.max_stop_chars,
        max_key_chars=config.max_key_chars,
        reasons=codec.reasons,
        keys=bool(config.api_keys_file),
    )


def _build(limits: Limits) -> _Built:
    document = build(limits)
    return _Built(limits, msgspec.json.encode(document), render(document))
