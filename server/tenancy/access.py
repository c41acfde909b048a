"""The check at the door: which account asks, before anything of a request's body is read."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from engine.errors import ConfigError
from server.config import ServerConfig
from server.errors import ApiError
from server.tenancy.keys import SETTING, Keys

KEYS = web.AppKey("keys", Keys)
ACCOUNT = web.RequestKey("account", str)

# Everything else needs a key, paths that don't exist included. Preflights have none to show.
PUBLIC = frozenset(
    [
        *(prefix + path for prefix in ("", "/inference/v1") for path in ("/health", "/ready", "/metrics")),
        *("/openapi.json", "/docs"),
    ]
)


def open_keys(config: ServerConfig) -> Keys | None:
    """Read the API keys that the settings name; None where everybody is let in.

    Raises ConfigError where they can't be read, and where the mode needs some and there are none.
    """
    if config.api_keys_file:
        return Keys(config.api_keys_file)
    if config.mode == "serverless":
        raise ConfigError(
            f"HEADWATER_MODE=serverless needs API keys: name their file in {SETTING} "
            "(headwater keys new ACCOUNT makes a key and its line), or give dedicated"
        )
    return None


def account_of(http: web.Request) -> str | None:
    """Return the account that sent a request; None where there are no keys, and on public paths."""
    return http.get(ACCOUNT)


def access_middleware(keys: Keys | None) -> Middleware:
    """Make the middleware that lets a request in only with a key; without `keys` it lets all in."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if keys is not None and request.method != "OPTIONS" and request.path not in PUBLIC:
            account = keys.account(_presented(request))
            if account is None:
                raise _refusal("The API key is not known here")
            request[ACCOUNT] = account
        return await handler(request)

    return middleware


def _presented(http: web.Request) -> str:
    # The key in OpenAI's header, in Anthropic's, or the same in both. Raises ApiError 401.
    found = set()
    if (bearer := _single(http, "Authorization")) is not None:
        scheme, _, key = bearer.partition(" ")
        if scheme.lower() != "bearer":
            raise _refusal("The header Authorization must be 'Bearer KEY'")
        found.add(key.strip())
    if (key_alone := _single(http, "x-api-key")) is not None:
        found.add(key_alone)
    found.discard("")
    if len(found) > 1:
        raise _refusal("The headers Authorization and x-api-key hold different API keys: send one")
    if not found:
        raise _refusal("There is no API key: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
    return found.pop()


def _single(http: web.Request, name: str) -> str | None:
    given = http.headers.getall(name, [])
    if len(given) > 1:
        raise _refusal(f"The header {name} is given more than once")
    return given[0].strip() if given else None


def _refusal(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
