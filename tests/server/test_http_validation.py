"""Every bad body gets a 400 (404, 413, 415) that names the field, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from server.config import ServerConfig
from tests.server.fakes import MODEL, VOCAB, FakeEngine, byte_codec, chat_body, running

PATHS = ["/v1/completions", "/v1/chat/completions"]


def body_for(path, **fields):
    return chat_body(**fields) if "chat" in path else {"model": MODEL, "prompt": "abc", **fields}


async def refused(client, path, body, status=400):
    got, answer, headers = await client.post(path, body)
    assert got == status, (body, answer)
    assert headers["Content-Type"].startswith("application/json")
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    return answer["error"]


@pytest.mark.parametrize("path", PATHS)
async def test_each_field_of_a_wrong_type_or_out_of_range_is_named(path):
    """O055, O074: no coercion, no silent default; param is the field, the message has value and limit."""
    wrong = {
        "model": [5, None, []],
        "max_tokens": ["5", True, 1.0, -1, [], {}],
        "max_completion_tokens": ["5", 2.5, -1],
        "temperature": ["1", -0.1, 2.1, False, []],
        "top_p": ["1", -0.1, 1.1, True],
        "top_k": [1.0, -1, "4", True],
        "min_p": [-0.1, 1.1, "0"],
        "seed": [1.5, "1", 2**63, -(2**63) - 1, True],
        "stop": [5, {}, [1], ["a", None]],
        "ignore_eos": ["true", 1, 0, []],
        "stream": ["true", 1, {}],
        "stream_options": ["x", 5, []],
        "user": [5, ["a"]],
        "prompt_cache_key": [5, {}],
        "prompt_cache_isolation_key": [5, True],
        "cache_salt": [5],
        "prompt_cache_max_len": [-1, "0", 1.5, True],
        "context_length_exceeded_behavior": ["maybe", 1],
        "perf_metrics_in_response": ["yes", 1],
        "return_token_ids": ["yes", 0],
        "n": ["1", 0, 129, True, 1.0],
        "typical_p": [0, 1.1, "1"],
        "frequency_penalty": [2.1, -2.1, "0", True],
        "presence_penalty": [2.1, -2.1, "0", True],
        "repetition_penalty": [0, -1, 2.1, "1"],
        "mirostat_target": [-1, "5", True],
        "mirostat_lr": [-0.1, "1"],
        "logit_bias": [[], "x", 5],
        "stop_token_ids": [5, "1", [-1], ["a"], [True], [1.5]],
        "min_tokens": [-1, "1", 1.5],
        "logprobs": ["1", 6, -1, [], {}],
        "top_logprobs": ["1", -1, 21, True],
        "echo": ["true", 0, 1],
        "echo_last": [-1, "1", True],
        "response_format": ["text", 5, [], {}],
        "reasoning_effort": ["loads", -1, [], 1.5],
        "reasoning_history": ["all", True],
        "thinking": [True, "on", {}, {"type": "maybe"}, {"type": "enabled", "budget_tokens": 5}],
        "raw_output": ["yes", 1],
        "metadata": [[], {"a": 5}, {"a": None}, {"x" * 65: "a"}, {str(i): "a" for i in range(17)}],
        "service_tier": ["urgent", True],
    }
    async with running(FakeEngine()) as client:
        for name, values in wrong.items():
            for value in values:
                error = await refused(client, path, body_for(path, **{name: value}))
                assert re.split(r"[.\[]", error["param"])[0] == name, (name, value, error)
        error = await refused(client, path, body_for(path, temperature=2.5))
        assert "2.5" in error["message"]
        assert "2.0" in error["message"]
        assert client.engine.submitted == []


@pytest.mark.parametrize("path", PATHS)
async def test_null_is_the_same_as_absent(path):
    names = (
        "max_tokens max_completion_tokens temperature top_p top_k min_p seed stop ignore_eos stream "
        "stream_options user prompt_cache_key prompt_cache_isolation_key cache_salt prompt_cache_max_len "
        "context_length_exceeded_behavior perf_metrics_in_response return_token_ids n logprobs top_logprobs "
        "frequency_penalty presence_penalty logit_bias response_format service_tier tools tool_choice "
        "functions function_call parallel_tool_calls best_of suffix images prompt_truncate_len echo "
        "echo_last repetition_penalty typical_p mirostat_target mirostat_lr stop_token_ids min_tokens "
        "raw_output metadata "
        "reasoning_effort reasoning_history thinking prediction speculation safe_tokenization"
    )
    async with running(FakeEngine()) as client:
        status, body, _ = await client.post(path, body_for(path, **dict.fromkeys(names.split())))
        assert status == 200, body


@pytest.mark.parametrize("path", PATHS)
async def test_neutral_fields_are_taken_and_others_refused_in_words(path):
    """What this server doesn't do is taken while it asks for nothing, else a 400 that names it."""
    neutral = [
        ("suffix", "", ["x"]),
        ("images", [], [["data:image/png;base64,AAAA"]]),
        ("modalities", ["text"], [["text", "audio"]]),
        ("audio", None, [{"voice": "x"}]),
        ("verbosity", "medium", ["low"]),
        ("web_search_options", None, [{}]),
        ("include_routing_matrix", False, [True, 0]),
    ]
    if path == PATHS[0]:
        neutral += [
            ("tools", [], [[{"type": "function"}]]),
            ("tool_choice", "auto", ["required"]),
            ("functions", [], [[{"name": "f"}]]),
            ("function_call", "none", [{"name": "f"}]),
            ("prompt_truncate_len", None, [5]),
            ("messages", None, [[]]),
        ]
    else:
        neutral += [("best_of", 1, [2, True]), ("prompt", None, ["a"]), ("safe_tokenization", True, [False])]
    async with running(FakeEngine()) as client:
        for name, value, others in neutral:
            status, body, _ = await client.post(path, body_for(path, **{name: value}))
            assert status == 200, (name, body)
            for other in others:
                error = await refused(client, path, body_for(path, **{name: other}))
                assert error["param"] == name, error
                assert f"'{name}'" in error["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_values_are_told_as_json_and_cut_short(path):
    """What a client sent is shown as it sent it, not as Python writes it."""
    deep = "x"
    for _ in range(900):
        deep = [deep]
    cases = [
        ("temperature", None, True, "true"),
        ("temperature", None, "hot", '"hot"'),
        ("stop", None, ["a", None], "'stop.1': expected `str`, got `null`; given: null"),
        ("seed", None, {"a": False}, '{"a": false}'),
        ("user", None, ["é"], '["é"]'),
        ("model", 404, "it's", '"it\'s"'),
        (
            "context_length_exceeded_behavior",
            None,
            "maybe",
            'none of the allowed values (error, truncate); given: "maybe"',
        ),
        ("context_length_exceeded_behavior", None, "x" * 10_000, '"xxx'),
        ("temperature", None, deep, "[["),
    ]
    async with running(FakeEngine()) as client:
        for name, status, value, told in cases:
            error = await refused(client, path, body_for(path) | {name: value}, status or 400)
            assert told in error["message"]
            assert len(error["message"]) < 300
        error = await refused(client, path, body_for(path, wheels=[None, True, "a"]))
        assert error["message"] == (
            "Extra inputs are not permitted, field: 'wheels', value: [None, True, 'a']"
        )


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (
            b'{"model":"tiny","prompt":"a","seed":' + b"9" * 5000 + b"}",
            "The body has a number that is too long",
        ),
        (b"\xef\xbb\xbf{}", "The body begins with a byte order mark (BOM); send UTF-8 without one"),
    ],
)
async def test_broken_bodies_are_told_in_words_of_their_own(raw, told):
    async with running(FakeEngine()) as client:
        assert (await refused(client, PATHS[0], raw))["message"] == told


async def test_more_prompts_than_may_wait_are_refused_before_any_is_run():
    """They all wait at once before the first one runs, so the queue's limit is theirs too."""
    async with running(FakeEngine(max_waiting=3)) as client:
        error = await refused(client, PATHS[0], {"model": MODEL, "prompt": ["a"] * 4})
        assert error["param"] == "prompt"
        assert error["message"] == "'prompt' holds 4 prompts; at most 3 are taken"
        assert client.engine.submitted == []
        assert len((await client.complete(["a"] * 3))["choices"]) == 3


@pytest.mark.parametrize("path", PATHS)
async def test_tolerated_fields_are_ignored_and_unknown_ones_refused(path):
    async with running(FakeEngine()) as client:
        tolerated = {
            "prediction": {"type": "content", "content": "maybe"},
            "speculation": "maybe",
            "metadata": {"run": "5"},
            "prompt_cache_retention": "24h",
            "prompt_cache_options": {"ttl": "30m"},
            "store": True,
            "safety_identifier": "someone",
        }
        status, body, _ = await client.post(path, body_for(path, **tolerated))
        assert status == 200, body
        error = await refused(client, path, body_for(path, wheels=4))
        assert error["message"] == "Extra inputs are not permitted, field: 'wheels', value: 4"
        assert error["param"] == "wheels"
        error = await refused(client, path, body_for(path, wheels="x" * 10_000))
        assert len(error["message"]) < 250
        options = body_for(path, stream=True, stream_options={"wheels": 1})
        assert (await refused(client, path, options))["param"] == "stream_options.wheels"


async def test_stream_options_need_a_stream():
    """O055: param is the field at fault."""
    async with running(FakeEngine()) as client:
        for stream in ({}, {"stream": False}):
            body = body_for(PATHS[0], stream_options={"include_usage": True}, **stream)
            assert (await refused(client, PATHS[0], body))["param"] == "stream_options"


@pytest.mark.parametrize("stop", ["", [""], ["", "x"], ["x"] * 5, ["x"] * 1000, "x" * 1_000_001])
async def test_stop_strings_are_never_empty_too_many_or_too_long(stop):
    """O049: count and length capped; an empty stop string is no instant match."""
    async with running(FakeEngine()) as client:
        assert (await refused(client, PATHS[0], body_for(PATHS[0], stop=stop)))["param"].startswith("stop")
        await client.complete("p", stop=["a", "b", "c", "d"])


@pytest.mark.parametrize(
    "prompt",
    [
        [-1],
        [[-1]],
        [VOCAB],
        [2**63],
        [2**100],
        [1.0],
        [True],
        [[1], [True]],
        [],
        [[]],
        [[1], []],
        "",
        [""],
        ["a", ""],
        ["a", 1],
        [1, "a"],
        [[1], "a"],
        {},
        5,
        None,
        True,
        ["a"] * 257,
    ],
)
async def test_bad_prompts_never_reach_the_model(prompt):
    """O033, O065: zero tokens, ids outside the vocabulary, mixed kinds: 400 each, and nothing is run."""
    async with running(FakeEngine()) as client:
        assert (await refused(client, PATHS[0], {"model": MODEL, "prompt": prompt}))["param"] == "prompt"
        assert client.engine.submitted == []
        await client.complete([0, VOCAB - 1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"  ",
        b"{",
        b"null",
        b"[]",
        b"42",
        b'"text"',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b'{"model": "\xff"}',
        b"\x1f\x8b\x08\x00rest",
        b"a=1&b=2",
        b'{"model":"tiny","model":"tiny","prompt":"a"}',
        b'{"model":"tiny","prompt":"a","temperature":NaN}',
        b'{"model":"tiny","prompt":"a","temperature":Infinity}',
        b'{"model":"tiny","prompt":"a","temperature":1e400}',
        b'{"model":"tiny","prompt":"a","seed":' + b"9" * 5000 + b"}",
        b'{"model":"tiny","prompt":"\\ud800"}',
        b'{"model":"tiny","prompt":"a","\\udfff":1}',
        b'{"model":"tiny","messages":[{"role":"user","content":"\\ud83d"}]}',
        b'{"model":"tiny","messages":[{"role":"user","role":"user","content":"a"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model":"tiny","prompt":"a"} trailing',
        b"{'model':'tiny'}",
    ],
)
async def test_broken_bodies_are_a_400(path, raw):
    """O074, O075: whatever the bytes, the answer is a 400 in the error shape, never a 500."""
    async with running(FakeEngine()) as client:
        await refused(client, path, raw)
        await client.complete()


async def test_only_plain_json_is_read():
    """O075: another or no content type, another charset, a compressed body: 415 in the error shape."""
    good = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    async with running(FakeEngine()) as client:
        for headers in (
            {"Content-Type": "application/x-www-form-urlencoded"},
            {"Content-Type": "text/plain"},
            {"Content-Type": "multipart/form-data; boundary=x"},
            {"Content-Type": "application/json; charset=utf-16"},
            {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        ):
            async with client.session.post(client.url + PATHS[0], data=good, headers=headers) as response:
                assert response.status in (400, 415)
                assert (await response.json())["error"]["message"]
        skip = {"skip_auto_headers": ["Content-Type"]}
        for absent in (skip, {"headers": {"Content-Type": ""}}):
            async with client.session.post(client.url + PATHS[0], data=good, **absent) as response:
                assert response.status == 415
                message = (await response.json())["error"]["message"]
                assert message == "The header Content-Type is missing: send application/json"
        status, _, _ = await client.post(PATHS[0], good, Content_Type="application/json; charset=UTF-8")
        assert status == 200


@pytest.mark.parametrize("path", PATHS)
async def test_another_model_is_not_found_and_a_missing_one_is_a_400(path):
    async with running(FakeEngine(), ServerConfig(served_model_name="alias, other")) as client:
        error = await refused(client, path, body_for(path) | {"model": "gpt-9"}, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        body = body_for(path)
        del body["model"]
        assert (await refused(client, path, body))["param"] == "model"
        for name in (MODEL, "alias", "other"):
            status, answer, _ = await client.post(path, body_for(path) | {"model": name})
            assert (status, answer["model"]) == (200, name)
        _, models, _ = await client.get("/v1/models")
        assert [(m["id"], m["context_length"]) for m in models["data"]] == [
            (MODEL, 500),
            ("alias", 500),
            ("other", 500),
        ]


async def test_a_body_over_the_limit_is_a_413():
    async with running(FakeEngine(), ServerConfig(max_body_mb=1)) as client:
        error = await refused(client, PATHS[0], body_for(PATHS[0], user="x" * 1_100_000), 413)
        assert error["code"] == "request_too_large"
        assert error["message"] == "The request's body is larger than 1 MB, the most that is taken"

        async def chunks():
            for _ in range(20):
                yield b" " * 100_000

        headers = {"Content-Type": "application/json"}
        async with client.session.post(client.url + PATHS[0], data=chunks(), headers=headers) as response:
            assert response.status == 413
            assert (await response.json())["error"] == error
        await client.complete()


async def test_a_text_far_beyond_the_context_is_refused_without_tokenizing_it():
    """O036, O045: megabytes of prompt are refused at once; streams and health go on meanwhile."""
    engine = FakeEngine("x" * 400, pace=0.001)
    async with running(engine) as client:
        stream = asyncio.create_task(client.stream(PATHS[0], body_for(PATHS[0], max_tokens=300)))
        for size in (5_000_000, 27_000_000):
            for path, body in [
                (PATHS[0], {"model": MODEL, "prompt": "word " * (size // 5)}),
                (PATHS[1], chat_body("word " * (size // 5))),
            ]:
                big = asyncio.create_task(refused(client, path, body))
                assert (await client.get("/health"))[0] == 200
                assert (await big)["code"] == "context_length_exceeded"
        events, _ = await stream
        assert events[-1] == "[DONE]"


async def test_a_body_that_never_comes_is_given_up():
    """O082: a client that sends its body too slowly is answered 408 and forgotten."""
    async with running(FakeEngine(), ServerConfig(body_timeout=0.1)) as client:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()
        await client.complete()


@pytest.mark.parametrize("path", PATHS)
async def test_a_bias_goes_to_tokens_of_the_vocabulary_only(path):
    """O063: another key or value is a 400 that names it, and nothing reaches the engine."""
    bad = [
        ({str(VOCAB): 1}, f'"{VOCAB}"'),
        ({"999999": 1}, '"999999"'),
        ({"9" * 5000: 1}, '"9999'),
        ({"-1": 1}, '"-1"'),
        ({"abc": 1}, '"abc"'),
        ({"1.5": 1}, '"1.5"'),
        ({" 7": 1}, '" 7"'),
        ({"07": 1}, '"07"'),
        ({"٣": 1}, '"٣"'),
        ({"5": None}, "null"),
        ({"5": "x"}, '"x"'),
        ({"5": True}, "true"),
        ({"5": 1e9}, "1000000000.0"),
        ({"5": -100.5}, "-100.5"),
        ({str(i): 1 for i in range(100_000)}, "100000"),
    ]
    async with running(FakeEngine()) as client:
        for bias, told in bad:
            error = await refused(client, path, body_for(path, logit_bias=bias))
            assert error["param"] == "logit_bias"
            assert told in error["message"]
            assert len(error["message"]) < 300
        assert client.engine.submitted == []
        status, body, _ = await client.post(path, body_for(path, logit_bias={"5": -100, "0": 2.5}))
        assert status == 200, body
        assert client.engine.submitted[0].params.logit_bias == ((5, -100.0), (0, 2.5))


@pytest.mark.parametrize("path", PATHS)
async def test_stop_tokens_are_tokens_of_the_vocabulary(path):
    """O064: others are a 400; the model's own end tokens stay beside the good ones."""
    async with running(FakeEngine("abc")) as client:
        for ids in ([VOCAB], [-1], [2**40], [5, VOCAB], [0] * 65):
            body = body_for(path, stop_token_ids=ids, min_tokens=2)
            assert (await refused(client, path, body))["param"].startswith("stop_token_ids")
        assert client.engine.submitted == []
        status, body, _ = await client.post(path, body_for(path, stop_token_ids=[98], min_tokens=1))
        assert status == 200, body
        params = client.engine.submitted[0].params
        assert (params.stop_token_ids, params.min_tokens) == ((257, 98), 1)
        assert body["usage"]["completion_tokens"] == 2
        assert body["choices"][0]["finish_reason"] == "stop"


async def test_what_holds_tensors_is_unknown_and_is_never_read():
    """O084: no field takes anything but text and token ids."""
    async with running(FakeEngine()) as client:
        for path in PATHS:
            error = await refused(client, path, body_for(path, prompt_embeds="gASVCwAAAA=="))
            assert error["param"] == "prompt_embeds"


async def test_integers_have_no_bound_in_json():
    """O074: one beyond every float is still a number, or is refused."""
    huge = 10**400
    async with running(FakeEngine()) as client:
        for path in PATHS:
            for name in ("top_k", "max_tokens", "prompt_cache_max_len", "min_tokens", "echo_last"):
                status, body, _ = await client.post(path, dumped(body_for(path, **{name: huge})))
                assert status == 200, (name, body)
            for name in ("seed", "n", "top_logprobs"):
                assert (await refused(client, path, dumped(body_for(path, **{name: huge}))))["param"] == name


def dumped(body):
    return json.dumps(body).encode()


async def test_all_text_of_a_chat_counts_before_any_of_it_is_tokenized(monkeypatch):
    """O036: calls and tools are as long as their text, like what users write."""
    codec, big = byte_codec(), "x" * 500_000
    call = {"type": "function", "function": {"name": "f", "arguments": f'{{"a": "{big}"}}'}}
    tool = {"type": "function", "function": {"name": "f", "description": big}}
    question = {"role": "user", "content": "a"}
    bodies = [
        {"messages": [question], "tools": [tool]},
        {"messages": [question, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [{**question, "name": big}]},
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": big}]},
    ]
    asked = []
    encode = codec.encode_chat
    monkeypatch.setattr(codec, "encode_chat", lambda *a, **k: asked.append(1) or encode(*a, **k))
    async with running(FakeEngine(), codec=codec) as client:
        for body in bodies:
            for limit in ({}, {"prompt_truncate_len": 100}):
                error = await refused(client, PATHS[1], {"model": MODEL, **body, **limit})
                assert error["code"] == "context_length_exceeded"
        assert asked == []


async def test_dropped_turns_are_not_tokenized_first(monkeypatch):
    """O036: how much must go at least is known from the text's size."""
    codec, sizes = byte_codec(), []
    encode = codec.encode_chat
    monkeypatch.setattr(
        codec, "encode_chat", lambda turns, **k: sizes.append(len(turns)) or encode(turns, **k)
    )
    turns = [{"role": "user", "content": "x" * 1000} for _ in range(500)] + [
        {"role": "user", "content": "end"}
    ]
    async with running(FakeEngine(), codec=codec) as client:
        body = {"model": MODEL, "messages": turns, "prompt_truncate_len": 60}
        status, reply, _ = await client.post(PATHS[1], body)
        assert status == 200, reply
        assert reply["usage"]["prompt_tokens"] <= 60
    assert max(sizes) < 20
