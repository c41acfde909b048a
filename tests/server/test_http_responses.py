"""POST /v1/responses over a real socket, driven by the unmodified openai package."""

from __future__ import annotations

import functools
import json

import msgspec
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine import TokenLogprob
from server.api.responses_items import tokens_of
from server.config import ServerConfig
from server.schema.responses import TokenLogprobs
from tests.server.fakes import MODEL, FakeEngine, byte_codec, running, text_ids

PATH = "/v1/responses"
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look somewhere",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    "strict": True,
}
CALLS = (
    'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "left"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"at": "right"}}\n</tool_call>'
)
THINKING = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['reasoning_content'] %}{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def body(**fields):
    return {"model": MODEL, "input": "hi", **fields}


def sdk(client):
    return openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="none", max_retries=0)


def prompt_of(engine, index=-1):
    return bytes(i for i in engine.submitted[index].prompt if i < 256).decode()


async def events_of(client, **fields):
    """The events of a stream by the letter: each a name and one JSON object of the same type."""
    async with client.session.post(client.url + PATH, json=body(stream=True, **fields)) as response:
        text = await response.text()
        assert response.status == 200, text
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == "event: " + event["type"]
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    # Strictly by the library's own types, not only as far as it looks.
    _library_events().validate_python(found)
    return found


@functools.cache
def _library_events():
    return TypeAdapter(list[ResponseStreamEvent])


async def test_a_whole_response_has_all_that_the_client_library_requires():
    async with running(FakeEngine()) as client, sdk(client) as ai:
        for cached in (0, 20):
            response = await ai.responses.create(
                model=MODEL, input="hi", store=True, metadata={"who": "me"}, prompt_cache_key="k", user="u"
            )
            assert (response.status, response.output_text) == ("completed", "Hello world")
            assert response.id.startswith("resp_")
            assert response.usage.input_tokens_details.cached_tokens == cached
        assert response.usage.input_tokens == 21
        assert response.usage.output_tokens == 12
        assert response.usage.total_tokens == 33
        assert response.usage.output_tokens_details.reasoning_tokens == 0
        assert response.metadata == {"who": "me"}
        assert (response.prompt_cache_key, response.user) == ("k", "u")
        raw = await ai.responses.with_raw_response.create(model=MODEL, input="hi", temperature=0.5)
        assert raw.headers["fireworks-cached-prompt-tokens"] == "20"
        plain = json.loads(raw.text)
        # Strictly by the library's own types, not only as far as it looks.
        Response.model_validate(plain)
        assert plain["store"] is False
        assert plain["temperature"] == 0.5
        assert (plain["tool_choice"], plain["tools"], plain["truncation"]) == ("auto", [], "disabled")
        status, again, _ = await client.post("/inference" + PATH, body())
        assert (status, again["output"][0]["content"][0]["text"]) == (200, "Hello world")


async def test_a_stream_tells_one_message_from_its_beginning_to_its_end():
    async with running(FakeEngine("Hey")) as client:
        events = await events_of(client)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["usage"] is None
    assert events[2]["item"]["content"] == []
    assert events[7]["text"] == "Hey"
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert (last["status"], last["usage"]["output_tokens"]) == ("completed", 4)
    ids = {event.get("item_id") for event in events} - {None}
    assert ids == {last["output"][0]["id"]}


async def test_both_ways_of_streaming_rebuild_the_response():
    async with running(FakeEngine()) as client, sdk(client) as ai:
        stream = await ai.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "Hello world" == events[-1].response.output_text
        async with ai.responses.stream(model=MODEL, input="hi") as helper:
            async for event in helper:
                if event.type == "response.output_text.delta":
                    assert "Hello world".startswith(event.snapshot)
            final = await helper.get_final_response()
        assert final.output_text == "Hello world"
        assert final.usage.input_tokens_details.cached_tokens == 20


async def test_tools_make_a_round_trip():
    """O077: each call is an item with its own id; sent back with outputs it is part of the next prompt."""
    replies = [CALLS, CALLS, "Nothing there."]
    engine = FakeEngine(lambda request: text_ids(replies[engine.submitted.index(request)]), context=4000)
    async with running(engine) as client, sdk(client) as ai:
        first = await ai.responses.create(model=MODEL, input="hi", tools=[LOOK])
        assert "look" in prompt_of(engine)
        message, left, right = first.output
        assert message.content[0].text.strip() == "I look."
        assert [(item.type, item.name) for item in (left, right)] == [("function_call", "look")] * 2
        assert [json.loads(item.arguments)["at"] for item in (left, right)] == ["left", "right"]
        assert left.call_id != right.call_id
        # The same, streamed: each call has its own deltas.
        async with ai.responses.stream(model=MODEL, input="hi", tools=[LOOK]) as helper:
            pieces: dict[str, str] = {}
            async for event in helper:
                if event.type == "response.function_call_arguments.delta":
                    pieces[event.item_id] = pieces.get(event.item_id, "") + event.delta
            streamed = await helper.get_final_response()
        assert [item.type for item in streamed.output] == [item.type for item in first.output]
        assert [pieces[item.id] for item in streamed.output[1:]] == [left.arguments, right.arguments]
        assert streamed.output[1].parsed_arguments == {"at": "left"}
        assert streamed.usage.input_tokens_details.cached_tokens > 0
        history = [{"role": "user", "content": "hi"}, *first.output]
        for call in (left, right):
            answer = {"type": "function_call_output", "call_id": call.call_id, "output": "a wall"}
            history.append(answer)
        last = await ai.responses.create(model=MODEL, input=history, tools=[LOOK])
        assert last.output_text == "Nothing there."
        assert prompt_of(engine).count("a wall") == 2
        # The whole first prompt is the beginning of this one.
        cached = last.usage.input_tokens_details.cached_tokens
        assert cached >= first.usage.input_tokens


async def test_every_kind_of_item_is_told_in_events_of_the_librarys_types():
    said = "<think>Hm.</think>\n\n" + CALLS + "\nThere."
    codec = byte_codec(template=THINKING)
    async with running(FakeEngine(said, context=4000), codec=codec) as client:
        events = await events_of(client, tools=[LOOK])
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == list(range(len(done)))
    kinds = [event["item"]["type"] for event in done]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    assert events[-1]["response"]["output"] == [event["item"] for event in done]
    assert all(event["item"]["status"] == "completed" for event in done)
    # One item at a time: each ends before the next begins.
    order = [event["type"][21:] for event in events if event["type"].startswith("response.output_item")]
    assert order == ["added", "done"] * len(done)


async def test_white_space_around_calls_is_no_message():
    said = "\n" + CALLS.removeprefix("I look.") + "\n"
    async with running(FakeEngine(said, context=4000)) as client, sdk(client) as ai:
        response = await ai.responses.create(model=MODEL, input="hi", tools=[LOOK])
        assert [item.type for item in response.output] == ["function_call"] * 2
        stream = await ai.responses.create(model=MODEL, input="hi", tools=[LOOK], stream=True)
        last = [event async for event in stream][-1]
        assert [item.type for item in last.response.output] == ["function_call"] * 2


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "look"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
    ],
)
async def test_a_demanded_call_constrains_the_reply(choice):
    engine = FakeEngine(CALLS.removeprefix("I look.\n"), context=4000)
    async with running(engine) as client, sdk(client) as ai:
        response = await ai.responses.create(
            model=MODEL, input="hi", tools=[LOOK], tool_choice=choice, parallel_tool_calls=False
        )
        assert [item.type for item in response.output] == ["function_call"]
        assert response.model_dump(exclude_unset=True)["tool_choice"] == choice
        assert response.parallel_tool_calls is False
        assert engine.submitted[0].constraint is not None


async def test_a_choice_of_none_leaves_calls_as_text():
    async with running(FakeEngine("plain", context=4000)) as client, sdk(client) as ai:
        response = await ai.responses.create(model=MODEL, input="hi", tools=[LOOK], tool_choice="none")
        assert response.output_text == "plain"


class Person(pydantic.BaseModel):
    name: str
    age: int


async def test_structured_text_comes_back_as_a_model():
    engine = FakeEngine('{"name": "Ada", "age": 36}')
    async with running(engine) as client, sdk(client) as ai:
        response = await ai.responses.parse(model=MODEL, input="who?", text_format=Person)
        assert response.output_parsed == Person(name="Ada", age=36)
        assert "age" in engine.submitted[0].constraint.source
        async with ai.responses.stream(model=MODEL, input="who?", text_format=Person) as helper:
            final = await helper.get_final_response()
        assert final.output_parsed == Person(name="Ada", age=36)
        assert final.text.format.name == "Person"
        # Sent back, the parsed reply is a turn like any other.
        follow = await ai.responses.create(
            model=MODEL, input=[*response.output, {"role": "user", "content": "and?"}]
        )
        assert '{"name": "Ada", "age": 36}' in prompt_of(engine)
        assert follow.status == "completed"
        loose = await ai.responses.create(
            model=MODEL, input="who?", text={"format": {"type": "json_object"}, "verbosity": "low"}
        )
        assert loose.text.format.type == "json_object"
        assert engine.submitted[-1].constraint is not None


async def test_a_schema_that_cannot_be_compiled_is_named_in_this_dialects_words():
    wanted = {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}
    async with running(FakeEngine()) as client:
        status, reply, _ = await client.post(PATH, body(text={"format": wanted}))
        assert status == 400
        assert reply["error"]["param"].startswith("text.format")
        assert "response_format" not in reply["error"]["message"]


async def test_a_conversation_grows_from_the_items_of_its_replies():
    """The next turn's prompt begins with the whole last one, so only what is new is computed."""
    engine = FakeEngine()
    async with running(engine) as client, sdk(client) as ai:
        history = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        first = await ai.responses.create(model=MODEL, input=history, instructions="be brief")
        history += [*first.output, {"role": "user", "content": "more"}]
        second = await ai.responses.create(model=MODEL, input=history, instructions="be brief")
        assert second.usage.input_tokens_details.cached_tokens == first.usage.input_tokens
        assert engine.submitted[1].prompt[: first.usage.input_tokens] == engine.submitted[0].prompt
        assert prompt_of(engine) == (
            "system\nbe brief\nuser\nhi\nassistant\nHello world\nuser\nmore\nassistant\n"
        )


async def test_reasoning_is_an_item_of_its_own():
    engine = FakeEngine("<think>\nHm.\n</think>\n\nYes.", context=4000)
    async with running(engine, codec=byte_codec(template=THINKING)) as client, sdk(client) as ai:
        response = await ai.responses.create(model=MODEL, input="hi", reasoning={"effort": "low"})
        thought, message = response.output
        assert thought.type == "reasoning"
        assert thought.content[0].text.strip() == "Hm."
        assert message.content[0].text.strip() == "Yes."
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        async with ai.responses.stream(model=MODEL, input="hi") as helper:
            seen = [event async for event in helper]
            final = await helper.get_final_response()
        told = "".join(event.delta for event in seen if event.type == "response.reasoning_text.delta")
        assert told == thought.content[0].text == final.output[0].content[0].text
        assert final.output_text == response.output_text
        await ai.responses.create(model=MODEL, input=[{"role": "user", "content": "hi"}, *response.output])
        assert "<think>" + thought.content[0].text in prompt_of(engine)


async def test_effort_is_the_templates_switch_and_refused_where_there_is_none():
    engine = FakeEngine()
    async with running(engine, codec=byte_codec(template=THINKING)) as client:
        for effort, closed in (("none", True), ("high", False)):
            _, reply, _ = await client.post(PATH, body(reasoning={"effort": effort, "summary": "auto"}))
            assert reply["reasoning"] == {"effort": effort, "summary": "auto"}
            assert prompt_of(engine).endswith("</think>\n\n") == closed
    async with running(FakeEngine()) as client:
        status, reply, _ = await client.post(PATH, body(reasoning={"effort": "high"}))
        assert (status, reply["error"]["param"]) == (400, "reasoning.effort")
        assert "'reasoning.effort'" in reply["error"]["message"]


class Scoring(FakeEngine):
    """Says of each token that it had the log-probability -0.5, and -1.5 for the token behind it."""

    def submit(self, request):
        stream = super().submit(request)
        push, top = stream.push, request.params.logprobs

        def scored(delta):
            if top is not None:
                scores = (TokenLogprob(i, -0.5, ((i, -0.5), (i ^ 1, -1.5))[:top]) for i in delta.token_ids)
                delta = msgspec.structs.replace(delta, logprobs=tuple(scores))
            push(delta)

        stream.push = scored
        return stream


@pytest.mark.parametrize("template", [None, THINKING])
@pytest.mark.parametrize("per_delta", [1, 7])
async def test_the_texts_tokens_come_with_their_log_probabilities(template, per_delta):
    """O061: joined, the tokens' bytes are the message's text: no marks, no reasoning, no end token."""
    text = "Yes, \u2713 yes."
    said = text if template is None else f"<think>Yes, why.</think>\n\n{text}"
    codec = byte_codec() if template is None else byte_codec(template=template)
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with running(Scoring(said, per_delta=per_delta), codec=codec) as client, sdk(client) as ai:
        response = await ai.responses.create(model=MODEL, input="hi", **asked)
        part = response.output[-1].content[0]
        assert part.text == text
        assert bytes(b for entry in part.logprobs for b in entry.bytes) == text.encode()
        assert {entry.logprob for entry in part.logprobs} == {-0.5}
        assert [top.logprob for top in part.logprobs[0].top_logprobs] == [-0.5, -1.5]
        Response.model_validate(response.to_dict())
        stream = await ai.responses.create(model=MODEL, input="hi", stream=True, **asked)
        events = [event async for event in stream]
        told = [e.logprobs for e in events if e.type == "response.output_text.delta"]
        (done,) = [e.logprobs for e in events if e.type == "response.output_text.done"]
        assert [entry.token for entries in told for entry in entries] == [entry.token for entry in done]
        assert events[-1].response.output[-1].content[0].logprobs == part.logprobs


def test_the_tokens_of_a_text_are_found_among_all():
    def entry(token, spelled=None):
        return TokenLogprobs(token, -1.0, spelled, (), 0, 0)

    half, other = "\u2713".encode()[:2], "\u2713".encode()[2:]
    entries = [
        entry("<think>"),
        entry("ab", tuple(b"ab")),
        entry("</think>"),
        entry("x", tuple(half)),
        entry("y", tuple(other)),
        entry("ab", tuple(b"ab")),
        entry("<end>"),
    ]

    def found(text, **where):
        tokens, taken = tokens_of(text, entries, **where)
        return [token.token for token in tokens], taken

    assert found("ab") == (["ab"], 2)
    assert found("\u2713", behind="ab") == (["x", "y"], 5)
    assert found("ab", behind="ab") == (["ab"], 6)
    assert found("\u2713ab", behind="not there") == (["x", "y", "ab"], 6)
    assert found("") == ([], 0)
    # What can't be found is told whole rather than not at all.
    assert found("\ufffd")[1] == len(entries)
    assert tokens_of("ab", []) == ([], 0)


async def test_log_probabilities_come_only_where_they_are_asked_for():
    """O058: null and absent are the same; a number of alternatives asks for them, too."""
    async with running(Scoring("Yes")) as client:
        for asked, expected in (
            ({}, []),
            ({"top_logprobs": None, "include": None}, []),
            ({"top_logprobs": 0}, []),
            ({"include": ["message.output_text.logprobs"], "top_logprobs": None}, [0, 0, 0]),
            ({"top_logprobs": 1}, [1, 1, 1]),
        ):
            _, reply, _ = await client.post(PATH, body(**asked))
            entries = reply["output"][0]["content"][0]["logprobs"]
            assert [len(entry["top_logprobs"]) for entry in entries] == expected


async def test_a_reply_cut_by_the_limit_is_incomplete():
    async with running(FakeEngine()) as client, sdk(client) as ai:
        response = await ai.responses.create(model=MODEL, input="hi", max_output_tokens=5)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (response.output_text, response.output[0].status) == ("Hello", "incomplete")
        assert response.usage.output_tokens == 5
        stream = await ai.responses.create(model=MODEL, input="hi", max_output_tokens=5, stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.incomplete"
        assert last.response.output[0].to_dict() | {"id": ""} == response.output[0].to_dict() | {"id": ""}


async def test_an_empty_reply_is_an_empty_message():
    async with running(FakeEngine("")) as client, sdk(client) as ai:
        response = await ai.responses.create(model=MODEL, input="hi")
        assert (response.output_text, len(response.output)) == ("", 1)
        async with ai.responses.stream(model=MODEL, input="hi") as helper:
            final = await helper.get_final_response()
        assert [item.type for item in final.output] == ["message"]


async def test_truncation_drops_the_oldest_turns_only_where_it_is_asked_for():
    turns = [
        {"role": role, "content": f"{number} " + "x" * 60}
        for number in range(5)
        for role in ("user", "assistant")
    ]
    history = [*turns, {"role": "user", "content": "last"}]
    engine = FakeEngine(context=400)
    async with running(engine) as client:
        status, reply, _ = await client.post(PATH, body(input=history, max_output_tokens=20))
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert reply["error"]["param"] == "input"
        fields = {"truncation": "auto", "max_output_tokens": 20, "instructions": "stay"}
        status, reply, _ = await client.post(PATH, body(input=history, **fields))
        assert (status, reply["truncation"]) == (200, "auto")
        assert len(engine.submitted[0].prompt) <= 380
        assert "stay" in prompt_of(engine)
        assert "last" in prompt_of(engine)
        assert "\n0 x" not in prompt_of(engine)


async def test_priority_and_isolation_reach_the_engine():
    engine = FakeEngine()
    async with running(engine) as client:
        for tier, shown, priority in (("priority", "priority", 1), ("fast", "default", 0)):
            fields = {"service_tier": tier, "cache_salt": "s", "prompt_cache_max_len": 0}
            _, reply, _ = await client.post(PATH, body(**fields))
            assert reply["service_tier"] == shown
            assert engine.submitted[-1].priority == priority
            assert engine.submitted[-1].namespace.isolation_key == "s"
            assert reply["usage"]["input_tokens_details"]["cached_tokens"] == 0


async def test_errors_have_the_shape_and_the_names_that_the_client_knows():
    async with running(FakeEngine(fail_after=2)) as client, sdk(client) as ai:
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await ai.responses.create(model="other", input="hi")
        with pytest.raises(openai.BadRequestError, match="previous_response_id") as refused:
            await ai.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.BadRequestError, match="built-in tools"):
            await ai.responses.create(model=MODEL, input="hi", tools=[{"type": "web_search"}])
        with pytest.raises(openai.InternalServerError, match="boom"):
            await ai.responses.create(model=MODEL, input="hi")
        for call in (ai.responses.retrieve, ai.responses.delete, ai.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="stores none"):
                await call("resp_1")


async def test_a_failure_in_mid_stream_ends_it_as_failed():
    """O079: a client can tell a broken stream from a complete one, and learns what was used."""
    engine = FakeEngine(fail_after=5)
    async with running(engine) as client, sdk(client) as ai:
        events = await events_of(client)
        last = events[-1]
        assert last["type"] == "response.failed"
        response = last["response"]
        assert response["status"] == "failed"
        assert response["error"]["code"] == "server_error"
        assert "boom" in response["error"]["message"]
        assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == (
            "incomplete",
            "Hello",
        )
        assert response["usage"]["output_tokens"] == 5
        async with ai.responses.stream(model=MODEL, input="hi") as helper:
            with pytest.raises(RuntimeError, match=r"response\.completed"):
                await helper.get_final_response()


async def test_large_bodies_are_read_in_a_worker_all_the_same():
    config = ServerConfig(long_body_kb=0, long_prompt_bytes=0)
    async with running(FakeEngine(), config) as client:
        status, reply, _ = await client.post(PATH, body(input=[{"role": "user", "content": "hi"}]))
        assert (status, reply["usage"]["input_tokens"]) == (200, 21)
        status, reply, _ = await client.post(PATH, body(input=[{"role": "user"}]))
        assert (status, reply["error"]["param"]) == (400, "input.0.content")


async def test_the_openai_client_counts_tokens_and_is_told_what_is_not_here():
    async with running(FakeEngine("a")) as client:
        async with sdk(client) as ai:
            asked = {"model": MODEL, "input": "hi", "instructions": "Be short."}
            counted = await ai.responses.input_tokens.count(**asked)
            assert counted.object == "response.input_tokens"
            reply = await ai.responses.create(**asked)
            assert reply.usage is not None
            assert counted.input_tokens == reply.usage.input_tokens
        status, body, _ = await client.post("/v1/responses/compact", {"model": MODEL})
        assert (status, body["error"]["code"]) == (404, "not_supported")
