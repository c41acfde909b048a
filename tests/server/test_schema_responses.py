"""What /v1/responses takes, what it refuses and how, and the chat turns that its items become."""

from __future__ import annotations

import msgspec
import pytest

from engine import RequestError
from server.schema.responses_api import ResponsesRequest, read_request
from server.schema.responses_items import read_turns
from server.schema.responses_reply import Response, StreamEvent

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def body(**fields):
    return {"model": "m", "input": "hi", **fields}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"colour": 1}, "colour", "Extra inputs are not permitted, field: 'colour', value: 1"),
        ({"input": None}, "input", "'input' is required"),
        ({"max_output_tokens": 0}, "max_output_tokens", "given: 0"),
        ({"temperature": 2.5}, "temperature", "given: 2.5"),
        ({"top_logprobs": 21}, "top_logprobs", "given: 21"),
        ({"include": ["everything"]}, "include.0", "allowed values"),
        ({"stream_options": {}}, "stream_options", "'stream' is true"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", '"huge"'),
        ({"reasoning": {"effrt": "low"}}, "reasoning.effrt", "Extra inputs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", '"xml"'),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "required"),
        ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format.name", "not allowed"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "no built-in tools"),
        ({"tools": [{**TOOL, "function": {}}]}, "tools.0.function", "Extra inputs"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name", "two tools"),
        ({"tools": [{**TOOL, "name": "no blanks"}]}, "tools.0.name", '"no blanks"'),
        ({"tools": [{**TOOL, "async": True}]}, "tools.0.async", "not supported"),
        ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice.name", "none of the 'tools'"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.name", "required"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "no built-in tools"),
        ({"tool_choice": "any"}, "tool_choice", '"any"'),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"background": True}, "background", "waits"),
        ({"background": 0}, "background", "waits"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "truncation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "stored prompts"),
        ({"moderation": {"model": "x"}}, "moderation", "moderation"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "16"),
        ({"metadata": {"x": 1}}, "metadata", "`str`"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(fields, param, words):
    with pytest.raises(RequestError) as caught:
        read_request({key: value for key, value in body(**fields).items() if value is not None})
    assert caught.value.param == param
    assert words in str(caught.value)


def test_what_asks_for_nothing_is_taken():
    """Clients that send every field with its default get a reply."""
    request = read_request(
        body(
            store=True,
            background=False,
            previous_response_id=None,
            conversation=None,
            prompt=None,
            context_management=[],
            prompt_cache_retention="24h",
            prompt_cache_options={"mode": "explicit", "ttl": "30m"},
            safety_identifier="u",
            max_tool_calls=3,
            include=["reasoning.encrypted_content"],
            reasoning={"effort": "low", "summary": "auto"},
            text={"verbosity": "low", "format": {"type": "text"}},
            tools=[{**TOOL, "defer_loading": False, "allowed_callers": ["direct"], "strict": None}],
            service_tier="auto",
            metadata={},
        )
    )
    assert not request.wants_logprobs
    everything = dict.fromkeys(ResponsesRequest.__struct_fields__) | body()
    assert read_request(everything) == read_request(body())


def test_a_text_is_a_user_turn_behind_the_instructions():
    assert read_turns("hi", None) == [{"role": "user", "content": "hi"}]
    assert read_turns("hi", "be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def reasoning(text):
    return {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def said(text):
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": [], "parsed": None}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def call(call_id, arguments="{}"):
    return {"type": "function_call", "call_id": call_id, "name": "look", "arguments": arguments, "id": "fc_1"}


def output(call_id, text):
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def test_the_items_of_a_reply_become_one_turn_again():
    turns = read_turns(
        [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            reasoning("hm"),
            said("I look."),
            call("c1", '{"at": 1}'),
            call("c2"),
            output("c1", "one"),
            output("c2", [{"type": "input_text", "text": "two"}]),
            said("Found."),
        ],
        None,
    )
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "assistant"]
    assert turns[0]["content"] == "ab"
    assert turns[1] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        ],
    }
    assert [(turn["tool_call_id"], turn["content"]) for turn in turns[2:4]] == [("c1", "one"), ("c2", "two")]
    assert turns[4] == {"role": "assistant", "content": "Found."}


def test_replies_that_follow_each_other_stay_apart():
    turns = read_turns([said("one"), said("two"), reasoning("hm"), reasoning("so"), said("three")], None)
    assert [turn["content"] for turn in turns] == ["one", "two", "three"]
    assert turns[2]["reasoning_content"] == "hmso"


def test_text_behind_unanswered_calls_stays_in_their_turn():
    """The outputs must come right behind the turn that made the calls."""
    turns = read_turns([said("a"), call("c1"), said("b"), output("c1", "x")], None)
    assert [turn["role"] for turn in turns] == ["assistant", "tool"]
    assert turns[0]["content"] == "ab"


def test_reasoning_that_cannot_be_read_leaves_no_trace():
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
    turns = read_turns([{"role": "user", "content": "a"}, sealed, {"role": "user", "content": "b"}], None)
    assert [turn["content"] for turn in turns] == ["a", "b"]
    assert read_turns([sealed, said("x")], None) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        (3, "input", "given: 3"),
        ([], "input", "at least one item"),
        ([{"type": "reasoning", "encrypted_content": "g"}], "input", "nothing that the model can read"),
        (["hi"], "input.0", "must be an object"),
        ([{"role": "tool", "content": "x"}], "input.0.role", '"tool"'),
        ([{"role": "user"}], "input.0.content", "required"),
        ([{"role": "user", "content": "x", "colour": 1}], "input.0.colour", "Extra inputs"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input.0.content.0.type", "text only"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input.0.content.0.text", "required"),
        (
            [{"role": "assistant", "content": [{"type": "input_text", "text": ""}]}],
            "input.0.content.0.type",
            "output_text",
        ),
        ([{"type": "item_reference", "id": "msg_1"}], "input.0.type", "nothing is stored"),
        ([{"id": "msg_1"}], "input.0.type", "nothing is stored"),
        ([{"type": "computer_call"}], "input.0.type", '"computer_call"'),
        ([call("c"), call("c")], "input.1.call_id", "two calls"),
        ([output("c", "x")], "input.0.call_id", "no function_call before it"),
        ([call("c", "{")], "input.0.arguments", "not valid JSON"),
        ([call("c", "[1]")], "input.0.arguments", "JSON object"),
    ],
)
def test_a_broken_item_is_named(given, param, words):
    """O071: histories that can't be used are a 400 that says where."""
    with pytest.raises(RequestError) as caught:
        read_turns(given, None)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_every_field_says_what_it_is_for():
    """The document and the field table are made of these words."""
    shapes = [ResponsesRequest, Response, StreamEvent]
    _, schemas = msgspec.json.schema_components(shapes, ref_template="#/{name}")
    for name, schema in schemas.items():
        for field, found in schema["properties"].items():
            assert found.get("description") or field == "type", f"{name}.{field}"
