"""GET /v1/models: what is served here, under each of its names."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from aiohttp import web

from server.api.common import SERVICES, Services, check_model, model_names
from server.schema.responses import ModelCard, ModelList


async def list_models(http: web.Request) -> web.Response:
    """List all names."""
    cards = tuple(_cards(http.app[SERVICES]).values())
    return _json(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


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
            display_name=name,
            created=services.backend.loaded_at,
            created_at=datetime.fromtimestamp(services.backend.loaded_at, UTC).isoformat(),
            context_length=engine.info.context_length,
            supports_chat=codec.has_chat_template,
        )
        for name in model_names(engine.info, services.config)
    }


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
