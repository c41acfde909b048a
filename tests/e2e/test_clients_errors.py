"""Errors as the clients' typed exceptions, and the clients' own retries."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import anthropic
import fireworks
import openai
import pytest

from server.config import ServerConfig
from server.tenancy.keys import entry_line, new_key
from tests.e2e.clients import MODEL, user
from tests.server.fakes import MODEL as FAKE
from tests.server.fakes import Client, FakeEngine, running, until

HI = [user("Hi")]


@pytest.mark.parametrize(
    ("fields", "param", "value"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"top_p": 1.5}, "top_p", "1.5"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "99"),
        ({"n": 0}, "n", "0"),
        ({"max_tokens": "many"}, "max_tokens", "many"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_field_is_named_with_its_value(
    openai_client: openai.OpenAI, fields: dict[str, Any], param: str, value: str
) -> None:
    """O055, O056: a BadRequestError with message, param, type and code."""
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model=MODEL, messages=HI, **fields)
    error = caught.value
    assert (error.status_code, error.param, error.type) == (400, param, "invalid_request_error")
    assert error.code == "invalid_request"
    assert value in error.message
    assert error.request_id is not None


def test_every_dialect_has_its_typed_exceptions(
    openai_client: openai.OpenAI,
    fireworks_client: fireworks.Fireworks,
    anthropic_client: anthropic.Anthropic,
) -> None:
    """O056: 400, 404 and a prompt beyond the context, in each client's words."""
    with pytest.raises(openai.NotFoundError) as missing:
        openai_client.chat.completions.create(model="other", messages=HI)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        openai_client.embeddings.create(model=MODEL, input="text")
    with pytest.raises(fireworks.NotFoundError, match="is not served here"):
        fireworks_client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(anthropic.NotFoundError, match="is not served here") as lost:
        anthropic_client.messages.create(model="other", messages=HI, max_tokens=1)
    assert lost.value.type == "not_found_error"
    with pytest.raises(openai.BadRequestError) as long:
        openai_client.completions.create(model=MODEL, prompt=[5000] * 8192)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as bad:
        anthropic_client.messages.create(model=MODEL, messages=HI, max_tokens=-1)
    assert bad.value.type == "invalid_request_error"


async def test_a_wrong_key_is_an_authentication_error_everywhere(tmp_path: Path) -> None:
    """O056: 401 in each client's words, and the right key is let in."""
    key, file = new_key(), tmp_path / "keys"
    file.write_text(entry_line(key, "tests"))
    config = ServerConfig(api_keys_file=str(file))
    async with running(FakeEngine("Hello"), config) as served:
        for raised, call in (
            (openai.AuthenticationError, ask_openai),
            (fireworks.AuthenticationError, ask_fireworks),
            (anthropic.AuthenticationError, ask_anthropic),
        ):
            with pytest.raises(raised):
                await call(served, "wrong")
            assert await call(served, key) == "Hello"


async def test_clients_wait_as_long_as_they_are_told_and_try_again(caplog: pytest.LogCaptureFixture) -> None:
    """A full server refuses all three with Retry-After; each comes back by itself and is answered."""
    caplog.set_level(logging.INFO)
    engine = FakeEngine("Hello", max_running=1, max_waiting=1)
    engine.gate.clear()
    waits: list[float] = []
    async with running(engine, ServerConfig(retry_after=1)) as served, asyncio.TaskGroup() as group:
        for _ in "12":
            group.create_task(served.chat())
        await until(lambda: len(engine.live) == 2)
        before = len(engine.submitted)
        calls = [ask(served, "none", retries=1, waits=waits) for ask in ASKS]
        answers = [group.create_task(call) for call in calls]
        await until(lambda: len(waits) == 3)
        assert len(engine.submitted) == before
        engine.max_running = 5
        engine.gate.set()
        assert [await answer for answer in answers] == ["Hello"] * 3
    assert waits == [1.0, 1.0, 1.0]
    # Their own words for how long they wait; without the header it would be half a second at most.
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Retrying request")]
    assert len(said) == 3
    assert all("in 1.000000 seconds" in line for line in said)


async def test_without_retries_a_full_server_is_a_typed_exception() -> None:
    """O056: 503 with the reason, before anything was begun."""
    engine = FakeEngine("Hello", max_running=1, max_waiting=1)
    engine.gate.clear()
    async with running(engine) as served, asyncio.TaskGroup() as group:
        for _ in "12":
            group.create_task(served.chat())
        await until(lambda: len(engine.live) == 2)
        with pytest.raises(openai.InternalServerError) as full:
            await ask_openai(served, "none")
        assert (full.value.status_code, full.value.code) == (503, "server_is_overloaded")
        with pytest.raises(fireworks.InternalServerError):
            await ask_fireworks(served, "none")
        with pytest.raises(anthropic.InternalServerError) as busy:
            await ask_anthropic(served, "none")
        assert busy.value.type == "overloaded_error"
        engine.gate.set()


async def test_a_failure_in_mid_stream_is_an_exception_and_no_short_reply() -> None:
    """O079: after some text each client raises; none takes what it has for the whole reply."""
    async with running(FakeEngine("Hello world", fail_after=3)) as served:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model=FAKE, messages=HI, stream=True)
            told: list[str] = []
            with pytest.raises(openai.APIError, match="boom"):
                await read(stream, told)
        assert "".join(told) == "Hel"
        async with (
            anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as other,
            other.messages.stream(model=FAKE, messages=HI, max_tokens=20) as events,
        ):
            with pytest.raises(anthropic.APIStatusError, match="boom"):
                await events.get_final_message()


async def read(stream: Any, told: list[str]) -> None:
    async for chunk in stream:
        told.append(chunk.choices[0].delta.content or "")


def noting(waits: list[float]) -> dict[str, Any]:
    """Hooks that note Retry-After of each refusal, as the client sees it."""

    async def hook(response: Any) -> None:
        if response.status_code == 503:
            waits.append(float(response.headers["retry-after"]))

    return {"event_hooks": {"response": [hook]}}


async def ask_openai(served: Client, key: str, retries: int = 0, waits: list[float] | None = None) -> Any:
    async with openai.AsyncOpenAI(
        base_url=served.url + "/v1",
        api_key=key,
        max_retries=retries,
        http_client=openai.DefaultAsyncHttpxClient(**noting([] if waits is None else waits)),
    ) as client:
        reply = await client.chat.completions.create(model=FAKE, messages=HI)
    return reply.choices[0].message.content


async def ask_fireworks(served: Client, key: str, retries: int = 0, waits: list[float] | None = None) -> Any:
    async with fireworks.AsyncFireworks(
        base_url=served.url,
        api_key=key,
        max_retries=retries,
        http_client=fireworks.DefaultAsyncHttpxClient(**noting([] if waits is None else waits)),
    ) as client:
        reply = await client.chat.completions.create(model=FAKE, messages=HI)
    return reply.choices[0].message.content


async def ask_anthropic(served: Client, key: str, retries: int = 0, waits: list[float] | None = None) -> Any:
    async with anthropic.AsyncAnthropic(
        base_url=served.url,
        api_key=key,
        max_retries=retries,
        http_client=anthropic.DefaultAsyncHttpxClient(**noting([] if waits is None else waits)),
    ) as client:
        reply = await client.messages.create(model=FAKE, messages=HI, max_tokens=20)
    return reply.content[0].text


ASKS = [ask_openai, ask_fireworks, ask_anthropic]
