"""API keys at the door: who is let in, who is told to bring a key, and whose cache they get."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import anthropic
import openai
import pytest

from engine import ConfigError
from server.app import create_app
from server.config import ServerConfig
from server.tenancy.keys import entry_line, new_key
from tests.server.fakes import MODEL, FakeEngine, byte_codec, chat_body, running

KEY, OTHER = new_key(), new_key()
BODY = {"model": MODEL, "prompt": "abcdef"}


@pytest.fixture
def locked(tmp_path):
    """A config whose keys file lets in KEY for acme and OTHER for bond."""

    def config(mode="dedicated", **settings):
        path = tmp_path / "keys"
        path.write_text(entry_line(KEY, "acme") + "\n" + entry_line(OTHER, "bond"))
        path.chmod(0o600)
        return ServerConfig(mode=mode, api_keys_file=str(path), **settings)

    return config


async def ask(client, *headers, path="/v1/completions", method="POST", body=BODY, length=None):
    """Send a request by the byte; return status, headers and decoded body."""
    data = json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: x", b"Content-Type: application/json", *headers]
    lines.append(b"Content-Length: %d" % (length or len(data)))
    reader, writer = await asyncio.open_connection(client.host, client.port)
    try:
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if length else data))
        async with asyncio.timeout(10):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            found = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if line)
            answer = await reader.readexactly(int(found["content-length"])) if method != "HEAD" else b""
    finally:
        writer.close()
    assert found.get("content-type", "").startswith("application/json") or method == "HEAD"
    return int(head.split()[1]), found, json.loads(answer or "null")


def bearer(key=KEY, scheme="Bearer"):
    return f"Authorization: {scheme} {key}".encode()


@pytest.mark.parametrize(
    "headers",
    [
        [bearer()],
        [bearer(scheme="bearer")],
        [bearer(scheme="BEARER")],
        [b"authorization:   Bearer    " + KEY.encode() + b"  "],
        [b"x-api-key: " + KEY.encode()],
        [b"X-API-KEY: " + KEY.encode()],
        [bearer(), b"x-api-key: " + KEY.encode()],
        [bearer(), b"x-api-key: "],
        [b"Authorization: Bearer ", b"x-api-key: " + KEY.encode()],
    ],
)
async def test_a_key_is_taken_in_every_form_that_clients_send(locked, headers):
    async with running(FakeEngine(), locked()) as client:
        status, _, answer = await ask(client, *headers)
        assert status == 200
        assert answer["choices"][0]["text"] == "Hello world"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [b"Authorization: "],
        [b"Authorization: Bearer"],
        [b"Authorization: Bearer "],
        [b"Authorization: " + KEY.encode()],
        [b"Authorization: Basic " + KEY.encode()],
        [b"Authorization: Bearer\t" + KEY.encode()],
        [b"Authorization: Bearer " + KEY.encode() + b" " + KEY.encode()],
        [bearer(KEY[:-1])],
        [bearer(KEY + "x")],
        [bearer(KEY.upper())],
        [bearer("sk-wrong")],
        [b"Authorization: Bearer \xff\xfe\xe9"],
        [b"Authorization: \xc3\xa4 " + KEY.encode()],
        [b"Authorization: Bearer " + b"x" * 8000],
        [b"x-api-key: "],
        [b"x-api-key: wrong"],
        [b"x-api-key: \xff"],
        [b"x-api-key: Bearer " + KEY.encode()],
        [bearer(), bearer()],
        [bearer(), bearer("wrong")],
        [b"x-api-key: " + KEY.encode(), b"x-api-key: " + KEY.encode()],
        [bearer(), b"x-api-key: wrong"],
        [bearer(), b"x-api-key: " + OTHER.encode()],
        [b"Cookie: key=" + KEY.encode()],
    ],
)
async def test_whatever_else_is_sent_is_a_401_in_the_error_shape(locked, headers):
    """O086: odd, doubled, empty, non-ASCII and huge headers are refused, none ends in a 500."""
    async with running(FakeEngine(), locked()) as client:
        status, found, answer = await ask(client, *headers)
        assert status == 401
        assert found["www-authenticate"] == "bearer"
        assert found["x-request-id"]
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert KEY not in error["message"]
        assert client.engine.submitted == []


async def test_a_key_of_a_megabyte_never_becomes_a_request(locked):
    """O086: the transport refuses it in the same shape."""
    async with running(FakeEngine(), locked()) as client:
        status, _, answer = await ask(client, bearer("x" * 1_000_000))
        assert (status, answer["error"]["code"]) == (400, "bad_http")


async def test_only_what_operators_and_browsers_need_is_open(locked):
    """Paths that don't exist are closed, too; so a new one is never open by oversight."""
    async with running(FakeEngine(), locked()) as client:
        for prefix in ("", "/inference/v1"):
            for path in ("/health", "/ready", "/metrics"):
                for method in ("GET", "HEAD"):
                    async with client.session.request(method, client.url + prefix + path) as response:
                        assert response.status == 200, (method, prefix + path)
        for path in (
            "/v1/models",
            "/v1/models/" + MODEL,
            "/v1/nothing",
            "/nothing",
            "/",
            "/health/",
            "//health",
        ):
            for prefix in ("", "/inference"):
                for method in ("GET", "HEAD", "PUT"):
                    status, _, _ = await ask(client, path=prefix + path, method=method)
                    assert status == 401, (method, prefix + path)
        # A method that does no work needs no key: browsers send it without one.
        assert (await ask(client, method="OPTIONS"))[0] == 405
        assert (await ask(client, bearer(), path="/v1/nothing"))[0] == 404
        assert (await ask(client, bearer(), path="/v1/models", method="PUT"))[0] == 405


async def test_the_key_is_checked_before_any_of_the_body_is_read(locked):
    async with running(FakeEngine(), locked()) as client:
        status, _, answer = await ask(client, length=30_000_000)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        status, _, answer = await ask(client, length=1_000_000_000)
        assert status == 401
        status, _, answer = await ask(client, bearer(), length=1_000_000_000)
        assert status == 413


async def test_without_a_keys_file_any_key_or_none_is_let_in():
    async with running(FakeEngine()) as client:
        for headers in ([], [bearer("whatever")], [bearer(), bearer()], [b"Authorization: \xff"]):
            assert (await ask(client, *headers))[0] == 200


async def test_no_key_is_ever_logged(locked, caplog):
    caplog.set_level(logging.DEBUG)
    async with running(FakeEngine(), locked(log_level="debug")) as client:
        assert (await ask(client, bearer()))[0] == 200
        assert (await ask(client, bearer("wrong-but-secret")))[0] == 401
        assert (await ask(client, b"x-api-key: " + KEY.encode(), b"Broken header"))[0] == 400
    assert KEY not in caplog.text
    assert "wrong-but-secret" not in caplog.text


async def cached_tokens(client, key, **fields):
    status, body, _ = await client.post("/v1/completions", BODY | fields, authorization=f"Bearer {key}")
    assert status == 200, body
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_an_account_gets_nothing_by_naming_anothers_isolation_key(locked):
    """O011: with keys on, the caller's account stands in front of what the client names."""
    async with running(FakeEngine(), locked()) as client:
        for fields in ({"prompt_cache_isolation_key": "k"}, {"cache_salt": ""}):
            assert await cached_tokens(client, KEY, **fields) == 0
            assert await cached_tokens(client, OTHER, **fields) == 0
            assert await cached_tokens(client, KEY, **fields) == 5
        # Without an isolation key a dedicated server's cache is everybody's.
        assert await cached_tokens(client, KEY) == 0
        assert await cached_tokens(client, OTHER) == 5


async def test_serverless_gives_each_account_a_cache_of_its_own(locked):
    """O011: the same prompt of two accounts meets nowhere, with isolation keys or without."""
    async with running(FakeEngine(), locked("serverless")) as client:
        for fields in ({}, {"cache_salt": ""}, {"cache_salt": "acme"}):
            for key in (KEY, OTHER):
                assert await cached_tokens(client, key, **fields) == 0
            for key in (KEY, OTHER):
                assert await cached_tokens(client, key, **fields) == 5


async def test_chats_are_bound_to_accounts_as_well(locked):
    async with running(FakeEngine(), locked("serverless")) as client:
        for key, account in ((KEY, "acme"), (OTHER, "bond")):
            status, _, _ = await client.post(
                "/v1/chat/completions", chat_body(), authorization=f"Bearer {key}"
            )
            assert status == 200
            assert client.engine.submitted[-1].namespace.account == account


async def test_serverless_does_not_start_without_keys():
    engine = FakeEngine()
    with pytest.raises(ConfigError, match="HEADWATER_API_KEYS_FILE"):
        create_app(engine, byte_codec(), ServerConfig(mode="serverless"))
    await engine.close()


async def test_the_openai_client_is_let_in_and_told(locked):
    """O056: its typed exception carries our message."""
    async with running(FakeEngine(), locked()) as client:
        url = client.url + "/v1"
        async with openai.AsyncOpenAI(api_key=KEY, base_url=url, max_retries=0) as user:
            reply = await user.completions.create(model=MODEL, prompt="abc")
            assert reply.choices[0].text == "Hello world"
        async with openai.AsyncOpenAI(api_key="sk-old", base_url=url, max_retries=0) as user:
            with pytest.raises(openai.AuthenticationError, match="not known here") as caught:
                await user.completions.create(model=MODEL, prompt="abc")
            assert caught.value.code == "invalid_api_key"
            assert re.fullmatch(r"req-[0-9a-f]{32}", caught.value.request_id)


async def test_the_anthropic_client_is_told_in_its_own_words(locked):
    async with running(FakeEngine(), locked()) as client:
        for given in ({"api_key": "wrong"}, {"auth_token": "wrong"}):
            async with anthropic.AsyncAnthropic(base_url=client.url, max_retries=0, **given) as user:
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    await user.messages.create(
                        model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "hi"}]
                    )
            assert caught.value.type == "authentication_error"
            assert caught.value.api_message == "The API key is not known here"
            assert caught.value.request_id == caught.value.body["request_id"]
