"""What streams promise: the same reply as without, exact shapes, one end, usage where it belongs."""

from __future__ import annotations

import asyncio
import json

import pytest

from server.config import ServerConfig
from server.sse import encode_event
from tests.server.fakes import END, MODEL, FakeEngine, chat_body, events_of, running, text_ids, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def completion(prompt="abc", **fields):
    return {"model": MODEL, "prompt": prompt, **fields}


def choices_of(events):
    return [choice for event in events if event != "[DONE]" for choice in event["choices"]]


@pytest.mark.parametrize("per_delta", [1, 2, 50])
@pytest.mark.parametrize("stop", [None, "wor", "never there, and long"])
async def test_a_stream_adds_up_to_the_whole_reply(per_delta, stop):
    """O050, O054: text, ids, finish and completion_tokens are equal, streamed or not."""
    engine = FakeEngine("héllo wörld 👩🏽‍🚀 ok", per_delta=per_delta)
    async with running(engine) as client:
        fields = {"stop": stop, "return_token_ids": True}
        for prompts in ("abc", ["abc", "de"]):
            whole = await client.complete(prompts, **fields)
            events, _ = await client.stream(COMPLETIONS, completion(prompts, **fields))
            pieces = choices_of(events)
            for choice in whole["choices"]:
                mine = [piece for piece in pieces if piece["index"] == choice["index"]]
                assert "".join(piece["text"] for piece in mine) == choice["text"]
                assert [i for piece in mine for i in piece["token_ids"]] == choice["token_ids"]
                assert mine[-1]["finish_reason"] == choice["finish_reason"]
                assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
                assert all("prompt_token_ids" not in piece for piece in mine[1:])
            assert events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
            assert "\ufffd" not in "".join(piece["text"] for piece in pieces)


@pytest.mark.parametrize("reply", ["Hello world", "", "é"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_each_choice_ends_once_and_no_delta_in_the_middle_is_empty(reply, path):
    """O047, O053: one finish reason, in the last chunk; a held-back stop string gives no empty deltas."""
    async with running(FakeEngine(reply)) as client:
        body = chat_body() if path == CHAT else completion()
        events, _ = await client.stream(path, body | {"stop": "world" + "x" * 35})
        pieces = choices_of(events)
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
        if path == CHAT:
            texts = [piece["delta"].get("content") for piece in pieces]
            assert texts[-1] is None
            assert pieces[0]["delta"]["role"] == "assistant"
            assert all("role" not in piece["delta"] for piece in pieces[1:])
        else:
            texts = [piece["text"] for piece in pieces]
            assert texts[-1] == ""
        assert "" not in texts[1:-1]
        assert "".join(filter(None, texts)) == reply
        assert events[-1] == "[DONE]"


async def test_usage_rides_on_the_last_finish_chunk_by_default():
    async with running(FakeEngine()) as client:
        request = completion(["abc", "d"], perf_metrics_in_response=True)
        events, headers = await client.stream(COMPLETIONS, request)
        *early, last, done = events
        assert done == "[DONE]"
        assert all("usage" not in event and "perf_metrics" not in event for event in early)
        assert last["choices"][0]["finish_reason"] == "stop"
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (4, 24)
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 4}
        metrics = last["perf_metrics"]
        assert metrics["prompt-tokens"] == headers["fireworks-prompt-tokens"] == "4"
        assert float(metrics["server-time-to-first-token"]) <= float(metrics["server-processing-time"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_include_usage_moves_it_behind_the_choices(path):
    async with running(FakeEngine()) as client:
        body = chat_body() if path == CHAT else completion()
        options = {"stream_options": {"include_usage": True}, "perf_metrics_in_response": True}
        events, _ = await client.stream(path, body | options)
        *early, last, done = events
        assert done == "[DONE]"
        assert all(event["usage"] is None and event["choices"] for event in early)
        assert "perf_metrics" in early[-1]
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 12


async def test_include_usage_false_leaves_it_out():
    async with running(FakeEngine()) as client:
        options = {"stream_options": {"include_usage": False}}
        events, _ = await client.stream(COMPLETIONS, completion(**options))
        assert all("usage" not in event for event in events[:-1])


async def test_headers_go_out_with_the_first_token():
    async with running(FakeEngine()) as client:
        await client.complete("abcdef")
        _, headers = await client.stream(COMPLETIONS, completion("abcdef"))
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert headers["fireworks-prompt-tokens"] == "6"
        assert headers["fireworks-cached-prompt-tokens"] == "5"
        assert float(headers["fireworks-server-time-to-first-token"]) > 0
        assert "fireworks-server-processing-time" not in headers
        assert headers["x-headwater-cached-prompt-tokens"] == "5"
        assert headers["x-request-id"]


async def test_a_failure_before_the_first_token_keeps_its_status():
    """The headers wait for the first token, so the client sees 500 and not a broken 200."""
    async with running(FakeEngine(fail_after=0)) as client:
        status, body, headers = await client.post(COMPLETIONS, completion(stream=True))
        assert (status, body["error"]["code"]) == (500, "step_failed")
        assert headers["fireworks-prompt-tokens"] == "3"


async def test_a_failure_in_mid_stream_is_an_error_event_and_the_end():
    """O079: no [DONE] and no finish reason, so that nobody takes the piece for the whole."""
    async with running(FakeEngine(fail_after=3)) as client:
        events, _ = await client.stream(COMPLETIONS, completion())
        assert "".join(choice["text"] for event in events[:-1] for choice in event["choices"]) == "Hel"
        assert events[-1]["error"]["code"] == "step_failed"
        assert events[-1]["usage"]["completion_tokens"] == 3
        status, body, _ = await client.post(COMPLETIONS, completion())
        assert (status, body["error"]["type"]) == (500, "server_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failed_choice_ends_the_others_of_its_request(stream):
    """The reply can't be whole any more, so nothing goes on generating for it."""
    engine = FakeEngine("x" * 400, pace=0.001, fail_after=lambda r: 3 if r.prompt == (98,) else None)
    async with running(engine) as client:
        async with client.session.post(
            client.url + COMPLETIONS, json=completion(["a", "b", "c"], stream=stream)
        ) as response:
            text = await response.text()
            assert response.status == (200 if stream else 500)
        last = events_of(text)[-1] if stream else json.loads(text)
        assert last["error"]["code"] == "step_failed"
        await until(lambda: not engine.live)
        assert engine.finished == {"error": 1, "abort": 2}
        assert (await client.complete("q", max_tokens=2))["usage"]["completion_tokens"] == 2


async def test_a_slow_first_token_is_bridged_by_comments():
    """O080: after headers_after seconds the headers go out without the TTFT, then comments keep alive."""
    engine = FakeEngine()
    engine.gate.clear()
    async with running(engine, ServerConfig(headers_after=0.02, heartbeat=0.1)) as client:
        async with client.session.post(client.url + COMPLETIONS, json=completion(stream=True)) as response:
            assert response.status == 200
            assert "fireworks-server-time-to-first-token" not in response.headers
            assert "fireworks-cached-prompt-tokens" not in response.headers
            first = [await response.content.readline() for _ in range(4)]
            assert first == [b": waiting\n", b"\n"] * 2
            engine.gate.set()
            text = (await response.read()).decode()
        events = [event for event in events_of(text) if event]
        assert "".join(choice["text"] for choice in choices_of(events)) == "Hello world"
        assert events[-1] == "[DONE]"


async def test_line_ends_inside_text_never_split_an_event():
    """O078: one JSON a data line; U+2028, U+2029, U+0085 and CR are escaped."""
    reply = "a\u2028b\u2029c\u0085d\re\nf✓"
    async with running(FakeEngine(reply, per_delta=100)) as client:
        async with client.session.post(client.url + COMPLETIONS, json=completion(stream=True)) as response:
            text = (await response.read()).decode()
        assert all(line.startswith("data: ") or line == "" for line in text.splitlines())
        assert choices_of(events_of(text))[0]["text"] == reply
    assert encode_event("x\u2028") == b'data: "x\\u2028"\n\n'


async def test_ids_of_tokens_without_text_wait_for_the_next_event():
    """Half a character has ids but no text: its ids come with the text, none is lost."""
    async with running(FakeEngine("€")) as client:
        events, _ = await client.stream(COMPLETIONS, completion(return_token_ids=True))
        assert [choice["token_ids"] for choice in choices_of(events)] == [text_ids("€", end=False), [END]]


async def test_streams_run_side_by_side():
    """Two hundred at once: every one gets its own whole reply."""
    engine = FakeEngine(lambda request: text_ids(bytes(request.prompt).decode() * 3), max_running=20)
    async with running(engine) as client:
        prompts = [f"[{number}]" for number in range(200)]
        replies = await asyncio.gather(*(client.stream(COMPLETIONS, completion(p)) for p in prompts))
        for prompt, (events, _) in zip(prompts, replies, strict=True):
            assert "".join(choice["text"] for choice in choices_of(events)) == prompt * 3
            assert events[-1] == "[DONE]"
        await until(lambda: not engine.live)
