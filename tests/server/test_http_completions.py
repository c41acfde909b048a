"""What /v1/completions promises: prompts in all forms, limits, usage, ids and isolation."""

from __future__ import annotations

import asyncio
import socket

import pytest

from engine import EngineRequest
from server.config import ServerConfig
from tests.server.fakes import END, MODEL, FakeEngine, byte_codec, running, text_ids, until


async def test_each_form_of_prompt_is_completed_in_order():
    """O065: [[1], [2]] gives two choices, each of its own prompt; usage is the sum."""
    engine = FakeEngine(lambda request: text_ids(f"<{bytes(request.prompt).decode()}>"))
    async with running(engine) as client:
        for prompt, expected in [
            ("ab", ["<ab>"]),
            (["ab", "c"], ["<ab>", "<c>"]),
            ([97, 98], ["<ab>"]),
            ([[97], [98, 99]], ["<a>", "<bc>"]),
        ]:
            body = await client.complete(prompt)
            assert [choice["text"] for choice in body["choices"]] == expected
            assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
            assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
            usage = body["usage"]
            assert usage["prompt_tokens"] == sum(len(text) - 2 for text in expected)
            assert usage["completion_tokens"] == sum(len(text) + 1 for text in expected)


async def test_both_prefixes_lead_to_the_same_endpoint():
    async with running(FakeEngine()) as client:
        status, body, _ = await client.post("/inference/v1/completions", {"model": MODEL, "prompt": "a"})
        assert (status, body["choices"][0]["text"]) == (200, "Hello world")


async def test_cached_tokens_are_always_reported_and_inside_the_prompt():
    """O023: cached is part of prompt_tokens; total = prompt + completion. A repeat reports n - 1."""
    async with running(FakeEngine()) as client:
        cold, warm = await client.complete("abcdef"), await client.complete("abcdef")
        assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 6}
        assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": 5, "cache_write_tokens": 0}
        for usage in (cold["usage"], warm["usage"]):
            assert usage["prompt_tokens"] == 6
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_headers_body_and_perf_metrics_tell_the_same():
    async with running(FakeEngine()) as client:
        await client.complete("abcdef")
        request = {"model": MODEL, "prompt": "abcdef", "perf_metrics_in_response": True}
        _, body, headers = await client.post("/v1/completions", request)
        assert headers["fireworks-prompt-tokens"] == "6"
        assert headers["fireworks-cached-prompt-tokens"] == "5"
        ttft = float(headers["fireworks-server-time-to-first-token"])
        assert 0 < ttft <= float(headers["fireworks-server-processing-time"])
        for name, value in body["perf_metrics"].items():
            assert headers["fireworks-" + name] == headers["x-headwater-" + name] == value
        assert "perf_metrics" not in await client.complete("abcdef")


@pytest.mark.parametrize("per_delta", [1, 3, 100])
async def test_a_stop_string_cuts_text_ids_and_counts_wherever_deltas_are_cut(per_delta):
    """O046, O054: cut just before the match; the tokens of the match count, those behind it don't."""
    engine = FakeEngine("one two three", per_delta=per_delta)
    async with running(engine) as client:
        body = await client.complete("p", stop=["two", "e t"], return_token_ids=True)
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("on", "stop")
        assert choice["token_ids"] == text_ids("one t", end=False)
        assert body["usage"]["completion_tokens"] == 5
        await until(lambda: not engine.live)
        assert sum(engine.finished.values()) == 1


async def test_a_stop_string_in_the_last_allowed_token_is_a_stop():
    """O046: found in the very last token, it still ends the choice with "stop"."""
    async with running(FakeEngine("abcdef")) as client:
        choice = (await client.complete("p", stop="c", max_tokens=3))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")


@pytest.mark.parametrize("stop", [{}, {"stop": None}, {"stop": []}])
async def test_no_stop_strings_leave_the_models_own_end(stop):
    """O048: absent, null and [] are the same: the model's own end token stops the reply, unseen."""
    async with running(FakeEngine(lambda _: [*text_ids("ab"), *text_ids("cd")])) as client:
        choice = (await client.complete("p", **stop))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
        assert client.engine.submitted[-1].params.stop_token_ids == (END,)


async def test_ignore_eos_runs_on():
    async with running(FakeEngine(lambda _: [*text_ids("ab"), *text_ids("cd")])) as client:
        choice = (await client.complete("p", ignore_eos=True, max_tokens=6))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")


async def test_max_tokens_zero_only_runs_the_prompt():
    """O034: no text, finish "length", usage right; -1 is refused and named."""
    async with running(FakeEngine()) as client:
        body = await client.complete("abc", max_tokens=0)
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "length")
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 0)
        events, _ = await client.stream("/v1/completions", {"model": MODEL, "prompt": "abc", "max_tokens": 0})
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == ["length"]
        status, error, _ = await client.post(
            "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": -1}
        )
        assert (status, error["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("max_tokens", [1, 2, None])
async def test_prompts_around_the_context_limit(max_tokens):
    """O035: CTX - 1 gives exactly one token, CTX and CTX + 1 are refused, and the server goes on."""
    async with running(FakeEngine(context=10)) as client:
        request = {"model": MODEL, "max_tokens": max_tokens}
        for length, tokens in [(8, min(max_tokens or 2, 2)), (9, 1)]:
            status, body, _ = await client.post("/v1/completions", request | {"prompt": "x" * length})
            assert (status, body["usage"]["completion_tokens"]) == (200, tokens)
            assert body["choices"][0]["finish_reason"] == "length"
        for length in (10, 11, 20):
            for stream in (False, True):
                refused = request | {"prompt": "x" * length, "stream": stream}
                status, body, _ = await client.post("/v1/completions", refused)
                assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
                assert body["error"]["param"] == "prompt"


async def test_truncate_caps_max_tokens_and_error_refuses():
    async with running(FakeEngine("x" * 50, context=20)) as client:
        for behaviour in ({}, {"context_length_exceeded_behavior": "truncate"}):
            body = await client.complete("p" * 15, max_tokens=100, **behaviour)
            assert body["usage"]["completion_tokens"] == 5
        strict = {"context_length_exceeded_behavior": "error"}
        assert (await client.complete("p" * 15, max_tokens=5, **strict))["usage"]["total_tokens"] == 20
        assert (await client.complete("p" * 15, **strict))["usage"]["total_tokens"] == 20
        status, body, _ = await client.post(
            "/v1/completions", {"model": MODEL, "prompt": "p" * 15, "max_tokens": 6, **strict}
        )
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert body["error"]["param"] == "max_tokens"


async def test_a_reply_without_an_end_stops_at_the_default():
    """O037: a model that never stops ends with "length", at the default or at the context's end."""
    async with running(FakeEngine("x" * 400), ServerConfig(default_max_tokens=7)) as client:
        body = await client.complete("p")
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (7, "length")


async def test_max_completion_tokens_is_the_same_limit():
    """O073: honoured alone; both must agree."""
    async with running(FakeEngine()) as client:
        assert (await client.complete("p", max_completion_tokens=2))["usage"]["completion_tokens"] == 2
        both = await client.complete("p", max_completion_tokens=2, max_tokens=2)
        assert both["usage"]["completion_tokens"] == 2
        differ = {"model": MODEL, "prompt": "p", "max_tokens": 3, "max_completion_tokens": 2}
        status, body, _ = await client.post("/v1/completions", differ)
        assert (status, body["error"]["param"]) == (400, "max_completion_tokens")


async def test_token_ids_come_when_asked_for():
    async with running(FakeEngine("hé")) as client:
        for choice in (await client.complete(["ab", "c"], return_token_ids=True))["choices"]:
            assert choice["prompt_token_ids"] == [[97, 98], [99]][choice["index"]]
            assert choice["token_ids"] == text_ids("hé")
        plain = (await client.complete("ab"))["choices"][0]
        assert "token_ids" not in plain
        assert "prompt_token_ids" not in plain


async def test_sampling_settings_reach_the_engine_with_the_models_defaults():
    engine = FakeEngine()
    async with running(engine, codec=byte_codec(temperature=0.2, top_p=0.9)) as client:
        await client.complete("p")
        assert (engine.submitted[-1].params.temperature, engine.submitted[-1].params.top_p) == (0.2, 0.9)
        await client.complete("p", temperature=0, top_p=1, top_k=5, min_p=0.1, seed=-7)
        params = engine.submitted[-1].params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 5, 0.1)
        assert params.seed == -7
    async with running(FakeEngine()) as client:
        await client.complete("p")
        params = client.engine.submitted[-1].params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)


async def test_isolation_keys_separate_and_an_empty_key_is_a_key():
    """O008, O009: the key reaches the cache: first use of each cold, second warm; absent is not empty."""
    async with running(FakeEngine()) as client:
        keys = [None, "", "a", "a/b", "ключ"]
        for expected in (0, 3):
            for key in keys:
                body = await client.complete("abcd", prompt_cache_isolation_key=key)
                assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == expected, key


async def test_header_body_and_alias_name_the_same_isolation_key():
    """O107: one rule for header and body; a conflict is refused."""
    engine = FakeEngine()
    async with running(engine) as client:
        for fields, headers in [
            ({"prompt_cache_isolation_key": "k"}, {}),
            ({"cache_salt": "k"}, {}),
            ({}, {"x_prompt_cache_isolation_key": "k"}),
            ({"prompt_cache_isolation_key": "k", "cache_salt": "k"}, {"x_prompt_cache_isolation_key": "k"}),
        ]:
            status, _, _ = await client.post(
                "/v1/completions", {"model": MODEL, "prompt": "p", **fields}, **headers
            )
            assert (status, engine.submitted[-1].namespace.isolation_key) == (200, "k")
        for fields, headers in [
            ({"prompt_cache_isolation_key": "k"}, {"x_prompt_cache_isolation_key": "l"}),
            ({"prompt_cache_isolation_key": "k", "cache_salt": ""}, {}),
            ({"prompt_cache_isolation_key": "k" * 1025}, {}),
        ]:
            status, body, _ = await client.post(
                "/v1/completions", {"model": MODEL, "prompt": "p", **fields}, **headers
            )
            assert (status, body["error"]["param"]) == (400, "prompt_cache_isolation_key")
        with socket.create_connection((client.host, client.port), timeout=10) as sock:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            data = b'{"model": "tiny", "prompt": "p"}'
            odd = b"X-Prompt-Cache-Isolation-Key: \xff\xfe\r\nContent-Length: %d\r\n\r\n" % len(data)
            await asyncio.to_thread(sock.sendall, head + odd + data)
            assert (await asyncio.to_thread(sock.recv, 100)).startswith(b"HTTP/1.1 400 ")


async def test_prompt_cache_max_len_caps_the_match():
    async with running(FakeEngine()) as client:
        await client.complete("abcdef")
        for limit, cached in [(0, 0), (3, 3), (None, 5)]:
            body = await client.complete("abcdef", prompt_cache_max_len=limit)
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_clients_request_ids_never_mix_replies():
    """O044: the same x-request-id on many requests: each choice answers its own prompt."""
    seen: list[EngineRequest] = []

    def reply(request: EngineRequest) -> list[int]:
        seen.append(request)
        return text_ids(bytes(request.prompt).decode())

    async with running(FakeEngine(reply)) as client:
        for text in ("one", "two", "six"):
            status, body, headers = await client.post(
                "/v1/completions", {"model": MODEL, "prompt": [text, text.upper()]}, x_request_id="mine"
            )
            assert (status, headers["x-request-id"]) == (200, "mine")
            assert [c["text"] for c in body["choices"]] == [text, text.upper()]
        assert len({request.request_id for request in seen}) == 6


async def test_broken_bytes_become_replacement_characters():
    """O076: whatever bytes come out, the reply is valid JSON, and streaming says the same."""
    ids = [0xFF, 0x41, 0xE2, 0x82, 0x42, 0xF0, 0x9F, END]
    async with running(FakeEngine(lambda _: ids)) as client:
        text = (await client.complete("p"))["choices"][0]["text"]
        events, _ = await client.stream("/v1/completions", {"model": MODEL, "prompt": "p"})
        assert text == "\ufffdA\ufffdB\ufffd"
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text


@pytest.mark.parametrize("per_delta", [1, 3, 100])
async def test_a_stop_token_is_not_shown_but_counted(per_delta):
    async with running(FakeEngine("abcd", per_delta=per_delta)) as client:
        body = await client.complete(stop_token_ids=[99], return_token_ids=True)
        assert body["choices"][0]["text"] == "ab"
        assert body["choices"][0]["finish_reason"] == "stop"
        plain = await client.complete(stop_token_ids=[99], ignore_eos=True, max_tokens=4)
        assert plain["choices"][0]["text"] == "abcd"
