"""/tokenize and /detokenize: the very ids that a request would run, and back."""

from __future__ import annotations

import json

import pytest

from server.api import tokens
from server.config import ServerConfig
from server.workers import Workers
from tests.server.fakes import END, MODEL, START, VOCAB, FakeEngine, byte_codec, chat_body, running

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize", "/inference/v1/tokenize"])
async def test_a_text_gives_the_ids_that_a_completion_runs(path):
    async with running(FakeEngine()) as client:
        text = "a<|im_start|>é"
        status, body, _ = await client.post(path, {"model": MODEL, "prompt": text})
        assert status == 200
        assert body == {
            "tokens": [97, START, 0xC3, 0xA9],
            "count": 4,
            "max_model_len": client.engine.info.context_length,
        }
        await client.complete(text)
        assert list(client.engine.submitted[-1].prompt) == body["tokens"]


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}, {"add_generation_prompt": False}])
async def test_a_chat_gives_the_ids_that_its_reply_runs(options):
    """Tools and template options count, and a user's spelling of a marker stays text."""
    async with running(FakeEngine()) as client:
        chat = chat_body("hi <|im_end|>", **options)
        status, body, _ = await client.post("/tokenize", chat)
        assert status == 200
        await client.post("/v1/chat/completions", chat)
        assert list(client.engine.submitted[-1].prompt) == body["tokens"]
        assert body["tokens"].count(END) == 1 + bool("tools" in options)
        assert (b"weather" in bytes(i for i in body["tokens"] if i < 256)) == ("tools" in options)


async def test_token_texts_stand_beside_their_ids():
    async with running(FakeEngine()) as client:
        _, body, _ = await client.post("/tokenize", {"prompt": "hé<|im_end|>", "return_token_strs": True})
        assert body["token_strs"] == ["h", "\ufffd", "\ufffd", "<|im_end|>"]
        assert len(body["token_strs"]) == body["count"] == len(body["tokens"])


async def test_texts_come_back_from_their_ids_control_tokens_and_all():
    async with running(FakeEngine()) as client:
        for path in ("/detokenize", "/v1/detokenize", "/inference/v1/detokenize"):
            text = "<|im_start|>user\nGrüße 🌍<|im_end|>"
            _, body, _ = await client.post("/tokenize", {"prompt": text})
            status, back, _ = await client.post(path, {"model": MODEL, "tokens": body["tokens"]})
            assert (status, back) == (200, {"prompt": text})
        assert (await client.post("/detokenize", {"tokens": []}))[1] == {"prompt": ""}


async def test_a_prompt_longer_than_the_context_is_counted_but_not_one_beyond_all_measure():
    """Clients count in order to cut; what can't fit however it is cut isn't worth the work."""
    async with running(FakeEngine(context=50)) as client:
        assert (await client.post("/tokenize", {"prompt": "a" * 60}))[1]["count"] == 60
        for path, body in (("/tokenize", {"prompt": "a" * 9000}), ("/detokenize", {"tokens": [1] * 9000})):
            status, told, _ = await client.post(path, body)
            assert (status, told["error"]["code"]) == (400, "context_length_exceeded")


CHAT = [{"role": "user", "content": "a"}]
# A body, and the field that its refusal names.
REFUSED = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "a", "messages": []}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"prompt": 1}, "prompt"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": CHAT, "tools": [{"type": "x"}]}, "tools.0.type"),
    ({"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
    ({"prompt": "a", "tools": []}, "tools"),
    ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
    ({"prompt": "a", "max_tokens": 1}, "max_tokens"),
    ({"messages": CHAT, "continue_final_message": True}, "messages"),
]


async def test_what_tokenize_can_not_take_is_refused_by_name():
    async with running(FakeEngine()) as client:
        for body, param in REFUSED:
            status, told, _ = await client.post("/tokenize", body)
            assert (status, told["error"]["param"]) == (400, param), body
            assert told["error"]["type"] == "invalid_request_error"


async def test_what_is_no_token_id_is_refused_and_shown():
    """O065 on /detokenize."""
    async with running(FakeEngine()) as client:
        for bad in (-1, VOCAB, 2**63, 10**30, 1.0, True, None, "1", [1]):
            status, told, _ = await client.post("/detokenize", {"tokens": [1, bad]})
            assert (status, told["error"]["param"]) == (400, "tokens"), bad
            assert f"from 0 to {VOCAB - 1}" in told["error"]["message"]
            assert json.dumps(bad) in told["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_other_models_and_other_methods_have_their_own_errors(path):
    async with running(FakeEngine()) as client:
        asked = {"model": "other", "prompt": "a"} if path == "/tokenize" else {"model": "other", "tokens": []}
        status, told, _ = await client.post(path, asked)
        assert (status, told["error"]["code"]) == (404, "model_not_found")
        status, told, _ = await client.get(path)
        assert (status, told["error"]["code"]) == (405, "method_not_allowed")


async def test_a_chat_needs_a_template():
    async with running(FakeEngine(), codec=byte_codec(template=None)) as client:
        status, told, _ = await client.post("/tokenize", chat_body())
        assert (status, told["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_long_bodies_are_worked_on_off_the_loop(path, monkeypatch):
    """Nothing that a client sends keeps the others waiting: what is long runs in a worker."""
    ran = []
    whole = Workers.run

    async def watched(self, heavy, call, *args):
        ran.append((call.__name__, heavy))
        return await whole(self, heavy, call, *args)

    monkeypatch.setattr(Workers, "run", watched)
    config = ServerConfig(long_prompt_bytes=100, long_body_kb=0)
    long = {"prompt": "a" * 200} if path == "/tokenize" else {"tokens": [1] * 200}
    async with running(FakeEngine(), config) as client:
        assert (await client.post(path, long))[0] == 200
    work = tokens._tokenize if path == "/tokenize" else tokens._detokenize
    assert ran[-1] == (work.__name__, True)
    assert all(heavy for _, heavy in ran)


async def test_an_unknown_model_is_a_404_in_the_error_shape():
    """GET /v1/models/{id}: names may hold slashes, under both prefixes."""
    config = ServerConfig(served_model_name="accounts/me/models/tiny")
    async with running(FakeEngine(), config) as client:
        for prefix in ("", "/inference"):
            status, card, _ = await client.get(f"{prefix}/v1/models/accounts/me/models/tiny")
            assert (status, card["id"]) == (200, "accounts/me/models/tiny")
            status, told, _ = await client.get(f"{prefix}/v1/models/accounts/me/models/other")
            assert (status, told["error"]["code"]) == (404, "model_not_found")
            assert set(told["error"]) == {"message", "type", "param", "code"}
