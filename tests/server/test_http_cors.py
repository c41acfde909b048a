"""CORS: pages in browsers that are allowed can use the server, and read errors and streams too."""

from __future__ import annotations

import pytest

from engine import ConfigError
from server.config import ServerConfig
from server.cors import Cors
from server.tenancy.keys import entry_line, new_key
from tests.server.fakes import MODEL, FakeEngine, running

PAGE = "https://app.example.com"
LOCAL = "http://localhost:3000"
BODY = {"model": MODEL, "prompt": "abc"}
ASKED = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def listed(**settings):
    return ServerConfig(cors_origins=f" {PAGE}, {LOCAL},", **settings)


async def send(client, method, path, headers, body=None):
    async with client.session.request(method, client.url + path, headers=headers, json=body) as response:
        return response.status, response.headers, await response.read()


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/inference/v1/chat/completions", "/health", "/v1/nothing"]
)
async def test_a_preflight_is_answered_without_a_key(tmp_path, path):
    """O086: browsers send no key with it; every header that a page wants to send is allowed."""
    key = new_key()
    (tmp_path / "keys").write_text(entry_line(key, "acme"))
    async with running(FakeEngine(), listed(api_keys_file=str(tmp_path / "keys"))) as client:
        status, headers, body = await send(client, "OPTIONS", path, ASKED)
        assert (status, body) == (204, b"")
        assert headers["Access-Control-Allow-Origin"] == PAGE
        assert headers["Access-Control-Allow-Methods"] == "GET, HEAD, POST"
        assert headers["Access-Control-Allow-Headers"] == "authorization,content-type,x-stainless-os"
        assert int(headers["Access-Control-Max-Age"]) > 0
        assert headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in headers
        status, headers, _ = await send(client, "POST", "/v1/completions", {"Origin": PAGE}, BODY)
        assert (status, headers["Access-Control-Allow-Origin"]) == (401, PAGE)
        given = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
        assert (await send(client, "POST", "/v1/completions", given, BODY))[0] == 200


@pytest.mark.parametrize("wanted", [None, "", "x-a, <script>", "x" * 5000, "é"])
async def test_a_preflight_without_usable_header_names_allows_the_usual_ones(wanted):
    asked = {name: value for name, value in ASKED.items() if name != "Access-Control-Request-Headers"}
    asked |= {} if wanted is None else {"Access-Control-Request-Headers": wanted}
    async with running(FakeEngine(), listed()) as client:
        status, headers, _ = await send(client, "OPTIONS", "/v1/completions", asked)
        assert status == 204
        assert headers["Access-Control-Allow-Headers"] == "authorization, content-type, x-api-key"


@pytest.mark.parametrize("origin", [PAGE, LOCAL, PAGE.upper()])
async def test_an_allowed_page_may_read_replies_errors_and_streams(origin):
    """O086: also what goes wrong, and the headers that tell about the cache."""
    async with running(FakeEngine(), listed()) as client:
        for method, path, body, expected in [
            ("POST", "/v1/completions", BODY, 200),
            ("POST", "/v1/completions", BODY | {"stream": True}, 200),
            ("POST", "/v1/completions", BODY | {"temperature": -1}, 400),
            ("POST", "/v1/completions", BODY | {"model": "x"}, 404),
            ("GET", "/v1/completions", None, 405),
            ("GET", "/nothing", None, 404),
            ("GET", "/metrics", None, 200),
        ]:
            status, headers, _ = await send(client, method, path, {"Origin": origin}, body)
            assert status == expected
            assert headers["Access-Control-Allow-Origin"] == origin
            assert headers["Vary"] == "Origin"
            exposed = headers["Access-Control-Expose-Headers"].split(", ")
            assert "x-request-id" in exposed
            if path == "/v1/completions" and status == 200:
                assert {"fireworks-cached-prompt-tokens", "x-headwater-cached-prompt-tokens"} <= {*exposed}


@pytest.mark.parametrize(
    "origin", ["https://evil.example.com", PAGE + ".evil.com", "http://app.example.com", "null", "", "é", "*"]
)
async def test_other_pages_are_told_nothing(origin):
    """Programs send no Origin, or any: they are served, only a browser keeps the reply from the page."""
    async with running(FakeEngine(), listed()) as client:
        status, headers, _ = await send(client, "POST", "/v1/completions", {"Origin": origin}, BODY)
        assert (status, headers["Vary"]) == (200, "Origin")
        assert not [name for name in headers if name.lower().startswith("access-control")]
        status, headers, body = await send(client, "OPTIONS", "/v1/completions", ASKED | {"Origin": origin})
        assert status == 403
        assert b'"code":"origin_not_allowed"' in body
        assert not [name for name in headers if name.lower().startswith("access-control")]


async def test_a_star_allows_every_page():
    async with running(FakeEngine(), ServerConfig(cors_origins="*")) as client:
        for origin in (PAGE, "null"):
            for method, path in (("GET", "/health"), ("OPTIONS", "/v1/completions")):
                _, headers, _ = await send(client, method, path, ASKED | {"Origin": origin})
                assert headers["Access-Control-Allow-Origin"] == "*"
                assert "Vary" not in headers


async def test_without_the_setting_no_page_is_allowed():
    """O087: OPTIONS is then a method like any other that a path doesn't have."""
    async with running(FakeEngine()) as client:
        status, headers, _ = await send(client, "OPTIONS", "/v1/completions", ASKED)
        assert (status, headers["Allow"]) == (405, "POST")
        status, headers, _ = await send(client, "POST", "/v1/completions", {"Origin": PAGE}, BODY)
        assert status == 200
        assert not {"Access-Control-Allow-Origin", "Vary"} & set(headers)
    async with running(FakeEngine(), listed()) as client:
        status, headers, _ = await send(client, "OPTIONS", "/v1/completions", {"Origin": PAGE})
        assert (status, headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "setting",
    [
        "example.com",
        PAGE + "/",
        PAGE + "/path",
        f"*,{PAGE}",
        "https://*.example.com",
        "https://user@example.com",
        "https://",
        f"{PAGE} {LOCAL}",
    ],
)
def test_an_origin_that_no_browser_sends_stops_the_start(setting):
    with pytest.raises(ConfigError, match=r"HEADWATER_CORS_ORIGINS: .* is not allowed: give"):
        Cors(setting)
