"""Which bodies /v1/messages takes, what it says about others, and which chat a body asks for."""

from __future__ import annotations

import json

import pytest

from engine import RequestError
from server.api.messages_chat import to_chat, to_prompt
from server.schema.anthropic import ABSENT, read_count_tokens, read_messages

MARK = {"type": "ephemeral", "ttl": "1h"}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}


def body(*turns, **fields):
    messages = [{"role": role, "content": content} for role, content in turns or [("user", "hi")]]
    return json.dumps({"model": "m", "max_tokens": 9, "messages": messages, **fields}).encode()


def chat(*turns, **fields):
    return to_chat(read_messages(body(*turns, **fields)))


def refused(data):
    with pytest.raises(RequestError) as caught:
        read_messages(data)
    return caught.value


def text(value, **fields):
    return {"type": "text", "text": value, **fields}


def test_a_plain_body_becomes_a_chat():
    found = chat()
    assert found.messages == [{"role": "user", "content": "hi"}]
    assert (found.model, found.max_tokens) == ("m", 9)
    assert found.continue_final_message is None


def test_every_option_has_its_place_in_the_chat():
    found = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop_sequences=["a", "b"],
        stream=True,
        service_tier="priority",
        metadata={"user_id": "who"},
        prompt_cache_key="k",
        prompt_cache_isolation_key="i",
        prompt_cache_max_len=0,
    )
    assert (found.temperature, found.top_p, found.top_k, found.stop) == (0.5, 0.9, 3, ["a", "b"])
    assert (found.stream, found.service_tier, found.user) == (True, "priority", "who")
    assert (found.prompt_cache_key, found.prompt_cache_isolation_key) == ("k", "i")
    assert found.prompt_cache_max_len == 0
    assert chat(metadata={"user_id": "who"}, user="me").user == "me"
    assert chat(service_tier="standard_only").service_tier is None


def test_the_system_prompt_is_the_first_turn_with_or_without_marks():
    assert chat(system="Be brief.").messages[0] == {"role": "system", "content": "Be brief."}
    marked = chat(system=[text("Be brief.", cache_control=MARK)], cache_control=MARK)
    assert marked.messages == chat(system="Be brief.").messages
    assert [turn["role"] for turn in chat(system=[]).messages] == ["user"]


def test_blocks_of_text_stay_apart_and_cut_texts_whole():
    assert chat(("user", [text("One."), text("Two.")])).messages[0]["content"] == "One.\nTwo."
    assert chat(("user", [text("a "), text(""), text("b\n"), text("c")])).messages[0]["content"] == "a b\nc"


def test_neighbouring_turns_of_one_role_are_one():
    found = chat(("user", "a"), ("user", [text("b")]), ("assistant", "c"), ("assistant", "d"), ("user", "e"))
    assert [(turn["role"], turn["content"]) for turn in found.messages] == [
        ("user", "a\nb"),
        ("assistant", "cd"),
        ("user", "e"),
    ]


def test_a_last_turn_of_the_assistant_is_gone_on_with():
    """O072: a prefill begins no new turn."""
    found = chat(("user", "a"), ("assistant", "The colours are"))
    assert found.continue_final_message is True
    assert found.messages[-1] == {"role": "assistant", "content": "The colours are"}


def test_calls_and_results_become_a_chats_own():
    """O071: contents of calls, errors, empty results and lists."""
    found = chat(
        ("user", "weather?"),
        ("assistant", [text("I look."), {**CALL, "cache_control": MARK, "caller": {"type": "direct"}}]),
        ("user", [{**RESULT, "content": [text("sun"), text("wind")]}, text("well?")]),
        ("assistant", [CALL | {"id": "b"}, CALL | {"id": "c"}]),
        ("user", [RESULT | {"tool_use_id": "c", "is_error": True, "content": "no net"}]),
        ("user", [RESULT | {"tool_use_id": "b"}]),
    )
    function = {"name": "weather", "arguments": '{"city": "Zürich"}'}
    assert found.messages == [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sun\nwind"},
        {"role": "user", "content": "well?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": id, "type": "function", "function": function} for id in "bc"],
        },
        {"role": "tool", "tool_call_id": "c", "content": "Error: no net"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
    ]


def test_thinking_of_the_history_is_the_turns_reasoning():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "??"},
        text("yes"),
    ]
    found = chat(("user", "a"), ("assistant", blocks), ("user", "b"))
    assert found.messages[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_tools_and_choices_are_a_chats_own():
    tool = TOOL | {"description": "Tells", "strict": True, "cache_control": MARK, "type": "custom"}
    found = chat(tools=[tool])
    function = {
        "name": "weather",
        "description": "Tells",
        "parameters": TOOL["input_schema"],
        "strict": True,
    }
    assert found.tools == [{"type": "function", "function": function}]
    assert (found.tool_choice, found.parallel_tool_calls) == ("auto", None)
    for given, expected in [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ]:
        assert chat(tools=[TOOL], tool_choice=given).tool_choice == expected
    single = {"type": "any", "disable_parallel_tool_use": True}
    assert chat(tools=[TOOL], tool_choice=single).parallel_tool_calls is False
    assert chat(tool_choice={"type": "auto"}).tools is None


def test_thinking_and_effort_become_one_wish():
    assert chat().thinking is None
    assert chat(thinking={"type": "enabled", "budget_tokens": 2000}).thinking.type == "enabled"
    assert chat(thinking={"type": "adaptive"}).thinking.type == "adaptive"
    off = chat(thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert (off.thinking.type, off.reasoning_effort) == ("disabled", None)
    on = chat(thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert (on.thinking, on.reasoning_effort) == (None, "low")


def test_a_schema_for_the_reply_is_a_chats_response_format():
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        found = chat(**fields).response_format
        assert (found.type, found.json_schema.schema) == ("json_schema", {"type": "object"})
    assert refused(body(output_format=wanted, output_config={"format": wanted})).param == "output_format"


def test_what_asks_for_nothing_is_taken():
    for name, values in ABSENT.items():
        for value in (None, *values):
            chat(**{name: value})
        assert refused(body(**{name: {"some": "thing"}})).param == name
    fields = ("system", "tools", "tool_choice", "thinking", "metadata", "stop_sequences", "stream", "top_k")
    assert chat(**dict.fromkeys(fields)) == chat()


def test_max_tokens_0_asks_for_the_cache_alone():
    assert chat(max_tokens=0).max_tokens == 0


def test_a_count_is_of_the_same_prompt():
    fields = {"system": "s", "tools": [TOOL], "thinking": {"type": "disabled"}}
    data = json.loads(body(**fields))
    del data["max_tokens"]
    found = to_prompt(read_count_tokens(json.dumps(data).encode()))
    whole = chat(**fields)
    assert (found.messages, found.tools, found.thinking) == (whole.messages, whole.tools, whole.thinking)
    with pytest.raises(RequestError, match="Extra inputs are not permitted, field: 'max_tokens', value: 9"):
        read_count_tokens(body())


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (body(surprise=1), "surprise"),
        (body(("user", [text("a", extra=1)])), "messages.0.content.0.extra"),
        (body(system=[text("a", cache_control={"type": "ephemeral", "x": 1})]), "system.0.cache_control.x"),
        (body(tools=[TOOL | {"x": 1}]), "tools.0.x"),
        (body(max_tokens=-1), "max_tokens"),
        (body(max_tokens="9"), "max_tokens"),
        (body(temperature=1.5), "temperature"),
        (body(top_k=1.0), "top_k"),
        (body(stream="true"), "stream"),
        (body(stop_sequences="x"), "stop_sequences"),
        (body(stop_sequences=[""]), "stop_sequences"),
        (body(stop_sequences=list("abcde")), "stop_sequences"),
        (body(messages=[]), "messages"),
        (body(messages=[{"role": "king", "content": "a"}]), "messages.0.role"),
        (body(messages=[{"role": "user"}]), "messages.0.content"),
        (body(messages=[3]), "messages.0"),
        (body(("user", 5)), "messages.0.content"),
        (body(("user", [{"text": "a"}])), "messages.0.content.0.type"),
        (body(("user", [text(5)])), "messages.0.content.0.text"),
        (body(("user", [CALL])), "messages.0.content.0.type"),
        (body(("user", [RESULT])), "messages.0.content.0.tool_use_id"),
        (body(("user", "a"), ("assistant", [RESULT])), "messages.1.content.0.type"),
        (body(("user", "a"), ("assistant", [CALL | {"input": []}])), "messages.1.content.0.input"),
        (body(tools=[{"name": "x"}]), "tools.0.input_schema"),
        (body(tools=[TOOL | {"input_schema": {"type": "array"}}]), "tools.0.input_schema.type"),
        (body(tools=[TOOL, TOOL]), "tools.1.name"),
        (body(tool_choice={"type": "any"}), "tool_choice"),
        (body(tools=[TOOL], tool_choice={"type": "tool", "name": "y"}), "tool_choice.name"),
        (body(tools=[TOOL], tool_choice="auto"), "tool_choice"),
        (body(thinking={"type": "enabled"}), "thinking.budget_tokens"),
        (body(metadata={"user_id": 3}), "metadata.user_id"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}', "max_tokens"),
    ],
)
def test_broken_bodies_are_refused_and_the_field_is_named(data, param):
    """O033, O055, O074: 400 that names the field at any depth."""
    error = refused(data)
    assert error.param == param
    assert f"'{param}'" in str(error)


def test_messages_show_the_value_itself_and_briefly():
    assert "given: 1.5" in str(refused(body(temperature=1.5)))
    assert 'given: "boo"' in str(refused(body(messages=[{"role": "boo", "content": "a"}])))
    nested = refused(body(("user", [text("a", extra="v" * 500)])))
    assert str(nested).startswith(
        "Extra inputs are not permitted, field: 'messages.0.content.0.extra', value: 'v"
    )
    assert len(str(nested)) < 250


@pytest.mark.parametrize("name", ["a.b", "x[0]", "`", "", "` - at `$.messages", "q` - at `$.messages[7]"])
def test_unknown_names_may_be_spelled_like_anything(name):
    """O074: what a client makes up never leads to another error than the 400 that shows it."""
    assert str(refused(body(**{name: 1}))).startswith("Extra inputs are not permitted, field: '" + name)
    inside = str(refused(body(("user", [text("a", **{name: 1})]))))
    assert inside.startswith("Extra inputs are not permitted, field: 'messages.0.content.0." + name)


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "server_tool_use", "no such"])
def test_blocks_that_are_not_text_are_refused_in_words(kind):
    """O084: nothing is fetched or decoded."""
    for block in ({"type": kind, "source": {"type": "url", "url": "http://x"}}, {"type": kind}):
        for data in (body(("user", [block])), body(system=[block])):
            assert "it reads text, tool calls and their results" in str(refused(data))
    inside = body(("user", "a"), ("assistant", [CALL]), ("user", [RESULT | {"content": [{"type": kind}]}]))
    assert refused(inside).param == "messages.2.content.0.content.0.type"


def test_server_tools_are_refused_in_words():
    error = refused(body(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]))
    assert error.param == "tools.1.type"
    assert "custom tools" in str(error)


def test_a_history_may_not_end_with_an_open_call():
    with pytest.raises(RequestError, match="tool_result"):
        chat(("user", "a"), ("assistant", [CALL]))
