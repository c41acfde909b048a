"""Tools and forms of replies over HTTP: what the model is told, what it is held to, and what clients get."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from engine import EngineRequest, TextCodec
from engine.text import GrammarSpec
from tests.server.fakes import END, MODEL, FakeEngine, byte_codec, chat_body, running, text_ids

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
FIRST = '{"city": "Rome {x}"}'
TWO_CALLS = (
    f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {FIRST}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return byte_codec()


def accepts(codec: TextCodec, request: EngineRequest, text: str) -> bool:
    """Whether a text is a whole reply under the request's grammar."""
    assert request.constraint is not None
    constraint = codec.grammars.compile(GrammarSpec.parse(request.constraint.source)).start()
    ids = [*text.encode(), END]
    return all(_allows(constraint.mask(ids[:i]), ids[i]) for i in range(len(ids)))


def _allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


async def test_tools_are_part_of_the_prompt_and_so_of_the_cached_prefix() -> None:
    async with running(FakeEngine("ok", context=4000)) as client:
        first = await client.chat("a", tools=TOOLS)
        prompt = bytes(i for i in client.engine.submitted[0].prompt if i < 256).decode()
        assert "get_weather" in prompt
        assert "Weather of a city" in prompt
        again = await client.chat("b", tools=TOOLS)
        shared = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert shared > first["usage"]["prompt_tokens"] - 40
        await client.chat("b", tools=TOOLS, tool_choice="none")
        assert client.engine.submitted[2].prompt == client.engine.submitted[1].prompt


async def test_calls_are_told_apart_from_text() -> None:
    async with running(FakeEngine(TWO_CALLS, context=4000)) as client:
        choice = (await client.chat(tools=TOOLS))["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] == "Let me see."
        calls = message["tool_calls"]
        assert [c["function"] for c in calls] == [
            {"name": "get_weather", "arguments": FIRST},
            {"name": "get_time", "arguments": "{}"},
        ]
        assert [c["type"] for c in calls] == ["function"] * 2
        assert len({c["id"] for c in calls}) == 2


@pytest.mark.parametrize("choice", ["none", None])
async def test_without_tools_or_choice_what_looks_like_a_call_is_text(choice: str | None) -> None:
    async with running(FakeEngine(TWO_CALLS, context=4000)) as client:
        fields = {"tools": TOOLS, "tool_choice": "none"} if choice else {}
        reply = (await client.chat(**fields))["choices"][0]
        assert reply["message"] == {"role": "assistant", "content": TWO_CALLS}
        assert reply["finish_reason"] == "stop"


@pytest.mark.parametrize("per_delta", [1, 7, 1000])
async def test_streamed_calls_are_rebuilt_by_the_openai_client(per_delta: int) -> None:
    """O053, O054, O077: indices 0 and 1; id, type and name once a call; one finish reason, at the end."""
    async with running(FakeEngine(TWO_CALLS, context=4000, per_delta=per_delta)) as client:
        openai = AsyncOpenAI(base_url=client.url + "/v1", api_key="none")
        reasons, named, ids = [], [], []
        async with openai.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "a"}], tools=TOOLS
        ) as stream:
            async for event in stream:
                if event.type != "chunk" or not event.chunk.choices:
                    continue
                choice = event.chunk.choices[0]
                reasons.append(choice.finish_reason)
                for call in choice.delta.tool_calls or ():
                    if call.id is not None:
                        assert call.type == "function"
                        assert call.function is not None
                        ids.append((call.index, call.id))
                        named.append(call.function.name)
                    else:
                        assert call.type is None
                        assert call.function is not None
                        assert call.function.name is None
            final = await stream.get_final_completion()
        assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
        assert [index for index, _ in ids] == [0, 1]
        assert named == ["get_weather", "get_time"]
        message = final.choices[0].message
        assert message.content == "Let me see."
        assert message.tool_calls is not None
        assert [c.function.arguments for c in message.tool_calls] == [FIRST, "{}"]
        whole = await client.chat("a", tools=TOOLS)
        assert final.usage is not None
        assert (
            final.usage.completion_tokens == whole["usage"]["completion_tokens"] == len(text_ids(TWO_CALLS))
        )
        await openai.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_where_calls_may_not_be_parallel_the_first_is_the_last(stream: bool) -> None:
    async with running(FakeEngine(TWO_CALLS, context=4000)) as client:
        body = chat_body(tools=TOOLS, parallel_tool_calls=False)
        if stream:
            events, _ = await client.stream(CHAT, body)
            deltas = [e["choices"][0]["delta"] for e in events[:-1]]
            calls = [c for d in deltas for c in d.get("tool_calls", ())]
            assert {c["index"] for c in calls} == {0}
            assert "".join(c["function"]["arguments"] for c in calls) == FIRST
            assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
        else:
            reply = (await client.chat(tools=TOOLS, parallel_tool_calls=False))["choices"][0]
            assert [c["function"]["name"] for c in reply["message"]["tool_calls"]] == ["get_weather"]
            assert reply["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ("any", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}},
            {"get_time"},
        ),
    ],
)
async def test_a_required_call_is_held_to_its_tools_and_their_arguments(
    codec: TextCodec, choice: Any, names: set[str]
) -> None:
    async with running(FakeEngine("ok", context=4000), codec=codec) as client:
        await client.chat(tools=TOOLS, tool_choice=choice)
        request = client.engine.submitted[0]
        call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
        calls = {
            "get_weather": call.format("get_weather", '{"city": "Rome"}'),
            "get_time": call.format("get_time", "{}"),
        }
        assert {name for name, text in calls.items() if accepts(codec, request, text)} == names
        assert not accepts(codec, request, "It is sunny.")
        assert not accepts(codec, request, calls["get_weather"].replace("Rome", "Reykjavik"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools.0.function.x"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": [5]}, "tools.0"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "functions": []}, "functions"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
    ],
)
async def test_broken_tools_and_choices_are_refused_and_named(
    codec: TextCodec, fields: dict[str, Any], param: str
) -> None:
    async with running(FakeEngine(context=4000), codec=codec) as client:
        status, body, _ = await client.post(CHAT, chat_body(**fields))
        assert (status, body["error"]["param"]) == (400, param), body
        assert not client.engine.submitted


@pytest.mark.parametrize("stream", [False, True])
async def test_the_older_form_of_tools_is_answered_in_its_own(stream: bool) -> None:
    async with running(FakeEngine(TWO_CALLS, context=4000)) as client:
        fields = {"functions": [t["function"] for t in TOOLS], "function_call": "auto"}
        if stream:
            events, _ = await client.stream(CHAT, chat_body(**fields))
            deltas = [e["choices"][0]["delta"] for e in events[:-1]]
            assert not any("tool_calls" in d for d in deltas)
            pieces = [d["function_call"] for d in deltas if "function_call" in d]
            assert pieces[0]["name"] == "get_weather"
            assert "".join(p["arguments"] for p in pieces) == FIRST
            assert events[-2]["choices"][0]["finish_reason"] == "function_call"
        else:
            reply = (await client.chat(**fields))["choices"][0]
            assert reply["message"]["function_call"] == {"name": "get_weather", "arguments": FIRST}
            assert reply["finish_reason"] == "function_call"


async def test_a_round_trip_puts_calls_and_results_into_the_prompt() -> None:
    """O071: content null beside calls; arguments as a client sends them back."""
    async with running(FakeEngine("It is sunny.", context=4000)) as client:
        call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": FIRST}}
        messages = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny, 21"}]},
        ]
        status, body, _ = await client.post(CHAT, {"model": MODEL, "messages": messages, "tools": TOOLS})
        assert status == 200, body
        prompt = bytes(i for i in client.engine.submitted[0].prompt if i < 256).decode()
        assert '"name": "get_weather"' in prompt
        assert json.dumps(json.loads(FIRST)) in prompt
        assert "sunny, 21" in prompt


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"type": "json_object"}, '{"a": [1, null]}', "[1]"),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": {"type": "integer"}},
            },
            "17",
            '"17"',
        ),
        ({"type": "json_schema", "json_schema": {"schema": {"enum": ["x"]}}}, '"x"', '"y"'),
        ({"type": "json_object", "schema": {"enum": ["x"]}}, '"x"', "{}"),
        ({"type": "json_schema", "schema": '{"const": 5}'}, "5", "6"),
        ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, "no", "maybe"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_replies_are_held_to_the_form_that_was_asked_for(
    codec: TextCodec, given: dict[str, Any], good: str, bad: str, path: str
) -> None:
    async with running(FakeEngine("x"), codec=codec) as client:
        body = chat_body() if path == CHAT else {"model": MODEL, "prompt": "a"}
        status, reply, _ = await client.post(path, {**body, "response_format": given})
        assert status == 200, reply
        request = client.engine.submitted[0]
        assert accepts(codec, request, good)
        assert not accepts(codec, request, bad)


@pytest.mark.parametrize("given", [None, {"type": "text"}])
async def test_plain_text_is_held_to_nothing(codec: TextCodec, given: dict[str, Any] | None) -> None:
    """O068."""
    async with running(FakeEngine("x"), codec=codec) as client:
        await client.chat(response_format=given)
        assert client.engine.submitted[0].constraint is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "response_format.type"),
        ("json_object", "response_format"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"strict": True, "schema": {}}},
            "response_format.json_schema.name",
        ),
        ({"type": "json_schema", "schema": "{"}, "response_format.schema"),
        ({"type": "json_schema", "schema": {"type": "no such"}}, "response_format.schema"),
        ({"type": "json_schema", "schema": {"pattern": "(", "type": "string"}}, "response_format.schema"),
        ({"type": "grammar"}, "response_format.grammar"),
        ({"type": "grammar", "grammar": "root ::= missing"}, "response_format.grammar"),
        ({"type": "grammar", "grammar": "nonsense"}, "response_format.grammar"),
    ],
)
async def test_forms_that_are_half_given_or_cannot_be_built_are_refused(
    codec: TextCodec, given: Any, param: str
) -> None:
    """O067, O068: never free text where a form was asked for."""
    async with running(FakeEngine(), codec=codec) as client:
        status, body, _ = await client.post(CHAT, chat_body(response_format=given))
        assert (status, body["error"]["param"]) == (400, param), body
        assert not client.engine.submitted


async def test_a_cut_reply_says_so(codec: TextCodec) -> None:
    """O069: what is not whole says length."""
    async with running(FakeEngine('{"a": 1}'), codec=codec) as client:
        cut = await client.chat(response_format={"type": "json_object"}, max_tokens=3)
        assert cut["choices"][0]["finish_reason"] == "length"


async def test_each_choice_has_a_grammar_of_its_own(codec: TextCodec) -> None:
    async with running(FakeEngine("x"), codec=codec) as client:
        await client.chat(n=2, response_format={"type": "json_object"})
        one, two = client.engine.submitted
        assert one.constraint is not two.constraint
        for length in range(3):
            assert one.constraint is not None
            assert _allows(one.constraint.mask(list(b'{"a')[:length]), b'{"a'[length])
        assert two.constraint is not None
        assert _allows(two.constraint.mask([]), ord("{"))


async def test_a_last_assistant_message_can_be_continued() -> None:
    """O072: by default a new turn begins; both flags at once contradict each other."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Red,"}]
    async with running(FakeEngine(" green")) as client:
        texts = []
        for fields in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}):
            status, body, _ = await client.post(CHAT, {"model": MODEL, "messages": turns, **fields})
            assert status == 200, body
            texts.append(byte_codec().decode(client.engine.submitted[-1].prompt, skip_special=False))
        start = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nRed,"
        assert texts == [start + "<|im_end|>\n<|im_start|>assistant\n", start, start + "<|im_end|>\n"]
        both = {"continue_final_message": True, "add_generation_prompt": True}
        status, body, _ = await client.post(CHAT, {"model": MODEL, "messages": turns, **both})
        assert (status, body["error"]["param"]) == (400, "continue_final_message")


async def test_the_oldest_turns_are_dropped_where_a_prompt_is_too_long() -> None:
    turns = [{"role": "system", "content": "S" * 20}]
    for i in range(6):
        turns += [{"role": "user", "content": f"u{i}" * 5}, {"role": "assistant", "content": f"a{i}" * 5}]
    turns.append({"role": "user", "content": "last"})
    async with running(FakeEngine("x", context=4000)) as client:
        for limit in (4000, 200, 140, 40):
            body = {"model": MODEL, "messages": turns, "prompt_truncate_len": limit}
            status, reply, _ = await client.post(CHAT, body)
            if limit == 40:
                assert (status, reply["error"]["param"]) == (400, "prompt_truncate_len")
                continue
            assert status == 200, reply
            prompt = client.engine.submitted[-1].prompt
            text = byte_codec().decode(prompt, skip_special=False)
            assert len(prompt) <= limit
            assert "S" * 20 in text
            assert "last" in text
            kept = [i for i in range(6) if f"a{i}" in text]
            assert kept == list(range(6 - len(kept), 6)), "the newest stay"
            if limit == 4000:
                assert len(kept) == 6
            else:
                # One turn more would not have fitted.
                assert len(prompt) + 40 > limit


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": True}, "reasoning_effort"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
    ],
)
async def test_what_this_model_cannot_do_is_refused_in_words(fields: dict[str, Any], param: str) -> None:
    """O083 among others."""
    async with running(FakeEngine()) as client:
        status, body, _ = await client.post(CHAT, chat_body(**fields))
        assert (status, body["error"]["param"]) == (400, param), body
        assert (await client.chat(reasoning_effort="none"))["choices"]
        assert (await client.chat(thinking={"type": "disabled"}))["choices"]


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "reason", "arguments"),
    [
        ("Rome", "stop", '{"city": "'),
        ("}}", "stop", '{"city": "Rome"'),
        ("</tool", "tool_calls", '{"city": "Rome"}'),
    ],
)
async def test_a_call_that_a_stop_string_cuts_is_not_to_be_made(
    stop: str, reason: str, arguments: str, stream: bool
) -> None:
    async with running(FakeEngine(CALL, context=4000)) as client:
        body = chat_body(tools=TOOLS, stop=stop)
        if stream:
            events, _ = await client.stream(CHAT, body)
            choices = [e["choices"][0] for e in events[:-1]]
            pieces = [c for one in choices for c in one["delta"].get("tool_calls", ())]
            told = "".join(c["function"]["arguments"] for c in pieces)
            ended = choices[-1]["finish_reason"]
        else:
            choice = (await client.chat(tools=TOOLS, stop=stop))["choices"][0]
            told, ended = choice["message"]["tool_calls"][0]["function"]["arguments"], choice["finish_reason"]
        assert (ended, told) == (reason, arguments)


@pytest.mark.parametrize("length", range(1, len(CALL)))
async def test_a_cut_call_leaves_no_markup_in_the_text(codec: TextCodec, length: int) -> None:
    """Behind a call there is only its marker; where a call is required there is nothing else at all."""
    async with running(FakeEngine(CALL + CALL, context=4000), codec=codec) as client:
        forced = await client.chat(tools=TOOLS, tool_choice="required", max_tokens=length)
        assert not forced["choices"][0]["message"]["content"]
        free = await client.chat(tools=TOOLS, max_tokens=length)
        if free["choices"][0]["message"].get("tool_calls"):
            assert free["choices"][0]["message"]["content"] is None


async def test_the_kept_turns_begin_with_a_question() -> None:
    turns = [{"role": r, "content": f"{r}{i}"} for i in range(4) for r in ("user", "assistant")]
    turns.append({"role": "user", "content": "last"})
    async with running(FakeEngine("x", context=4000)) as client:
        whole = (await client.post(CHAT, {"model": MODEL, "messages": turns}))[1]["usage"]["prompt_tokens"]
        body = {"model": MODEL, "messages": turns, "prompt_truncate_len": whole - 1}
        await client.post(CHAT, body)
        text = byte_codec().decode(client.engine.submitted[-1].prompt, skip_special=False)
        assert text.startswith("<|im_start|>user\nuser1")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_grows_too_complex_is_the_requests_fault(stream: bool) -> None:
    """O066: told as a 400, or as an error event once the stream has begun; the next request is served."""
    async with running(FakeEngine("abc", fail_after=1, fault="constraint")) as client:
        body = chat_body(response_format={"type": "grammar", "grammar": 'root ::= "a"+'})
        if stream:
            events, _ = await client.stream(CHAT, body)
            error = events[-1]["error"]
        else:
            status, reply, _ = await client.post(CHAT, body)
            assert status == 400
            error = reply["error"]
        assert (error["code"], error["type"]) == ("constraint_failed", "invalid_request_error")
        client.engine.fail_after = None
        assert (await client.chat())["choices"][0]["message"]["content"] == "abc"
