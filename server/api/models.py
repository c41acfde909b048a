"""GET /v1/models: what is served here, under each of its names."""

from __future__ import annotations

import msgspec
from aiohttp import web

from server.api.common import SERVICES, Services, check_model, model_names
from server.schema.responses import ModelCard, ModelList


async def list_models(http: web.Request) -> web.Response:
    """List all names."""
    return _json(ModelList(data=tuple(_cards(http.app[SERVICES]).values())))


async def get_model(http: web.Request) -> web.Response:
    """Show one name."""
    cards = _cards(http.app[SERVICES])
    name = http.match_info["name"]
    return _json(cards[check_model(name, tuple(cards))])


def _cards(services: Services) -> dict[str, ModelCard]:
    engine, codec = services.backend.require()
    return {
        name: ModelCard(
            id=name,
            created=services.backend.loaded_at,
            context_length=engine.info.context_length,
            supports_chat=codec.has_chat_template,
        )
        for name in model_names(engine.info, services.config)
    }


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
