"""Errors of the transport itself, request ids, metrics and the operations' endpoints."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.config import ServerConfig
from tests.server.fakes import MODEL, FakeEngine, chat_body, running, until


async def metrics_of(client):
    async with client.session.get(client.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def raw(client, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


async def test_unknown_paths_and_methods_answer_in_the_error_shape():
    """O056, O087: 404 and 405 with Allow, both JSON; HEAD is a GET without a body and starts no work."""
    async with running(FakeEngine()) as client:
        for method, path, status in [
            ("GET", "/nothing", 404),
            ("POST", "/v1/nothing", 404),
            ("GET", "/v1/completions", 405),
            ("PUT", "/v1/chat/completions", 405),
            ("HEAD", "/v1/completions", 405),
            ("DELETE", "/health", 405),
            ("OPTIONS", "/v1/completions", 405),
            ("GET", "/v1/models/other", 404),
            ("HEAD", "/health", 200),
            ("HEAD", "/metrics", 200),
            ("HEAD", "/v1/models", 200),
            ("GET", "/inference/v1/models", 200),
            ("GET", "/inference/v1/ready", 200),
        ]:
            async with client.session.request(method, client.url + path) as response:
                assert response.status == status, (method, path)
                body = await response.read()
                if status == 405:
                    assert response.headers["Allow"]
                if method == "HEAD":
                    assert body == b""
                elif status >= 400:
                    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert client.engine.submitted == []


async def test_an_expectation_that_nobody_knows_is_refused_in_the_error_shape():
    async with running(FakeEngine()) as client:
        for path in (b"/v1/completions", b"/v1/messages"):
            head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: tea\r\n"
            answer = await raw(client, head + b"Content-Length: 0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 417 ")
            assert b"\r\nx-request-id: req-" in answer
            body = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert body["error"]["type"] == "invalid_request_error"
            assert (body.get("type") == "error") == (path == b"/v1/messages")


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBroken header\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBig: " + b"x" * 50_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"H%d: x\r\n" % i for i in range(1000)) + b"\r\n",
        b"GET http://x:99999/" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_broken_or_huge_heads_are_refused_early(head):
    """O056, O082: 400 in the error shape, and the server goes on."""
    async with running(FakeEngine()) as client:
        answer = await raw(client, head)
        assert re.match(rb"HTTP/1\.[01] 400 ", answer)
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "bad_http"
        assert b"\r\nx-request-id: req-" in answer
        assert error["message"].startswith("The request is not valid HTTP: ")
        assert len(error["message"]) < 150
        for python in ("b'", 'b"', "bytearray"):
            assert python not in error["message"]
        await client.complete()


async def test_a_client_that_sends_no_request_is_closed():
    """O082: a head that never ends does not hold a connection for ever."""
    async with running(FakeEngine(), ServerConfig(keepalive_timeout=0.1)) as client:
        assert await raw(client, b"GET / HTTP/1.1\r\nHost: x\r\n") == b""


async def test_idle_connections_outlive_common_balancers():
    """O080: 75 s by default, above the 60 s of common balancers; a request that runs is never cut."""
    assert ServerConfig().keepalive_timeout >= 75
    engine = FakeEngine()
    engine.gate.clear()
    async with running(engine, ServerConfig(keepalive_timeout=0.05)) as client:
        reply = asyncio.create_task(client.complete())
        await asyncio.sleep(0.3)
        engine.gate.set()
        assert (await reply)["choices"][0]["text"] == "Hello world"


async def test_request_ids_are_echoed_cleaned_and_capped():
    async with running(FakeEngine()) as client:
        for given, expected in [("abc-1.2:3", "abc-1.2:3"), ("a b<c>\t", "abc"), ("x" * 500, "x" * 128)]:
            _, _, headers = await client.post(
                "/v1/completions", {"model": MODEL, "prompt": "a"}, x_request_id=given
            )
            assert headers["x-request-id"] == expected
        for given in ({}, {"x_request_id": "<>"}):
            _, _, headers = await client.post("/nothing", {}, **given)
            assert re.fullmatch(r"req-[0-9a-f]{32}", headers["x-request-id"])


async def test_a_full_queue_and_a_draining_engine_answer_503_with_retry_after():
    engine = FakeEngine(max_running=1, max_waiting=3)
    engine.gate.clear()
    async with running(engine) as client:
        held = []
        # One of a batch fits no more: the whole request is refused and nothing of it stays behind.
        for count, prompt in ((3, ["a", "b"]), (4, "a")):
            held += [asyncio.create_task(client.complete()) for _ in range(count - len(held))]
            await until(lambda count=count: len(engine.live) == count)
            status, body, headers = await client.post("/v1/completions", {"model": MODEL, "prompt": prompt})
            assert (status, body["error"]["code"]) == (503, "server_is_overloaded")
            assert body["error"]["type"] == "service_unavailable_error"
            assert int(headers["Retry-After"]) > 0
            await until(lambda count=count: len(engine.live) == count)
        engine.gate.set()
        await asyncio.gather(*held)
        await engine.drain()
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, body, headers = await client.post(path, chat_body())
            assert (status, body["error"]["code"]) == (503, "not_ready")
            assert headers["Retry-After"]
        assert (await client.get("/ready"))[0] == 503
        assert (await client.get("/health"))[0] == 200


async def test_an_unforeseen_failure_is_a_500_that_tells_no_secrets(monkeypatch, caplog):
    def broken(request):
        raise ZeroDivisionError("secret detail")

    async with running(FakeEngine()) as client:
        monkeypatch.setattr(client.engine, "submit", broken)
        status, body, _ = await client.post("/v1/completions", {"model": MODEL, "prompt": "a"})
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "secret" not in json.dumps(body)
        assert "secret detail" in caplog.text


async def test_metrics_count_what_happened():
    """O092: gauges are read when asked for, so all streams dropped at once read as zero at once."""
    engine = FakeEngine("x" * 400, pace=0.001)
    async with running(engine) as client:
        streams = [
            asyncio.create_task(client.stream("/v1/completions", {"model": MODEL, "prompt": f"{i}"}))
            for i in range(20)
        ]
        await until(lambda: len(engine.live) == 20)
        assert (await metrics_of(client))["headwater_requests_running", ()] == 20
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await until(lambda: not engine.live)
        found = await metrics_of(client)
        assert found["headwater_requests_running", ()] == 0
        assert found["headwater_kv_cache_usage_ratio", ()] == 0
        assert found["headwater_requests_finished_total", (("reason", "abort"),)] == 20
        assert found["headwater_requests_total", ()] == 20
        await until(lambda: engine.stats().running == 0)
    async with running(FakeEngine()) as client:
        await client.complete("abcdef")
        await client.complete("abcdef")
        found = await metrics_of(client)
        assert found["headwater_ready", ()] == 1
        assert found["headwater_prompt_tokens_total", ()] == 12
        assert found["headwater_cached_tokens_total", ()] == 5
        assert found["headwater_generated_tokens_total", ()] == 24
        assert found["headwater_time_to_first_token_seconds_count", ()] == 2
        assert found["headwater_inter_token_latency_seconds_count", ()] == 22


async def test_no_series_grows_with_users():
    """O097: model names with quotes and newlines parse; ids and keys of clients are no labels."""
    engine = FakeEngine(model='we"ird\n\\name')
    async with running(engine) as client:
        before = set(await metrics_of(client))
        for i in range(30):
            body = {"model": engine.info.model, "prompt": "a", "user": f"u{i}", "cache_salt": f's"{i}\n'}
            status, _, _ = await client.post("/v1/completions", body, x_request_id=f"r{i}")
            assert status == 200
        after = set(await metrics_of(client))
        assert {name for name, _ in after - before} == {"headwater_requests_finished_total"}
        labels = dict(next(labels for name, labels in after if name == "headwater_model_info"))
        assert labels["model"] == engine.info.model


async def test_the_tests_run_on_the_loop_that_serves():
    assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")


@pytest.mark.parametrize("chunk", [b"zz\r\n{}\r\n0\r\n\r\n", b"-5\r\n{}\r\n", b"2\r\n{}xx\r\n0\r\n\r\n"])
async def test_a_body_that_is_broken_as_http_is_a_400(chunk):
    """O075: bad chunk sizes end in a 400 and a closed connection, never in a 500."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with running(FakeEngine()) as client:
        answer = await raw(client, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
        assert re.match(rb"HTTP/1\.[01] 400 ", answer), answer
        assert b'{"error":{' in answer
        await client.complete()
