"""Tools and structured output through OpenAI's and Fireworks' unmodified clients."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any, Literal

import openai
import pytest
from fireworks import Fireworks
from pydantic import BaseModel, ConfigDict, Field

from engine.text import TextCodec
from tests.e2e.clients import MODEL, GetTime, GetWeather, apart, tools, user

WEATHER = [user("What is the weather in Paris?")]
NAMED = {"type": "function", "function": {"name": "GetTime"}}


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    size: Literal["small", "large"]
    rivers: list[Literal["Seine", "Po"]] = Field(max_length=2)


def ask(client: openai.OpenAI, messages: Any = WEATHER, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 64, "tools": tools()} | fields
    )


def test_tools_are_part_of_the_prompt_and_of_its_cache(
    openai_client: openai.OpenAI, codec: TextCodec
) -> None:
    """Their names are among the prompt's ids, and a second request with the same tools hits them."""
    extra = apart() | {"return_token_ids": True}
    first, again = (ask(openai_client, max_tokens=4, extra_body=extra) for _ in "12")
    prompt = codec.decode(first.prompt_token_ids)
    assert "GetWeather" in prompt
    assert "GetTime" in prompt
    assert len(first.prompt_token_ids) == first.usage.prompt_tokens
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    other = ask(openai_client, [user("Hello!")], max_tokens=4, extra_body=extra)
    pairs = zip(first.prompt_token_ids, other.prompt_token_ids, strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    assert "GetTime" in codec.decode(other.prompt_token_ids[:shared])
    assert other.usage.prompt_tokens_details.cached_tokens == shared
    assert "GetWeather" not in codec.decode(ask(openai_client, tools=[], extra_body=extra).prompt_token_ids)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_where_no_call_is_asked_for_a_reply_is_text(openai_client: openai.OpenAI, choice: str) -> None:
    (reply,) = ask(openai_client, tool_choice=choice, max_tokens=40).choices
    assert reply.message.tool_calls is None
    assert reply.message.content
    assert reply.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"GetWeather", "GetTime"}), (NAMED, {"GetTime"})], ids=["any", "named"]
)
def test_a_forced_call_is_a_whole_valid_call(
    openai_client: openai.OpenAI, choice: Any, names: set[str]
) -> None:
    (reply,) = ask(openai_client, tool_choice=choice, parallel_tool_calls=False).choices
    (call,) = reply.message.tool_calls
    assert call.type == "function"
    assert call.function.name in names
    model = GetWeather if call.function.name == "GetWeather" else GetTime
    assert model.model_validate_json(call.function.arguments).city
    assert reply.finish_reason == "tool_calls"
    assert reply.message.content is None


def test_a_call_has_only_the_arguments_that_its_function_names(openai_client: openai.OpenAI) -> None:
    """Where a client leaves additionalProperties out, as many do, the names are still the function's."""
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": city}}
    reply = ask(
        openai_client, tools=[tool], tool_choice="required", parallel_tool_calls=False, n=4, temperature=1
    )
    assert [choice.finish_reason for choice in reply.choices] == ["tool_calls"] * 4
    for choice in reply.choices:
        assert json.loads(choice.message.tool_calls[0].function.arguments).keys() <= {"city"}


def test_the_clients_accumulator_rebuilds_streamed_calls(openai_client: openai.OpenAI) -> None:
    """O053, O077: several calls, each with its index, one id and one name; one finish_reason, in the end."""
    fields: dict[str, Any] = {
        "tool_choice": "required",
        "tools": tools(),
        "temperature": 0,
        "max_tokens": 120,
    }
    whole = ask(openai_client, **fields).choices[0]
    with openai_client.chat.completions.stream(model=MODEL, messages=WEATHER, **fields) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        rebuilt = stream.get_final_completion().choices[0]
    calls = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]
    assert len(calls) > 1
    assert [(c.function.name, c.function.arguments) for c in rebuilt.message.tool_calls] == calls
    assert rebuilt.message.tool_calls[0].function.parsed_arguments.city == "Paris"
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    for index in range(len(calls)):
        mine = [delta for delta in deltas if delta.index == index]
        assert [delta.id is not None for delta in mine] == [True] + [False] * (len(mine) - 1)
        assert [delta.function.name is not None for delta in mine] == [True] + [False] * (len(mine) - 1)
    assert len({delta.id for delta in deltas if delta.id}) == len(calls)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert whole.finish_reason == rebuilt.finish_reason == "tool_calls"


def test_results_go_back_and_the_history_is_found_again(openai_client: openai.OpenAI) -> None:
    """The client's own message object is sent back as it is; the prompt before it comes from the cache."""
    extra = apart()
    first = ask(openai_client, tool_choice="required", parallel_tool_calls=False, extra_body=extra)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"sky": "clear"}'}
    second = ask(openai_client, [*WEATHER, message, result], max_tokens=8, extra_body=extra)
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_a_pydantic_model_comes_back_filled_in(openai_client: openai.OpenAI) -> None:
    """chat.completions.parse, which sends the model's schema and reads the reply with it."""
    fields: dict[str, Any] = {"response_format": City, "temperature": 0, "max_tokens": 80}
    reply = openai_client.chat.completions.parse(model=MODEL, messages=[user("Paris as JSON")], **fields)
    assert isinstance(reply.choices[0].message.parsed, City)
    assert reply.choices[0].finish_reason == "stop"
    with openai_client.chat.completions.stream(
        model=MODEL, messages=[user("Paris as JSON")], **fields
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == reply.choices[0].message.parsed


def test_a_schema_holds_for_each_of_several_choices_at_temperature_1(openai_client: openai.OpenAI) -> None:
    schema = City.model_json_schema()
    reply = ask(
        openai_client,
        [user("A city")],
        tools=openai.omit,
        n=4,
        seed=5,
        temperature=1,
        max_tokens=120,
        response_format={"type": "json_schema", "json_schema": {"name": "City", "schema": schema}},
    )
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        City.model_validate_json(choice.message.content)


def test_a_json_object_is_one_or_says_that_it_was_cut(openai_client: openai.OpenAI) -> None:
    reply = ask(
        openai_client,
        [user("Give the JSON object with the key a and the value 1, nothing else.")],
        tools=openai.omit,
        response_format={"type": "json_object"},
    ).choices[0]
    assert reply.message.content.lstrip().startswith("{")
    if reply.finish_reason == "stop":
        assert isinstance(json.loads(reply.message.content), dict)
    else:
        assert reply.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_holds_through_fireworks_client(fireworks_client: Fireworks, stream: bool) -> None:
    grammar = 'root ::= ("yes" | "no") ", " [0-9] [0-9] "%"'
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [user("Will it rain?")],
        "temperature": 0,
        "max_tokens": 20,
        "response_format": {"type": "grammar", "grammar": grammar},
    }
    if stream:
        chunks = list(fireworks_client.chat.completions.create(stream=True, **fields))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (reply,) = fireworks_client.chat.completions.create(**fields).choices
        text, reason = reply.message.content, reply.finish_reason
    assert text.split(", ")[0] in ("yes", "no")
    assert text.split(", ")[1][:2].isdigit()
    assert (text[-1], len(text.split(", ")[1]), reason) == ("%", 3, "stop")


def test_what_can_not_be_followed_is_refused_by_a_typed_exception(openai_client: openai.OpenAI) -> None:
    """A grammar that is none is never answered with free text."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, extra_body={"response_format": {"type": "grammar", "grammar": "root ::= other"}})
    assert caught.value.param is not None
    assert caught.value.param.startswith("response_format")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, tool_choice={"type": "function", "function": {"name": "nothing"}})
    assert caught.value.param is not None
    assert caught.value.param.startswith("tool_choice")
    assert "nothing" in caught.value.message
