"""What /v1/messages promises, to the anthropic client and byte by byte."""

from __future__ import annotations

import json

import anthropic
import pytest

from server.config import ServerConfig
from tests.server.fakes import MODEL, FakeEngine, byte_codec, running, text_ids

MESSAGES = "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)


def sdk(client, **options):
    options = {"base_url": client.url, "api_key": "none", "max_retries": 0} | options
    return anthropic.AsyncAnthropic(**options)


def ask(*messages, **fields):
    return {"model": MODEL, "max_tokens": 100, "messages": list(messages) or USER, **fields}


async def rebuilt(ai, **fields):
    """The final message that the client's stream helper makes of a stream."""
    async with ai.messages.stream(**ask(**fields)) as stream:
        return await stream.get_final_message()


async def events(client, body):
    """The events of a stream as (name, payload), each by the letter."""
    async with client.session.post(client.url + MESSAGES, json=body | {"stream": True}) as response:
        text = (await response.read()).decode()
        assert response.status == 200, text
    found = []
    for block in text.split("\n\n")[:-1]:
        if not block.startswith(":"):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def prompt_of(engine):
    return bytes(i for i in engine.submitted[-1].prompt if i < 256).decode()


def total(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


async def test_the_client_gets_a_message():
    engine = FakeEngine()
    async with running(engine) as client, sdk(client) as ai:
        message = await ai.messages.create(**ask())
        assert message.id.startswith("msg_")
        assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
        assert [block.to_dict() for block in message.content] == [
            {"type": "text", "text": "Hello world", "citations": None}
        ]
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert message.usage.output_tokens == 12
        assert message.usage.service_tier == "standard"
        raw = await ai.messages.with_raw_response.create(**ask())
        assert int(raw.headers["fireworks-prompt-tokens"]) == len(engine.submitted[-1].prompt)


async def test_every_prompt_token_is_counted_once():
    """Input, read and newly stored tokens make up the prompt, cold and warm, whole and streamed."""
    engine = FakeEngine()
    async with running(engine) as client, sdk(client) as ai:
        for cached in (0, 20):
            usage = (await ai.messages.create(**ask())).usage
            assert total(usage) == len(engine.submitted[-1].prompt) == 21
            assert usage.cache_read_input_tokens == cached
            assert usage.cache_creation.ephemeral_5m_input_tokens == usage.cache_creation_input_tokens
            assert usage.cache_creation.ephemeral_1h_input_tokens == 0
        streamed = (await rebuilt(ai)).usage
        assert streamed == usage
        count = await ai.messages.count_tokens(model=MODEL, messages=USER)
        assert count.input_tokens == 21


async def test_the_stream_helper_rebuilds_the_message():
    async with running(FakeEngine()) as client, sdk(client) as ai:
        whole = await ai.messages.create(**ask())
        async with ai.messages.stream(**ask()) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Hello world"
            final = await stream.get_final_message()
        assert final.content[0].text == whole.content[0].text
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 12)
        raw = await ai.messages.create(**ask(), stream=True)
        kinds = [event.type async for event in raw]
        assert kinds[0] == "message_start"
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_a_stream_is_named_events_in_anthropics_order():
    async with running(FakeEngine("ab")) as client:
        found = await events(client, ask())
    assert all(payload["type"] == name for name, payload in found)
    start, ping, *blocks, delta, stop = (payload for _, payload in found)
    assert (ping, stop) == ({"type": "ping"}, {"type": "message_stop"})
    message = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    assert message["usage"]["input_tokens"] + message["usage"]["cache_creation_input_tokens"] == 21
    assert blocks == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": "", "citations": None},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "content_block_stop", "index": 0},
    ]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 3


async def test_a_stop_sequence_is_named_and_cut():
    async with running(FakeEngine()) as client, sdk(client) as ai:
        for message in (
            await ai.messages.create(**ask(stop_sequences=["zzz", "o w"])),
            await rebuilt(ai, stop_sequences=["zzz", "o w"]),
        ):
            assert message.content[0].text == "Hell"
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "o w")


async def test_the_reason_tells_max_tokens_from_the_end_of_the_context():
    async with running(FakeEngine(lambda _: [97] * 1000, context=50)) as client, sdk(client) as ai:
        assert (await ai.messages.create(**ask(max_tokens=3))).stop_reason == "max_tokens"
        assert (await rebuilt(ai, max_tokens=3)).stop_reason == "max_tokens"
        assert (await ai.messages.create(**ask())).stop_reason == "model_context_window_exceeded"


async def test_max_tokens_0_fills_the_cache():
    async with running(FakeEngine()) as client, sdk(client) as ai:
        message = await ai.messages.create(**ask(max_tokens=0))
        assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
        assert (await ai.messages.create(**ask())).usage.cache_read_input_tokens == 20


async def test_a_marked_system_prompt_is_cached_like_any():
    engine = FakeEngine()
    async with running(engine) as client, sdk(client) as ai:
        block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        headers = {"anthropic-beta": "prompt-caching-2024-07-31"}
        first = await ai.messages.create(**ask(system=[block]), extra_headers=headers)
        assert first.usage.cache_read_input_tokens == 0
        assert prompt_of(engine).startswith("system\nBe brief.\n")
        second = await ai.messages.create(
            **ask({"role": "user", "content": "other"}, system="Be brief."),
            cache_control={"type": "ephemeral"},
        )
        assert second.usage.cache_read_input_tokens > len("system\nBe brief.\n")


async def test_isolation_keys_keep_prompts_apart():
    async with running(FakeEngine()) as client, sdk(client) as ai:
        for key, cached in (("a", 0), ("b", 0), ("a", 20)):
            message = await ai.messages.create(**ask(), extra_body={"prompt_cache_isolation_key": key})
            assert message.usage.cache_read_input_tokens == cached
        capped = await ai.messages.create(
            **ask(), extra_body={"prompt_cache_isolation_key": "a", "prompt_cache_max_len": 5}
        )
        assert capped.usage.cache_read_input_tokens == 5


@pytest.mark.parametrize("per_delta", [1, 7, 1000])
async def test_a_call_goes_to_the_client_and_its_result_back(per_delta):
    """O077, O079: whole and streamed, however the tokens come."""
    replies = ["I look.\n" + CALL, "Sunny in Rome."]
    engine = FakeEngine(
        lambda request: text_ids(replies[b"tool_response" in bytes(i for i in request.prompt if i < 256)]),
        per_delta=per_delta,
        context=5000,
    )
    async with running(engine) as client, sdk(client) as ai:
        whole = await ai.messages.create(**ask(tools=[WEATHER]))
        assert '"weather"' in prompt_of(engine)
        streamed = await rebuilt(ai, tools=[WEATHER])
        for message in (whole, streamed):
            text, call = message.content
            assert (text.type, text.text.strip()) == ("text", "I look.")
            assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
            assert call.id.startswith("toolu_")
            assert message.stop_reason == "tool_use"
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "25 C"}],
        }
        turns = [
            *USER,
            {"role": "assistant", "content": streamed.content},
            {"role": "user", "content": [result]},
        ]
        answer = await ai.messages.create(**ask(*turns, tools=[WEATHER]))
        assert answer.content[0].text == "Sunny in Rome."
        assert "25 C" in prompt_of(engine)
        assert answer.usage.cache_read_input_tokens > 300


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_own_tool_loop_runs_to_its_end(stream):
    """It asks for a conversation kept by the server, and goes on without when told that there is none."""
    calls = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Tells the weather of a city.

        Args:
            city: Where.
        """
        calls.append(city)
        return "25 C"

    replies = [CALL, "Sunny."]
    engine = FakeEngine(
        lambda request: text_ids(replies[b"tool_response" in bytes(i for i in request.prompt if i < 256)]),
        context=5000,
    )
    async with running(engine) as client, sdk(client) as ai:
        runner = ai.beta.messages.tool_runner(**ask(), tools=[weather], stream=stream)
        final = await runner.until_done()
        assert (final.content[0].text, calls) == ("Sunny.", ["Rome"])


async def test_several_calls_are_blocks_of_their_own():
    """O077: each call once, with an id of its own, white space between them is no text."""
    second = CALL.replace("Rome", "Oslo")
    async with running(FakeEngine(f"{CALL}\n{second}\n", context=5000)) as client, sdk(client) as ai:
        for message in (
            await ai.messages.create(**ask(tools=[WEATHER], max_tokens=500)),
            await rebuilt(ai, tools=[WEATHER], max_tokens=500),
        ):
            assert [block.input["city"] for block in message.content] == ["Rome", "Oslo"]
            assert len({block.id for block in message.content}) == 2


async def test_a_cut_call_has_no_arguments():
    """O079: half of a call's arguments is never handed out as a whole input."""
    async with running(FakeEngine(CALL, context=5000)) as client, sdk(client) as ai:
        message = await ai.messages.create(**ask(tools=[WEATHER], max_tokens=60))
        assert message.stop_reason == "max_tokens"
        assert [(block.name, block.input) for block in message.content] == [("weather", {})]
        cut = await rebuilt(ai, tools=[WEATHER], max_tokens=60)
        assert cut.stop_reason == "max_tokens"
        # The client completes the half that the stream has sent; only stop_reason says that it was cut.
        assert [(block.name, block.input) for block in cut.content] == [("weather", {"city": "Rome"})]
        sent = await events(client, ask(tools=[WEATHER], max_tokens=60))
        halves = [data["delta"]["partial_json"] for name, data in sent if name == "content_block_delta"]
        assert "".join(halves) == '{"city": "Rome"'


async def test_the_tool_choice_none_leaves_text_as_it_is():
    async with running(FakeEngine(CALL, context=5000)) as client, sdk(client) as ai:
        message = await ai.messages.create(**ask(tools=[WEATHER], tool_choice={"type": "none"}))
        assert [block.type for block in message.content] == ["text"]
        assert message.stop_reason == "end_turn"


async def test_thinking_is_a_block_of_its_own():
    reply = "<think>\nhm, so\n</think>\n\nYes."
    async with running(FakeEngine(reply), codec=byte_codec(template=THINKING)) as client, sdk(client) as ai:
        on = {"type": "adaptive"}
        whole = await ai.messages.create(**ask(thinking=on))
        streamed = await rebuilt(ai, thinking=on)
        for message in (whole, streamed):
            thinking, text = message.content
            assert (thinking.type, thinking.thinking.strip()) == ("thinking", "hm, so")
            assert thinking.signature == whole.content[0].signature != ""
            assert text.text.strip() == "Yes."
        assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens
        for message in (
            await ai.messages.create(**ask(thinking=on | {"display": "omitted"})),
            await rebuilt(ai, thinking=on | {"display": "omitted"}),
        ):
            assert [block.type for block in message.content] == ["thinking", "text"]
            assert message.content[0].thinking == ""
        history = [*USER, {"role": "assistant", "content": streamed.content}, *USER]
        assert (await ai.messages.create(**ask(*history))).content


async def test_a_prefilled_reply_is_gone_on_with():
    """O072: no header stands between the prefill and the reply."""
    engine = FakeEngine()
    async with running(engine) as client, sdk(client) as ai:
        await ai.messages.create(**ask(*USER, {"role": "assistant", "content": "The colours are"}))
        assert prompt_of(engine).endswith("assistant\nThe colours are")


async def test_a_reply_can_be_bound_to_a_schema():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    engine = FakeEngine('{"a": 1}')
    async with running(engine) as client, sdk(client) as ai:
        wanted = {"format": {"type": "json_schema", "schema": schema}}
        message = await ai.messages.create(**ask(output_config=wanted))
        assert json.loads(message.content[0].text) == {"a": 1}
        assert engine.submitted[-1].constraint is not None
        parsed = await ai.messages.parse(**ask(), output_format=dict[str, int])
        assert parsed.parsed_output == {"a": 1}


async def test_a_count_takes_all_of_the_prompt_and_needs_no_room():
    engine = FakeEngine(context=60)
    async with running(engine) as client, sdk(client) as ai:
        fields = {"system": "Be brief.", "tools": [WEATHER], "tool_choice": {"type": "auto"}}
        count = await ai.messages.count_tokens(model=MODEL, messages=USER, **fields)
        assert count.input_tokens > 300
        assert not engine.submitted
        with pytest.raises(anthropic.BadRequestError, match="context"):
            await ai.messages.create(**ask(**fields))
        status, body, _ = await client.post("/inference/v1/messages/count_tokens", {"messages": USER})
        assert (status, body["error"]["message"]) == (400, "'model' is required")


async def test_both_prefixes_answer():
    async with running(FakeEngine()) as client, sdk(client, base_url=client.url + "/inference") as ai:
        assert (await ai.messages.create(**ask())).content[0].text == "Hello world"
        assert (await ai.messages.count_tokens(model=MODEL, messages=USER)).input_tokens == 21


async def test_the_client_raises_its_typed_errors():
    """O056: the shape is Anthropic's, so that its client finds type and message."""
    async with running(FakeEngine()) as client, sdk(client) as ai:
        with pytest.raises(anthropic.NotFoundError, match="not served here") as missing:
            await ai.messages.create(**ask() | {"model": "other"})
        assert missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="'temperature'") as bad:
            await ai.messages.create(**ask(), extra_body={"temperature": 1.5})
        assert bad.value.body["type"] == "error"
        assert bad.value.body["error"]["type"] == "invalid_request_error"
        image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}
        with pytest.raises(anthropic.BadRequestError, match="it reads text"):
            await ai.messages.create(**ask({"role": "user", "content": [image]}))


BROKEN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(("}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"stop_sequences": ["x" * 5000]}, "stop_sequences"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": BROKEN}}},
            "output_config.format.schema",
        ),
        ({"tools": [WEATHER | {"input_schema": BROKEN}], "tool_choice": {"type": "any"}}, "tools"),
        ({"tools": [WEATHER | {"name": f"t{i}"} for i in range(500)]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"user": "x" * 5000}, "user"),
    ],
)
async def test_later_checks_name_the_field_as_it_is_called_here(fields, name):
    """O055, O067: what cannot be done is a 400 whose message names the field."""
    async with running(FakeEngine()) as client:
        status, body, _ = await client.post(MESSAGES, ask(**fields))
        assert status == 400
        assert f"'{name}'" in body["error"]["message"]


async def test_wishes_for_effort_are_no_error_where_the_model_cannot_think():
    async with running(FakeEngine()) as client:
        fields = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}
        status, body, _ = await client.post(MESSAGES, ask(**fields, metadata={"user_id": "x" * 5000}))
        assert (status, body["content"][0]["type"]) == (200, "text")


async def test_a_stop_sequence_inside_a_call_leaves_it_without_arguments():
    async with running(FakeEngine(CALL, context=5000)) as client, sdk(client) as ai:
        message = await ai.messages.create(**ask(tools=[WEATHER], stop_sequences=["Ro"]))
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Ro")
        assert message.content[0].input == {}


async def test_a_stream_that_fails_ends_with_an_error_event():
    async with running(FakeEngine(fail_after=2)) as client, sdk(client) as ai:
        with pytest.raises(anthropic.InternalServerError, match="boom"):
            await ai.messages.create(**ask())
        with pytest.raises(anthropic.APIStatusError, match="boom"):
            await rebuilt(ai)
        name, payload = (await events(client, ask()))[-1]
        assert (name, payload["type"], payload["error"]["type"]) == ("error", "error", "api_error")


async def test_the_client_tries_again_when_the_server_is_full():
    """What it says of overload is something that the client tries again after."""
    engine = FakeEngine(max_running=-1, max_waiting=1)
    async with running(engine, ServerConfig(retry_after=1)) as client:
        tries = []

        async def on_try(request):
            tries.append(request)
            if len(tries) == 2:
                engine.max_running = 1000

        http = anthropic.DefaultAsyncHttpxClient(event_hooks={"request": [on_try]})
        async with sdk(client, max_retries=2, http_client=http) as ai:
            message = await ai.messages.create(**ask())
        assert message.content[0].text == "Hello world"
        assert len(tries) == 2
