"""The Responses and Messages dialects through the unmodified clients that speak them."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.clients import MODEL, user

FRANCE = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


class Country(BaseModel):
    model_config = ConfigDict(extra="forbid")

    capital: str = Field(max_length=12)


def respond(client: openai.OpenAI, asked: Any, **fields: Any) -> Any:
    return client.responses.create(
        model=MODEL, input=asked, **{"temperature": 0, "max_output_tokens": 20, "store": False} | fields
    )


def message(client: anthropic.Anthropic, asked: Any = FRANCE, **fields: Any) -> Any:
    messages = [user(asked)] if isinstance(asked, str) else asked
    return client.messages.create(
        model=MODEL, messages=messages, **{"max_tokens": 20, "extra_body": {"temperature": 0}} | fields
    )


def test_a_response_and_its_next_turn(openai_client: openai.OpenAI) -> None:
    """The client sends the output items back as they are; the history comes from the cache."""
    rules = "Answer in one short sentence, be friendly and be precise."
    first = respond(openai_client, FRANCE, instructions=rules)
    assert first.status == "completed"
    assert "Paris" in first.output_text
    usage = first.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    details = usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == usage.input_tokens
    again = respond(openai_client, FRANCE, instructions=rules)
    assert again.usage.input_tokens_details.cached_tokens == usage.input_tokens - 1
    assert again.usage.input_tokens_details.cache_write_tokens == 0
    history = [user(FRANCE), *first.output, user("And of Italy?")]
    second = respond(openai_client, history, instructions=rules, max_output_tokens=16)
    assert second.usage.input_tokens_details.cached_tokens >= usage.input_tokens + usage.output_tokens - 1


def test_the_response_streams_are_rebuilt_by_the_client(openai_client: openai.OpenAI) -> None:
    whole = respond(openai_client, FRANCE)
    with openai_client.responses.stream(
        model=MODEL, input=FRANCE, temperature=0, max_output_tokens=20, store=False
    ) as stream:
        events = list(stream)
        rebuilt = stream.get_final_response()
    assert rebuilt.output_text == whole.output_text
    assert rebuilt.usage.output_tokens == whole.usage.output_tokens
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")


def test_responses_call_functions_and_fill_models(openai_client: openai.OpenAI) -> None:
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = respond(openai_client, WEATHER, max_output_tokens=64, **fields).output
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Paris"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "clear"}
    assert respond(openai_client, [user(WEATHER), call, result], tools=[tool]).output_text
    parsed = openai_client.responses.parse(
        model=MODEL, input="France as JSON", text_format=Country, max_output_tokens=40, temperature=0
    )
    assert isinstance(parsed.output_parsed, Country)


def test_a_message_and_its_usage(anthropic_client: anthropic.Anthropic) -> None:
    """input_tokens counts what was neither read from the cache nor written to it."""
    system = [
        {"type": "text", "text": "Answer in one word, please. " * 6, "cache_control": {"type": "ephemeral"}}
    ]
    count = anthropic_client.messages.count_tokens(model=MODEL, system=system, messages=[user(FRANCE)])
    replies = [message(anthropic_client, system=system) for _ in "12"]
    for reply in replies:
        used = reply.usage
        read, written = used.cache_read_input_tokens, used.cache_creation_input_tokens
        assert used.input_tokens + read + written == count.input_tokens
        assert "Paris" in reply.content[0].text
        assert reply.stop_reason == "end_turn"
    assert replies[0].usage.cache_creation_input_tokens > 40
    assert replies[1].usage.cache_read_input_tokens == count.input_tokens - 1
    assert (replies[1].usage.cache_creation_input_tokens, replies[1].usage.input_tokens) == (0, 1)


async def test_a_message_streams_the_same_and_tells_its_usage(server: str) -> None:
    """Through the asynchronous client's own accumulator."""
    async with anthropic.AsyncAnthropic(base_url=server, api_key="none", max_retries=0) as client:
        whole = await message(client)
        async with client.messages.stream(
            model=MODEL, messages=[user(FRANCE)], max_tokens=20, extra_body={"temperature": 0}
        ) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            rebuilt = await stream.get_final_message()
    assert rebuilt.content[0].text == text == whole.content[0].text
    assert rebuilt.stop_reason == whole.stop_reason
    assert rebuilt.usage.output_tokens == whole.usage.output_tokens
    assert rebuilt.usage.cache_read_input_tokens == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens + whole.usage.cache_creation_input_tokens - 1
    )


def test_messages_use_tools_and_take_their_results(anthropic_client: anthropic.Anthropic) -> None:
    tool = {"name": "weather", "description": "Of a city", "input_schema": PARAMETERS}
    fields: dict[str, Any] = {
        "tools": [tool],
        "max_tokens": 64,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    whole = message(anthropic_client, WEATHER, **fields)
    (use,) = whole.content
    assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Paris"})
    assert whole.stop_reason == "tool_use"
    with anthropic_client.messages.stream(
        model=MODEL, messages=[user(WEATHER)], extra_body={"temperature": 0}, **fields
    ) as stream:
        assert stream.get_final_message().content[0].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "clear"}
    history = [
        user(WEATHER),
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    assert message(anthropic_client, history, tools=[tool]).content[0].type == "text"


def test_a_stop_sequence_is_named(anthropic_client: anthropic.Anthropic) -> None:
    reply = message(anthropic_client, stop_sequences=["Paris"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in reply.content[0].text
