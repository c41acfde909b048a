"""CORS: which pages in browsers may talk to the server, per the Fetch standard.

No cookies are involved: a page sends its API key in a header, so credentials are never allowed.
"""

from __future__ import annotations

import re

from aiohttp import web
from aiohttp.typedefs import Handler

from engine.errors import ConfigError
from server.errors import ApiError
from server.schema.strict import shown

ANY = "*"
METHODS = "GET, HEAD, POST"
HEADERS = "authorization, content-type, x-api-key"
# Seconds for which a browser need not ask again.
MAX_AGE = "3600"

_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^/\s?#@*]+")
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_MAX_NAMES = 2000
# A browser shows a page only what is named here, besides a few plain headers.
_EXPOSED = ("x-request-id", "request-id", "retry-after", "fireworks-", "x-headwater-")


class Cors:
    """The origins that are allowed, and the headers that tell browsers so."""

    def __init__(self, setting: str) -> None:
        """Read HEADWATER_CORS_ORIGINS: `*`, or a comma-separated list. Raises ConfigError."""
        origins = [origin for part in setting.split(",") if (origin := part.strip().lower())]
        self._any = origins == [ANY]
        self._origins = frozenset(origins)
        bad = [origin for origin in origins if not self._any and not _ORIGIN.fullmatch(origin)]
        if bad:
            raise ConfigError(
                f"HEADWATER_CORS_ORIGINS: {bad[0]!r} is not allowed: give * alone, or origins like "
                "https://app.example.com or http://localhost:3000, comma separated, without a path"
            )

    def allow(self, origin: str) -> str | None:
        """Return the Access-Control-Allow-Origin for a page of `origin`, or None."""
        if self._any:
            return ANY
        return origin if origin.lower() in self._origins else None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer preflights, which browsers send without a key; pass on all else."""
        origin = request.headers.get("Origin")
        if (
            request.method != "OPTIONS"
            or origin is None
            or "Access-Control-Request-Method" not in request.headers
        ):
            return await handler(request)
        if self.allow(origin) is None:
            raise ApiError(
                403, f"Pages of the origin {shown(origin)} may not use this server", code="origin_not_allowed"
            )
        wanted = request.headers.get("Access-Control-Request-Headers", "").strip()
        usable = len(wanted) <= _MAX_NAMES and _NAMES.fullmatch(wanted)
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Allow-Headers": wanted if usable else HEADERS,
                "Access-Control-Max-Age": MAX_AGE,
            },
        )

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell the browser whether the page may read this reply, be it an error or a stream."""
        headers = response.headers
        if not self._any:
            headers["Vary"] = ", ".join(filter(None, [headers.get("Vary"), "Origin"]))
        origin = request.headers.get("Origin")
        allowed = None if origin is None else self.allow(origin)
        if allowed is not None:
            headers["Access-Control-Allow-Origin"] = allowed
            exposed = sorted({name.lower() for name in headers if name.lower().startswith(_EXPOSED)})
            headers["Access-Control-Expose-Headers"] = ", ".join(exposed)
