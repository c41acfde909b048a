"""/openapi.json and /docs: whole, true of this server, and readable without anything from elsewhere."""

from __future__ import annotations

import re
from base64 import b64encode
from contextlib import asynccontextmanager
from hashlib import sha256
from html.parser import HTMLParser

import jsonschema
import pytest
import schemathesis
from aiohttp import ClientSession, web

from server.app import build_app, create_app
from server.backend import Backend
from server.config import ServerConfig
from server.protocol import make_runner
from server.workers import Workers
from tests.server.fakes import MODEL, VOCAB, FakeEngine, byte_codec, chat_body, running, text_ids


@asynccontextmanager
async def documented(config=None, **engine):
    """A server, its client and its document."""
    async with running(FakeEngine(**engine), config) as client:
        status, document, headers = await client.get("/openapi.json")
        assert status == 200
        assert headers["Content-Type"] == "application/json"
        yield client, document


def walk(found):
    yield found
    for item in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from walk(item)


def at(document, ref):
    for key in ref.removeprefix("#/").split("/"):
        document = document[key]
    return document


def body_schema(document, path):
    """The schema of a path's body, with what it refers to."""
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return {**body["schema"], "components": document["components"]}


async def test_the_document_is_valid_and_refers_to_nothing_that_is_not_there():
    async with documented() as (_, document):
        assert document["openapi"].startswith("3.1")
        schemathesis.openapi.from_dict(document).validate()
        # Those that the server has rules of its own for; msgspec writes the others.
        ruled = [schema for schema in document["components"]["schemas"].values() if "allOf" in schema]
        assert len(ruled) >= 10
        for schema in ruled:
            jsonschema.Draft202012Validator.check_schema(schema)
        refs = {item["$ref"] for item in walk(document) if isinstance(item, dict) and "$ref" in item}
        assert len(refs) > 50
        for ref in refs:
            at(document, ref)
        names = [op["operationId"] for item in document["paths"].values() for op in item.values()]
        assert len(set(names)) == len(names)


async def test_every_route_is_documented_and_every_documented_route_is_served():
    async with documented() as (client, document):
        app = create_app(client.engine, byte_codec(), ServerConfig())
        served = {
            (
                route.method.lower(),
                re.sub(r":[^}]*}", "}", route.resource.canonical).replace("{name}", "{model}"),
            )
            for route in app.router.routes()
            if route.method not in ("HEAD", "OPTIONS")
        }
        told = {(method, path) for path, item in document["paths"].items() for method in item}
        assert told == served
        twins = {path for path in document["paths"] if path.startswith("/inference/v1/")}
        assert {path.removeprefix("/inference") for path in twins} >= {
            path for path in document["paths"] if path.startswith("/v1/")
        }


async def test_every_example_is_answered_and_fits_its_schema():
    async with documented(reply=lambda request: text_ids("Hi")) as (client, document):
        seen = 0
        for path, item in document["paths"].items():
            body = item.get("post", {}).get("requestBody")
            if body is None:
                continue
            for example in body["content"]["application/json"]["examples"].values():
                jsonschema.Draft202012Validator(body_schema(document, path)).validate(example["value"])
                async with client.session.post(client.url + path, json=example["value"]) as response:
                    text = await response.text()
                    assert response.status == 200, (path, text)
                    kind = response.content_type
                    assert kind == (
                        "text/event-stream" if example["value"].get("stream") else "application/json"
                    )
                seen += 1
        assert seen >= 16


async def test_replies_and_errors_are_what_the_document_says():
    async with documented(reply="Hello") as (client, document):
        asked = {
            "/v1/completions": {"model": MODEL, "prompt": "a", "logprobs": 2, "raw_output": True},
            "/v1/chat/completions": chat_body(logprobs=True, return_token_ids=True),
            "/v1/responses": {"model": MODEL, "input": "a"},
            "/v1/messages": {
                "model": MODEL,
                "max_tokens": 4,
                "messages": [{"role": "user", "content": "a"}],
            },
            "/tokenize": {"prompt": "a"},
        }
        for path, body in asked.items():
            operation = document["paths"][path]["post"]
            status, reply, headers = await client.post(path, body)
            assert status == 200, reply
            success = operation["responses"]["200"]
            schema = {
                **success["content"]["application/json"]["schema"],
                "components": document["components"],
            }
            jsonschema.Draft202012Validator(schema).validate(reply)
            assert set(success["headers"]) <= {name.lower() for name in headers}
            status, error, _ = await client.post(path, {"model": MODEL})
            told = at(document, operation["responses"][str(status)]["$ref"])
            schema = told["content"]["application/json"]["schema"] | {"components": document["components"]}
            jsonschema.Draft202012Validator(schema).validate(error)


async def test_the_limits_are_this_servers():
    config = ServerConfig(served_model_name="other", max_stop_chars=7, max_prompts=3, max_key_chars=9)
    async with documented(config, context=77) as (_, document):
        body = jsonschema.Draft202012Validator(body_schema(document, "/v1/completions"))
        fits = {"model": "other", "prompt": "a"}
        assert body.is_valid(fits)
        for field in (
            {"model": "third"},
            {"prompt": [VOCAB]},
            {"prompt": [0] * 77},
            {"prompt": ["a"] * 4},
            {"stop": "12345678"},
            {"user": "1234567890"},
            {"logit_bias": {str(VOCAB): 1}},
            {"stop_token_ids": [VOCAB]},
            {"temperature": 3},
            {"tools": [1]},
            {"unknown": 1},
            {"stream_options": {}},
            {"top_logprobs": 3},
        ):
            assert not body.is_valid(fits | field), field
        for field in (
            {"prompt": [VOCAB - 1] * 76},
            {"stop": ["1234567"] * 4},
            {"logit_bias": {str(VOCAB - 1): 1}},
            {"tools": None},
            {"tools": []},
            {"stream": True, "stream_options": {"include_usage": True}},
            {"logprobs": True, "top_logprobs": 3},
            {"store": True},
        ):
            assert body.is_valid(fits | field), field


TURN = {"role": "user", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
WHOLE = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}]},
            TURN,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}},
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "metadata": {"a": "b"},
        "stop": ["x"],
        "max_completion_tokens": 3,
    },
    "/v1/completions": {
        "prompt": ["a", "b"],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object", "title": "T"}, "strict": True},
        },
        "logit_bias": {"1": -100},
        "metadata": {"a": "b"},
        "n": 2,
        "best_of": 3,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        ],
        "text": {"format": {"type": "json_object"}},
        "metadata": {"a": "b"},
        "reasoning": {"effort": "none"},
        "max_output_tokens": 3,
    },
    "/v1/messages": {
        "max_tokens": 3,
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            TURN,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "u"},
        "stop_sequences": ["x"],
    },
}


@pytest.mark.parametrize("path", WHOLE)
async def test_what_clients_send_is_taken_by_schema_and_server_alike(path):
    async with documented(context=2000) as (client, document):
        body = {"model": MODEL, **WHOLE[path]}
        jsonschema.Draft202012Validator(body_schema(document, path)).validate(body)
        status, reply, _ = await client.post(path, body)
        assert status == 200, reply


async def test_it_is_built_once_and_off_the_loop(monkeypatch):
    ran = []
    whole = Workers.run

    async def watched(self, heavy, call, *args):
        ran.append(heavy)
        return await whole(self, heavy, call, *args)

    monkeypatch.setattr(Workers, "run", watched)
    async with documented() as (client, document):
        assert (await client.get("/openapi.json"))[1] == document
        async with client.session.get(client.url + "/docs") as response:
            assert response.status == 200
    assert ran == [True]


async def test_there_is_none_before_there_is_a_model():
    config = ServerConfig()
    runner = make_runner(build_app(Backend(), config), config)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    async with ClientSession() as session:
        for path in ("/openapi.json", "/docs"):
            async with session.get(f"http://{host}:{port}{path}") as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "2"
    await runner.cleanup()


@pytest.mark.parametrize("keys", [False, True])
async def test_keys_are_asked_for_where_there_are_keys(keys, tmp_path):
    file = tmp_path / "keys"
    file.write_text("")
    config = ServerConfig(api_keys_file=str(file)) if keys else ServerConfig()
    async with documented(config) as (_, document):
        assert ({} in document["security"]) is not keys
        assert document["paths"]["/docs"]["get"]["security"] == []
        assert "security" not in document["paths"]["/v1/completions"]["post"]


class Reader(HTMLParser):
    """Collects tags, ids and links of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.links, self.text, self.outside = set(), [], [], "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name == "href":
                self.links.append(value)
            elif name == "src" or name.startswith("on") or name == "style":
                self.outside.append((tag, name))

    def handle_data(self, data):
        self.text += data


async def test_the_page_needs_no_script_and_nothing_from_elsewhere():
    async with documented() as (client, _):
        async with client.session.get(client.url + "/docs") as response:
            html, headers = await response.text(), response.headers
        page = Reader(html)
        assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "form", "base"})
        assert page.outside == []
        assert "@import" not in html
        assert "url(" not in html
        style = html.split("<style>")[1].split("</style>")[0]
        digest = b64encode(sha256(style.encode()).digest()).decode()
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["style-src"] == f"'sha256-{digest}'"
        assert set(policy) == {"default-src", "style-src", "base-uri", "form-action", "frame-ancestors"}
        assert "prefers-color-scheme: dark" in style
        assert headers["Content-Type"] == "text/html; charset=utf-8"


async def test_the_page_tells_every_path_and_field_and_its_links_lead_somewhere():
    async with documented() as (client, document):
        async with client.session.get(client.url + "/docs") as response:
            page = Reader(await response.text())
        for path in document["paths"]:
            assert path in page.text
        for schema in document["components"]["schemas"].values():
            for name, field in schema.get("properties", {}).items():
                assert name in page.text
                assert field.get("description", "").replace("`", "") in page.text
        assert len(set(page.ids)) == len(page.ids)
        assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
        assert {link for link in page.links if not link.startswith("#")} == {"openapi.json"}
        assert "curl $URL/v1/chat/completions -H 'Content-Type: application/json' -d '{" in page.text


async def test_names_that_look_like_markup_stay_text():
    name = "</style><script>alert(1)</script>"
    async with documented(ServerConfig(served_model_name=name), model=name) as (client, document):
        assert name in str(document)
        async with client.session.get(client.url + "/docs") as response:
            assert "script" not in Reader(await response.text()).tags
