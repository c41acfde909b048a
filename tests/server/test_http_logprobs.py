"""Log-probabilities over HTTP, in the two forms, with echo, raw output, and at their limits."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from server.config import ServerConfig
from tests.server.fakes import END, MODEL, FakeEngine, chat_body, logprob_of, running, text_ids

EMOJI = "né 👍"


async def test_a_chat_tells_each_token_in_the_form_of_chats() -> None:
    """O057, O060, O061."""
    async with running(FakeEngine(EMOJI)) as client:
        body = await client.chat(logprobs=True, top_logprobs=2)
        content = body["choices"][0]["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == text_ids(EMOJI)
        assert bytes(b for entry in content for b in entry["bytes"] or ()) == EMOJI.encode()
        assert content[-1]["bytes"] == [], "the end token is no text"
        for entry in content:
            expected = logprob_of(entry["token_id"], 2)
            assert entry["logprob"] == expected.logprob
            assert [(t["token_id"], t["logprob"]) for t in entry["top_logprobs"]] == list(expected.top)
            own = next(t for t in entry["top_logprobs"] if t["token_id"] == entry["token_id"])
            assert (own["token"], own["bytes"]) == (entry["token"], entry["bytes"])


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": None}, {"top_logprobs": 0}])
async def test_without_alternatives_the_sampled_token_stands_alone(fields: dict[str, Any]) -> None:
    """O057, O058."""
    async with running(FakeEngine("ab")) as client:
        body = await client.chat(logprobs=True, **fields)
        content = body["choices"][0]["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in content] == [[], [], []]
        assert [entry["token"] for entry in content[:2]] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 2, "top_logprobs": 0}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": "5"}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True, "echo_last": 1}, "echo_last"),
    ],
)
@pytest.mark.parametrize("chat", [True, False])
async def test_what_is_over_the_cap_or_contradicts_itself_is_refused(
    fields: dict[str, Any], param: str, chat: bool
) -> None:
    """O057, O059, O085."""
    async with running(FakeEngine()) as client:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = chat_body(**fields) if chat else {"model": MODEL, "prompt": "a", **fields}
        status, reply, _ = await client.post(path, body)
        assert (status, reply["error"]["param"]) == (400, param)
        assert not client.engine.submitted


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_completions_tell_lists_side_by_side(count: int) -> None:
    """O059: 0 gives the tokens themselves, without alternatives."""
    async with running(FakeEngine(EMOJI)) as client:
        body = await client.complete(logprobs=count)
        found = body["choices"][0]["logprobs"]
        ids = text_ids(EMOJI)
        assert found["token_ids"] == ids
        assert found["token_logprobs"] == [logprob_of(i, 0).logprob for i in ids]
        assert found["text_offset"] == [0, 1, 1, 2, 3, 3, 3, 3, 4]
        if count == 0:
            assert found["top_logprobs"] is None
        else:
            assert [len(top) for top in found["top_logprobs"]] == [count] * len(ids)
        spelled = [text.removeprefix("bytes:\\x") for text in found["tokens"]]
        assert spelled == ["n", "c3", "a9", " ", "f0", "9f", "91", "8d", "<|im_end|>"]


async def test_completions_take_the_form_of_chats_and_chats_that_of_completions() -> None:
    async with running(FakeEngine("ab")) as client:
        body = await client.complete(logprobs=True, top_logprobs=1)
        assert [e["token"] for e in body["choices"][0]["logprobs"]["content"]] == ["a", "b", "<|im_end|>"]
        body = await client.chat(logprobs=1)
        assert body["choices"][0]["logprobs"]["tokens"] == ["a", "b", "<|im_end|>"]
        body = await client.complete(logprobs=False)
        assert body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_tells_the_prompt_and_what_follows(max_tokens: int) -> None:
    """O062: as evaluation harnesses ask for it. Only the very first token has no number (O003)."""
    async with running(FakeEngine("xyz")) as client:
        for prompt in ("abé", [97, 98, 195, 169]):
            body = await client.complete(prompt, echo=True, logprobs=1, max_tokens=max_tokens)
            choice = body["choices"][0]
            assert choice["text"] == "abé" + "xyz"[:max_tokens]
            found = choice["logprobs"]
            assert found["token_ids"] == [97, 98, 195, 169, *text_ids("xyz")[:max_tokens]]
            assert found["token_logprobs"][0] is None
            assert found["top_logprobs"][0] is None
            assert found["token_logprobs"][1:] == [logprob_of(i, 0).logprob for i in found["token_ids"][1:]]
            assert found["text_offset"] == [0, 1, 2, 2, *([3] if max_tokens else [])]
            assert body["usage"]["completion_tokens"] == max_tokens


async def test_echo_last_tells_the_end_of_the_prompt_only() -> None:
    async with running(FakeEngine("x")) as client:
        body = await client.complete("abcd", echo_last=2, logprobs=0, max_tokens=1)
        choice = body["choices"][0]
        assert choice["text"] == "cdx"
        assert choice["logprobs"]["token_ids"] == [99, 100, 120]
        assert None not in choice["logprobs"]["token_logprobs"]
        assert client.engine.submitted[0].prompt_logprobs_from == 2
        whole = await client.complete("abcd", echo_last=4, max_tokens=1)
        assert whole["choices"][0]["text"] == "abcdx"
        more = await client.complete("abcd", echo_last=400, max_tokens=1)
        assert more["choices"][0]["text"] == "abcdx"


@pytest.mark.parametrize("chat", [True, False])
async def test_a_stream_tells_the_same_tokens_as_the_whole_reply(chat: bool) -> None:
    async with running(FakeEngine(EMOJI)) as client:
        fields = {"logprobs": True, "top_logprobs": 1, "echo": True, "return_token_ids": True}
        if chat:
            path, body = "/v1/chat/completions", chat_body(**fields)
            whole = (await client.chat(**fields))["choices"][0]
            text = whole["message"]["content"]
        else:
            path, body = "/v1/completions", {"model": MODEL, "prompt": "ab", **fields}
            whole = (await client.complete("ab", **fields))["choices"][0]
            text = whole["text"]
        events, _ = await client.stream(path, body)
        choices = [event["choices"][0] for event in events[:-1]]
        told = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert told == whole["logprobs"]["content"]
        joined = "".join(c["delta"].get("content", "") if chat else c["text"] for c in choices)
        assert joined == text
        assert text.endswith(EMOJI)
        assert [i for c in choices for i in c.get("token_ids", ())] == text_ids(EMOJI)


async def test_raw_output_shows_what_went_in_and_came_out() -> None:
    async with running(FakeEngine("hi")) as client:
        body = await client.chat("yo", raw_output=True, logprobs=True)
        raw = body["choices"][0]["raw_output"]
        assert raw["prompt_fragments"] == ["<|im_start|>user\nyo<|im_end|>\n<|im_start|>assistant\n"]
        assert raw["prompt_token_ids"] == list(client.engine.submitted[0].prompt)
        assert raw["completion"] == "hi<|im_end|>"
        assert raw["completion_token_ids"] == [*b"hi", END]
        assert raw["completion_logprobs"] == body["choices"][0]["logprobs"]
        assert raw["grammar"] is None
        events, _ = await client.stream(
            "/v1/completions", {"model": MODEL, "prompt": "a", "raw_output": True}
        )
        raws = [e["choices"][0]["raw_output"] for e in events[:-1] if "raw_output" in e["choices"][0]]
        assert [r["completion_token_ids"] for r in raws] == [[*b"hi", END]]


async def test_the_openai_client_reads_both_forms() -> None:
    """O060."""
    async with running(FakeEngine("ab")) as client:
        openai = AsyncOpenAI(base_url=client.url + "/v1", api_key="none")
        chat = await openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2
        )
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content
        assert content is not None
        assert [(e.token, len(e.top_logprobs)) for e in content] == [("a", 2), ("b", 2), ("<|im_end|>", 2)]
        plain = await openai.completions.create(model=MODEL, prompt="a", logprobs=2, echo=True, max_tokens=1)
        assert plain.choices[0].logprobs is not None
        assert plain.choices[0].logprobs.tokens == ["a", "a"]
        await openai.close()


async def test_a_reply_holds_a_bounded_number_of_log_probabilities() -> None:
    """O085: choices, tokens and alternatives count together, before anything runs."""
    async with running(FakeEngine("ab"), ServerConfig(max_logprobs=600)) as client:
        body = {"model": MODEL, "prompt": "abcd", "logprobs": 5, "n": 2, "max_tokens": 50}
        status, reply, _ = await client.post("/v1/completions", body)
        assert status == 200, reply
        for more in ({"n": 3}, {"max_tokens": 51}, {"echo": True}, {"max_tokens": None}):
            status, reply, _ = await client.post("/v1/completions", body | more)
            assert (status, reply["error"]["param"]) == (400, "logprobs")
        assert len(client.engine.submitted) == 2
