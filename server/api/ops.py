"""Operations: liveness, readiness and metrics."""

from __future__ import annotations

from aiohttp import web

from engine import EngineUnavailable
from server.api.common import SERVICES
from server.errors import SERVER, ApiError


async def health(http: web.Request) -> web.Response:
    """200 while the process is worth keeping, also while it loads or drains; 503 once it has failed."""
    backend = http.app[SERVICES].backend
    if backend.phase == "failed":
        raise ApiError(503, "The engine has failed", kind=SERVER, code="engine_failed")
    return web.json_response({"status": "ok", "phase": backend.phase})


async def ready(http: web.Request) -> web.Response:
    """200 when a request sent now would be taken, else 503 with Retry-After."""
    backend = http.app[SERVICES].backend
    backend.require()
    if not backend.ready:
        raise EngineUnavailable("The engine takes no requests now")
    return web.json_response({"status": "ready"})


async def metrics(http: web.Request) -> web.Response:
    """Prometheus' text format, also while the model loads."""
    body = http.app[SERVICES].metrics.render()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
