"""A server's life: the port before the model, readiness, two-stage shutdown, failure."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import ClientSession

from engine import ConfigError, EngineConfig, ModelError
from server import lifecycle
from server.config import ServerConfig
from server.tenancy.keys import entry_line, new_key
from tests.server.fakes import MODEL, Client, FakeEngine, byte_codec, chat_body, until


@pytest.fixture
def life(monkeypatch):
    """Serve a FakeEngine through `serve`, with loading under the test's control."""
    bind = lifecycle.bind

    @asynccontextmanager
    async def start(config=None, **options):
        config = config or ServerConfig(port=0)
        loaded, bound = asyncio.Event(), []
        engine = FakeEngine(**options)

        async def load(_):
            await loaded.wait()
            return engine, byte_codec()

        def listen(host, port):
            bound.extend(bind(host, port))
            return bound

        monkeypatch.setattr(lifecycle, "_load", load)
        monkeypatch.setattr(lifecycle, "bind", listen)
        ending = asyncio.create_task(lifecycle.serve(EngineConfig(), config))
        await until(lambda: bool(bound) or ending.done())
        async with ClientSession() as session:
            client = Client("http://{}:{}".format(*bound[0].getsockname()[:2]), session, engine)
            client.loaded, client.ending = loaded, ending
            yield client
        if not ending.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait([ending])
        await engine.close()

    return start


async def ready(client):
    client.loaded.set()
    async with asyncio.timeout(10):
        while (await client.get("/ready"))[0] != 200:
            await asyncio.sleep(0.005)


async def test_while_loading_only_liveness_says_yes(life):
    """O091: ready, models and inference are 503 with Retry-After until a request would work."""
    async with life() as client:
        assert (await client.get("/health"))[0] == 200
        for path in ("/ready", "/v1/models"):
            status, body, headers = await client.get(path)
            assert (status, body["error"]["code"]) == (503, "not_ready")
            assert int(headers["Retry-After"]) > 0
        for path in ("/v1/completions", "/inference/v1/chat/completions"):
            status, body, headers = await client.post(path, chat_body())
            assert (status, body["error"]["type"]) == (503, "service_unavailable_error")
            assert headers["Retry-After"]
        async with client.session.get(client.url + "/metrics") as response:
            assert "headwater_ready 0.0" in await response.text()
        await ready(client)
        assert (await client.complete())["choices"][0]["text"] == "Hello world"


async def test_the_start_says_what_is_served(life, caplog):
    caplog.set_level(logging.INFO)
    async with life() as client:
        await ready(client)
    for part in ("listening on http://127.0.0.1:", MODEL, "float32", "1 threads", "context 500 tokens"):
        assert part in caplog.text
    assert "99 pages of 16 = 1584 tokens" in caplog.text
    assert "same bits warm and cold on this machine: yes" in caplog.text


async def test_what_the_engine_has_warned_of_is_not_told_again():
    """Its notes, such as why no kernel could be compiled, are in the log when the banner comes."""
    info = FakeEngine().info
    noted = msgspec.structs.replace(info, notes=("no compiled kernel, torch computes instead",))
    assert lifecycle.banner(noted) == lifecycle.banner(info)


async def test_a_taken_port_fails_before_anything_is_loaded(life):
    """O094: the second start fails at once; a restart on the same port works at once."""
    async with life() as client:
        await ready(client)
        config = ServerConfig(port=client.port)
        with pytest.raises(OSError, match="in use"):
            await lifecycle.serve(EngineConfig(), config)
        await client.complete()
    async with life(config) as client:
        await ready(client)
        await client.complete()


async def test_any_free_port_is_bound_once_and_reported():
    """O095: port 0 gives each start a port of its own, on every address of the host."""
    bound = [lifecycle.bind("localhost", 0) for _ in range(20)]
    try:
        ports = [{sock.getsockname()[1] for sock in sockets} for sockets in bound]
        assert all(len(found) == 1 and found != {0} for found in ports)
        assert len(set.union(*ports)) == 20
        for sockets in bound:
            with socket.create_connection(sockets[0].getsockname()[:2], timeout=5):
                pass
    finally:
        for sockets in bound:
            for sock in sockets:
                sock.close()


async def test_the_first_signal_drains(life, caplog):
    """Running requests finish, new ones get 503, then the process ends well."""
    caplog.set_level(logging.INFO)
    async with life(pace=0.02) as client:
        await ready(client)
        running = asyncio.create_task(client.complete())
        await until(lambda: bool(client.engine.live))
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: not client.engine.ready)
        status, body, headers = await client.post("/v1/completions", {"model": MODEL, "prompt": "a"})
        assert (status, body["error"]["code"]) == (503, "not_ready")
        assert headers["Retry-After"]
        assert (await client.get("/ready"))[0] == 503
        assert (await client.get("/health"))[0] == 200
        assert (await running)["choices"][0]["text"] == "Hello world"
        assert await client.ending == 0
    assert "drained" in caplog.messages
    assert "cutting off" not in caplog.text


@pytest.mark.parametrize("second_signal", [True, False])
async def test_the_second_signal_or_the_time_limit_cuts_off(life, second_signal, caplog):
    """What still runs is told so: an error event in a stream, 503 for a whole reply."""
    caplog.set_level(logging.INFO)
    limit = 60.0 if second_signal else 0.2
    config = ServerConfig(port=0, drain_timeout=limit)
    async with life(config, reply=lambda _: b"x" * 10_000, context=20_000, pace=0.01) as client:
        await ready(client)
        body = {"model": MODEL, "prompt": "a", "max_tokens": 10_000}
        whole = asyncio.create_task(client.post("/v1/completions", body))
        stream = asyncio.create_task(client.stream("/v1/completions", body))
        await until(lambda: client.engine.steps > 5 and len(client.engine.live) == 2)
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: not client.engine.ready)
        if second_signal:
            os.kill(os.getpid(), signal.SIGINT)
        assert await client.ending == 0
        status, answer, _ = await whole
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        events, _ = await stream
        assert events[-1]["error"]["code"] == "not_ready"
    assert "cutting off 2 requests" in caplog.messages
    assert "drained" not in caplog.text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_while_loading_stops_the_start(life, number, code):
    """The codes that shells and supervisors know; one that comes after it changes nothing."""
    async with life() as client:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await client.ending == code


async def test_a_failed_engine_ends_the_process_with_its_reason_last(life, caplog):
    """O088, O090: in-flight requests get an error, exit code 1, the reason is the last log line."""
    caplog.set_level(logging.INFO)
    async with life(pace=0.01, reply="x" * 400) as client:
        await ready(client)
        whole = asyncio.create_task(client.post("/v1/completions", {"model": MODEL, "prompt": "a"}))
        stream = asyncio.create_task(client.stream("/v1/completions", {"model": MODEL, "prompt": "b"}))
        await until(lambda: client.engine.steps > 5 and len(client.engine.live) == 2)
        client.engine.die(RuntimeError("out of memory"))
        status, answer, _ = await whole
        assert (status, answer["error"]["code"]) == (500, "step_failed")
        events, _ = await stream
        assert "out of memory" in events[-1]["error"]["message"]
        assert await client.ending == 1
    own = [record for record in caplog.records if record.name == "headwater.server"]
    assert own[-1].levelname == "ERROR"
    assert "out of memory" in own[-1].getMessage()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mode": "serverless"}, "HEADWATER_API_KEYS_FILE"),
        ({"api_keys_file": "/nonesuch/keys"}, "'/nonesuch/keys'"),
        ({"cors_origins": "example.com"}, "HEADWATER_CORS_ORIGINS"),
    ],
)
async def test_what_is_wrong_at_the_door_stops_the_start_before_anything_listens(
    monkeypatch, settings, named
):
    bound = []
    monkeypatch.setattr(lifecycle, "bind", lambda *address: bound.append(address))
    with pytest.raises(ConfigError, match=named):
        await lifecycle.serve(EngineConfig(), ServerConfig(port=0, **settings))
    with pytest.raises(ConfigError, match="HEADWATER_TILE=100"):
        await lifecycle.serve(EngineConfig(tile=100), ServerConfig(port=0))
    assert bound == []


async def test_a_hang_up_reads_the_keys_again(life, tmp_path, caplog):
    """Removed keys stop working at once, running requests go on, a broken file changes nothing."""
    caplog.set_level(logging.INFO)
    path, old, new = tmp_path / "keys", new_key(), new_key()
    path.write_text(entry_line(old, "acme"))
    path.chmod(0o600)

    async def status_for(client, key):
        body = {"model": MODEL, "prompt": "a"}
        return (await client.post("/v1/completions", body, authorization=f"Bearer {key}"))[0]

    async def hang_up(said):
        caplog.clear()
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: said in caplog.text)

    async with life(ServerConfig(port=0, api_keys_file=str(path))) as client:
        await ready(client)
        assert (await status_for(client, old), await status_for(client, new)) == (200, 401)
        client.engine.gate.clear()
        running = asyncio.create_task(status_for(client, old))
        await until(lambda: bool(client.engine.live))
        path.write_text(entry_line(new, "acme"))
        await hang_up("API keys: 1 of 1 accounts")
        assert await status_for(client, old) == 401
        client.engine.gate.set()
        assert await running == 200
        path.write_text("nonsense\n" + entry_line(old, "acme"))
        await hang_up("the API keys from before stay in force")
        assert [r.levelname for r in caplog.records] == ["ERROR"]
        assert "line 1" in caplog.text
        assert (await status_for(client, old), await status_for(client, new)) == (401, 200)
        assert client.engine.ready


async def test_without_keys_a_hang_up_ends_the_process_as_usual():
    """So a server whose terminal closes does not live on unseen."""
    with lifecycle.Signals():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    with lifecycle.Signals(hang_up=lambda: None):
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def test_a_missing_model_is_said_before_the_end(tmp_path):
    with pytest.raises(ModelError):
        await lifecycle.serve(EngineConfig(model=str(tmp_path / "none")), ServerConfig(port=0))
