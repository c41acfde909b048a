"""What clients are told of whatever ends a request: OpenAI's shape, and Anthropic's under its path."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager

import anthropic
import anyio
import openai
import pytest
from aiohttp import ClientPayloadError, ClientSession, web

from engine import (
    ConstraintFailed,
    ContextLengthExceeded,
    EngineUnavailable,
    Overloaded,
    RequestError,
    StepFailed,
)
from server.config import ServerConfig
from server.errors import (
    ApiError,
    anthropic_error,
    error_middleware,
    name_reply,
    speaks_anthropic,
    to_api_error,
)
from server.protocol import make_runner


def failures():
    """Whatever a handler may raise, with what OpenAI's and Anthropic's clients are told."""
    wait = {"Retry-After": "7"}
    return [
        (RequestError("no", param="x"), 400, ("invalid_request_error", "invalid_request"), {}),
        (ContextLengthExceeded("no"), 400, ("invalid_request_error", "context_length_exceeded"), {}),
        (ApiError(401, "no", code="a"), 401, ("invalid_request_error", "a"), {}),
        (ApiError(403, "no"), 403, ("invalid_request_error", None), {}),
        (ApiError(408, "no"), 408, ("invalid_request_error", None), {}),
        (ApiError(413, "no"), 413, ("invalid_request_error", None), {}),
        (ApiError(415, "no"), 415, ("invalid_request_error", None), {}),
        (ApiError(429, "no"), 429, ("invalid_request_error", None), wait),
        (
            ApiError(429, "no", headers={"Retry-After": "1"}),
            429,
            ("invalid_request_error", None),
            {"Retry-After": "1"},
        ),
        (web.HTTPNotFound(), 404, ("invalid_request_error", "not_found"), {}),
        (
            web.HTTPMethodNotAllowed("PUT", ["POST"]),
            405,
            ("invalid_request_error", "method_not_allowed"),
            {"Allow": "POST"},
        ),
        (web.HTTPBadGateway(), 502, ("server_error", None), {}),
        (Overloaded("no"), 503, ("service_unavailable_error", "server_is_overloaded"), wait),
        (EngineUnavailable("no"), 503, ("service_unavailable_error", "not_ready"), wait),
        (ApiError(503, "no", kind="server_error"), 503, ("server_error", None), wait),
        (ConstraintFailed("no"), 400, ("invalid_request_error", "constraint_failed"), {}),
        (StepFailed("no"), 500, ("server_error", "step_failed"), {}),
        (KeyError("secret"), 500, ("server_error", "internal_error"), {}),
    ]


ANTHROPIC = {
    400: (anthropic.BadRequestError, "invalid_request_error"),
    401: (anthropic.AuthenticationError, "authentication_error"),
    403: (anthropic.PermissionDeniedError, "permission_error"),
    404: (anthropic.NotFoundError, "not_found_error"),
    405: (anthropic.APIStatusError, "invalid_request_error"),
    408: (anthropic.APIStatusError, "timeout_error"),
    413: (anthropic.APIStatusError, "request_too_large"),
    415: (anthropic.APIStatusError, "invalid_request_error"),
    429: (anthropic.RateLimitError, "rate_limit_error"),
    500: (anthropic.InternalServerError, "api_error"),
    502: (anthropic.InternalServerError, "api_error"),
    503: (anthropic.InternalServerError, "overloaded_error"),
}


@asynccontextmanager
async def failing(*exceptions, begun=False):
    """Serve an application that raises one exception after the other, with part of its reply sent or not."""
    left = iter(exceptions)

    async def handle(request):
        if begun:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"part")
        raise next(left)

    app = web.Application(middlewares=[error_middleware(7)])
    app.on_response_prepare.append(name_reply)
    app.router.add_post("/{path:.*}", handle)
    runner = make_runner(app, ServerConfig())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


async def test_every_failure_has_openais_shape(caplog):
    """O056: status, type, code and headers of whatever ends a request."""
    found = failures()
    async with failing(*(exc for exc, *_ in found)) as url, ClientSession() as session:
        for exc, status, words, headers in found:
            async with session.post(url + "/v1/x", headers={"x-request-id": "r1"}) as response:
                body = await response.json()
                assert response.status == status, exc
                assert set(body["error"]) == {"message", "type", "param", "code"}
                assert (body["error"]["type"], body["error"]["code"]) == words
                assert headers.items() <= dict(response.headers).items()
                assert ("Retry-After" in response.headers) == (status in (429, 503))
                assert response.headers["x-request-id"] == "r1"
                assert "secret" not in json.dumps(body)


async def test_every_failure_has_anthropics_shape_under_its_path(caplog):
    """O056: as the anthropic client reads it, with the request's id in body and header."""
    found = failures()
    async with (
        failing(*(exc for exc, *_ in found)) as url,
        anthropic.AsyncAnthropic(api_key="x", base_url=url, max_retries=0) as user,
    ):
        for exc, status, (_, code), _ in found:
            kind, word = ANTHROPIC[status]
            with pytest.raises(kind) as caught:
                await user.messages.create(model="m", max_tokens=1, messages=[])
            error = caught.value
            assert error.status_code == status, exc
            assert error.body.keys() == {"type", "error", "request_id"}
            assert error.body["type"] == "error"
            details = {} if code is None else {"details": {"error_code": code}}
            assert error.body["error"] == {"type": word, "message": error.body["error"]["message"]} | details
            assert error.type == word
            assert error.body["request_id"] == error.request_id
            assert re.fullmatch(r"req-[0-9a-f]{32}", error.request_id)


@pytest.mark.parametrize("failure", [Overloaded("full"), ApiError(429, "slow down")])
async def test_clients_wait_and_try_again_when_told_to(failure, monkeypatch):
    """429 and 503 are retried by both clients after the seconds that Retry-After names."""
    waits = []

    async def wait(seconds):
        waits.append(seconds)

    monkeypatch.setattr(anyio, "sleep", wait)
    for kind in (openai.AsyncOpenAI, anthropic.AsyncAnthropic):
        async with (
            failing(failure, failure, ApiError(400, "enough")) as url,
            kind(api_key="x", base_url=url, max_retries=2) as user,
        ):
            calls = user.messages if kind is anthropic.AsyncAnthropic else user.chat.completions
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="enough"):
                await calls.create(model="m", max_tokens=1, messages=[])
    assert waits == [7, 7, 7, 7]


async def test_a_reply_that_has_begun_and_breaks_is_cut_and_logged_once(caplog):
    async with (
        failing(KeyError("bug"), begun=True) as url,
        ClientSession() as session,
        session.post(url + "/v1/x") as response,
    ):
        assert response.status == 200
        with pytest.raises(ClientPayloadError):
            await response.read()
    (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "bug" in logged.getMessage()


async def test_part_of_a_reply_is_never_followed_by_an_error_body(caplog):
    async with failing(web.HTTPNotFound(), begun=True) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read()).endswith(b"\r\n\r\n4\r\npart\r\n")
        writer.close()


@pytest.mark.parametrize(
    ("path", "anthropics"),
    [
        ("/v1/messages", True),
        ("/inference/v1/messages", True),
        ("/v1/messages/count_tokens", True),
        ("/v1/messages/a\nb", True),
        ("/v1/messages/", True),
        ("/v1/messagesx", False),
        ("/x/v1/messages", False),
        ("/v1/chat/completions", False),
        ("/", False),
    ],
)
def test_anthropics_words_are_for_its_path_alone(path, anthropics):
    assert speaks_anthropic(path) is anthropics


def test_a_stream_that_breaks_is_told_of_in_anthropics_words():
    """There the status is sent already, so the error's own kind decides."""
    for exc, word in [
        (EngineUnavailable("stopped"), "overloaded_error"),
        (StepFailed("boom"), "api_error"),
        (ConstraintFailed("lost"), "invalid_request_error"),
        (ValueError("secret"), "api_error"),
        (RequestError("no"), "invalid_request_error"),
    ]:
        body = anthropic_error(to_api_error(exc, retry_after=1).object, request_id="r")
        assert (body.type, body.error.type, body.request_id) == ("error", word, "r")
