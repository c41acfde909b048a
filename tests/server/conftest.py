"""The server's tests run on the event loop that serves in earnest: its transports differ from asyncio's."""

from __future__ import annotations

import uvloop


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}
