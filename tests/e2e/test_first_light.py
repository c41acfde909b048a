"""The main job, end to end: clients stream completions from the real model, and the cache is exact."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

MODEL = "smollm2-135m-instruct"
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def http(server: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server) as session:
        yield session


def ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40000) for _ in range(length)]


async def complete(http: aiohttp.ClientSession, prompt: object, **fields: object) -> tuple[dict, dict]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    async with http.post("/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json(), dict(reply.headers)


def cached(body: dict) -> int:
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_the_capital_of_france_is_paris(server: str) -> None:
    async with openai.AsyncOpenAI(base_url=server + "/v1", api_key="none") as client:
        reply = await client.chat.completions.create(
            model=MODEL, messages=PARIS, temperature=0, max_tokens=30
        )
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"


async def test_the_openai_client_streams_and_sees_the_cache(server: str) -> None:
    """A chat streamed twice: the same text, the second time all but one token from the cache."""
    messages = [{"role": "system", "content": "Answer in one word. Be precise. " * 12}, *PARIS]
    replies = []
    async with openai.AsyncOpenAI(base_url=server + "/v1", api_key="none") as client:
        for _ in range(2):
            text, usage = "", None
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=20, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                usage = chunk.usage or usage
            assert usage is not None
            replies.append((text, usage))
    (cold_text, cold), (warm_text, warm) = replies
    assert cold_text == warm_text != ""
    assert warm.prompt_tokens_details.cached_tokens == warm.prompt_tokens - 1
    assert cold.prompt_tokens_details.cached_tokens < 64 < warm.prompt_tokens


async def test_a_repeat_reports_all_but_one_token_in_body_and_headers(http: aiohttp.ClientSession) -> None:
    prompt = ids(333, 1)
    first, _ = await complete(http, prompt)
    again, headers = await complete(http, prompt)
    assert cached(first) == 0
    assert cached(again) == 332
    assert headers["fireworks-prompt-tokens"] == headers["x-headwater-prompt-tokens"] == "333"
    assert headers["fireworks-cached-prompt-tokens"] == headers["x-headwater-cached-prompt-tokens"] == "332"
    assert first["choices"] == again["choices"]


async def test_divergence_at_token_k_reports_k(http: aiohttp.ClientSession) -> None:
    base = ids(300, 2)
    await complete(http, base)
    for k in (1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 272, 299):
        body, _ = await complete(http, [*base[:k], 999, *ids(3, 1000 + k)])
        assert cached(body) == k


async def test_sixteen_cold_streams_of_one_prefix_compute_it_once(http: aiohttp.ClientSession) -> None:
    """O018: 16 requests of one cold prefix of 1,500 tokens, together; /metrics counts the rows that ran."""
    before = await rows(http)
    prefix = ids(1500, 3)
    replies = await asyncio.gather(*(complete(http, [*prefix, 500 + i], max_tokens=1) for i in range(16)))
    assert await rows(http) - before == 1500 + 16
    assert sorted(cached(body) for body, _ in replies) == [0] + [1500] * 15


async def rows(http: aiohttp.ClientSession) -> int:
    """Rows that the engine has run."""
    async with http.get("/metrics") as reply:
        lines = (await reply.text()).splitlines()
    (value,) = (line.split()[-1] for line in lines if line.startswith("headwater_computed_rows_total"))
    return int(float(value))


async def test_isolation_keys_share_nothing(http: aiohttp.ClientSession) -> None:
    """O008: five keys and none: each is cold once, then warm."""
    prompt = ids(450, 4)
    keys = [None, "", "a", "b", "a b"]
    for expected in (0, 449):
        for key in keys:
            assert cached((await complete(http, prompt, prompt_cache_isolation_key=key))[0]) == expected


async def test_two_hundred_at_once_are_all_answered(http: aiohttp.ClientSession) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(http._base_url, connector=connector) as many:
        replies = await asyncio.gather(*(complete(many, ids(8, i), max_tokens=2) for i in range(200)))
    assert all(body["usage"]["completion_tokens"] == 2 for body, _ in replies)


async def test_raw_stream_has_one_event_a_line_and_ends_with_done(http: aiohttp.ClientSession) -> None:
    body = {"model": MODEL, "messages": PARIS, "temperature": 0, "max_tokens": 12, "stream": True}
    async with http.post("/inference/v1/chat/completions", json=body) as reply:
        assert reply.content_type == "text/event-stream"
        lines = [line for line in (await reply.text()).split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert "Paris" in "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
