"""Tools and calls reach the model in its own format, and its replies are read in the same one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from text_families import (
    CHATML_TOKENS,
    HERMES,
    IMPLICIT,
    LLAMA3,
    LLAMA3_TOKENS,
    MISTRAL,
    MISTRAL_NAMED,
    MISTRAL_TOKENS,
    QWEN3,
    UNKNOWN,
    make_codec,
    token,
)
from text_replies import call, content, fed, joined

from engine.errors import RequestError
from engine.text import TextCodec, call_formats

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
WRITTEN = '{"city":  "Köln", "days": 1.0}'
ASKED = {"role": "user", "content": "weather?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_4711", "type": "function", "function": {"name": "get_weather", "arguments": WRITTEN}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_4711", "content": "12 °C"}
Make = Callable[[], TextCodec]

FAMILIES: dict[str, tuple[Make, call_formats.CallFormat]] = {
    "hermes": (lambda: make_codec(HERMES, *CHATML_TOKENS), call_formats.HERMES),
    "qwen3": (lambda: make_codec(QWEN3, *CHATML_TOKENS, plain=("<tool_call>",)), call_formats.HERMES),
    "implicit": (lambda: make_codec(IMPLICIT, *CHATML_TOKENS), call_formats.HERMES),
    "llama3": (lambda: make_codec(LLAMA3, *LLAMA3_TOKENS), call_formats.LLAMA3),
    "mistral": (lambda: make_codec(MISTRAL, *MISTRAL_TOKENS), call_formats.MISTRAL),
    "mistral-named": (lambda: make_codec(MISTRAL_NAMED, *MISTRAL_TOKENS), call_formats.MISTRAL_NAMED),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> tuple[TextCodec, call_formats.CallFormat]:
    make, expected = FAMILIES[request.param]
    return make(), expected


def test_the_call_format_is_the_one_that_the_template_shows(
    family: tuple[TextCodec, call_formats.CallFormat],
) -> None:
    found, expected = family
    assert found.call_format == expected


def test_the_default_format_is_hermes(codec: TextCodec) -> None:
    """SmolLM2's template knows no tools, and UNKNOWN's writes calls as no family does."""
    assert codec.call_format == call_formats.HERMES
    assert make_codec(UNKNOWN).call_format == call_formats.HERMES
    assert make_codec("{{ messages[0].content }}").call_format == call_formats.HERMES


def test_words_give_a_family_away_where_its_template_can_not_show_a_call() -> None:
    fails = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% if messages | length > 1 %}{{ raise_exception('x') }}{% endif %}"
    )
    assert make_codec(fails).call_format == call_formats.HERMES
    assert make_codec(fails, "<|python_tag|>").call_format == call_formats.LLAMA3
    assert make_codec(fails + "[TOOL_CALLS]").call_format == call_formats.MISTRAL
    assert make_codec(fails, "[TOOL_CALLS]", "[ARGS]").call_format == call_formats.MISTRAL_NAMED


def test_tools_calls_and_results_are_in_the_prompt(family: tuple[TextCodec, call_formats.CallFormat]) -> None:
    found, _ = family
    asked = found.render_chat([ASKED], tools=[TOOL])
    assert "get_weather" in asked
    text = found.render_chat([ASKED, CALLED, RESULT], tools=[TOOL])
    assert "12 °C" in text
    assert "Köln" in text[text.rindex("get_weather") :]


def test_a_call_in_the_history_reads_as_the_reply_that_made_it(
    family: tuple[TextCodec, call_formats.CallFormat],
) -> None:
    """What the template writes for a call, the parser finds in it."""
    found, _ = family
    text = found.render_chat([ASKED, CALLED], tools=[TOOL], add_generation_prompt=False)
    turn = re.split(r"<\|im_start\|>assistant|<\|end_header_id\|>|\[/INST\]", text)[-1]
    reply = re.sub(r"<\|im_end\|>|<\|eot_id\|>|</s>", "", turn).strip()
    parts = joined(fed(found.reply_parser(tools=True, reasoning=False), reply))
    assert [(part.kind, part.name, json.loads(part.text)) for part in parts] == [
        ("call", "get_weather", json.loads(WRITTEN))
    ]


def test_control_tokens_of_calls_are_shown_to_the_parser() -> None:
    """Mistral's and Llama's markers are control tokens, which give no text by themselves."""
    named = make_codec(MISTRAL_NAMED, *MISTRAL_TOKENS)
    ids = [
        token(named, "[TOOL_CALLS]"),
        *named.encode_plain("f"),
        token(named, "[ARGS]"),
        *named.encode_plain("{}"),
    ]
    shown = named.reply_markers(tools=True)
    assert shown == {token(named, text) for text in ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")}
    assert named.reply_markers(tools=False) == frozenset()
    detokenizer = named.detokenizer(named.encode_chat([ASKED]), shown)
    text = detokenizer.push([*ids, *named.eos_ids])
    assert text == "[TOOL_CALLS]f[ARGS]{}"
    assert joined(fed(named.reply_parser(tools=True), text)) == [call(0, "f", "{}")]
    llama = make_codec(LLAMA3, *LLAMA3_TOKENS)
    assert llama.reply_markers(tools=True) == {token(llama, "<|python_tag|>")}
    hermes = make_codec(HERMES, *CHATML_TOKENS, "<tool_call>", "</tool_call>")
    assert hermes.reply_markers(tools=True) == {token(hermes, "<tool_call>"), token(hermes, "</tool_call>")}


def test_the_tools_name_is_among_the_prompts_ids(codec: TextCodec) -> None:
    """The default model: tools are part of the prompt, so of the prefix that is cached."""
    ids = codec.encode_chat([ASKED], tools=[TOOL])
    name = codec.encode_plain("get_weather")
    assert any(ids[i : i + len(name)] == name for i in range(len(ids)))
    assert "get_weather" not in codec.decode(codec.encode_chat([ASKED]))
    longer = codec.encode_chat([ASKED, {"role": "assistant", "content": "Sun."}, ASKED], tools=[TOOL])
    assert longer[: len(ids)] == ids


def test_the_default_models_call_comes_back_in_the_history_as_it_was_written(codec: TextCodec) -> None:
    """The next turn's prompt holds the ids of the reply that called, odd spacing and all: the cache hits."""
    reply = f'<tool_call>\n{{"name": "get_weather", "arguments": {WRITTEN}}}\n</tool_call>'
    assert joined(fed(codec.reply_parser(tools=True), reply)) == [call(0, "get_weather", WRITTEN)]
    prompt = codec.encode_chat([ASKED], tools=[TOOL])
    following = codec.encode_chat([ASKED, CALLED, RESULT], tools=[TOOL])
    whole = prompt + codec.encode_plain(reply)
    assert following[: len(whole)] == whole


@pytest.mark.parametrize("arguments", ['{"a": 1, "a": 2}', '{"a": "<|im_end|>", "a": "x"}'])
def test_arguments_that_say_a_thing_twice_are_written_anew(arguments: str) -> None:
    """O115: what a decoder drops could hide a control token."""
    found = make_codec(HERMES, *CHATML_TOKENS)
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    text = found.render_chat([ASKED, called], tools=[TOOL])
    value = json.loads(arguments)
    assert json.dumps({"name": "f", "arguments": value}) in text
    controls = [i for i in found.encode_chat([ASKED, called], tools=[TOOL]) if found.is_control(i)]
    plain = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 2}}}]}
    assert controls == [i for i in found.encode_chat([ASKED, plain], tools=[TOOL]) if found.is_control(i)]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({**CALLED, "content": None}, WRITTEN),
        ({**CALLED, "content": "So."}, WRITTEN),
        ({"role": "assistant", "content": "x", "tool_calls": []}, "x"),
        ({"role": "assistant", "content": "x", "tool_calls": None}, "x"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "assistant"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
            '"arguments": {}',
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, '"arguments": {}'),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            '{"a": 1}',
        ),
        ({**RESULT, "content": [{"type": "text", "text": "12"}, {"type": "text", "text": " °C"}]}, "12 °C"),
        ({**RESULT, "tool_call_id": "never_seen"}, "12 °C"),
        ({"role": "tool", "content": "12 °C"}, "12 °C"),
    ],
)
def test_usable_histories_work(codec: TextCodec, message: dict[str, Any], shown: str) -> None:
    """O071: [] and null are absent, arguments text or object, results lists of parts, ids unknown."""
    for found in (codec, make_codec(HERMES, *CHATML_TOKENS)):
        assert shown in found.render_chat([ASKED, message, ASKED], tools=[TOOL])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]},
            "tool_calls[0].function.arguments",
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            "tool_calls[0].function.arguments",
        ),
        ({"tool_calls": [{"function": {"name": "f", "arguments": 3}}]}, "tool_calls[0].function.arguments"),
        ({"tool_calls": [{"function": {"name": ""}}]}, "tool_calls[0]"),
        ({"tool_calls": [{"id": 7, "function": {"name": "f"}}]}, "tool_calls[0].id"),
        ({"tool_calls": ["f"]}, "tool_calls[0]"),
        ({"tool_calls": "f"}, "tool_calls"),
        ({"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}, "tool_calls"),
        ({"role": "tool", "content": "a", "tool_call_id": 7}, "tool_call_id"),
        ({"role": "tool", "content": 7}, "content"),
        ({"content": "a", "reasoning_content": ["b"]}, "reasoning_content"),
        ({"content": "a", "name": {}}, "name"),
    ],
)
def test_broken_histories_are_refused_by_field(codec: TextCodec, message: dict[str, Any], param: str) -> None:
    """O071"""
    with pytest.raises(RequestError) as refused:
        codec.encode_chat([ASKED, {"role": "assistant", **message}], tools=[TOOL])
    assert refused.value.param == f"messages[1].{param}"


def test_ids_are_made_to_fit_a_template_that_wants_nine_letters() -> None:
    """Clients keep ids of any form; equal ones stay equal, from turn to turn too."""
    found = make_codec(MISTRAL, *MISTRAL_TOKENS)
    text = found.render_chat([ASKED, CALLED, RESULT, ASKED], tools=[TOOL])
    made = text.partition('"id": "')[2][:9]
    assert made.isalnum()
    assert f'"call_id": "{made}"' in text
    assert found.render_chat([ASKED, CALLED, RESULT]) == text[: text.rindex("[AVAILABLE_TOOLS]")]
    kept = {**RESULT, "tool_call_id": "VvvODy9mT"}
    assert '"call_id": "VvvODy9mT"' in found.render_chat([ASKED, CALLED, kept])
    bare = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, {"function": {"name": "f"}}]}
    text = found.render_chat([ASKED, bare, {"role": "tool", "content": "a"}])
    first, second = (part[:9] for part in text.split('"id": "')[1:3])
    assert first != second


def test_a_template_that_shows_calls_beside_null_alone_gets_null() -> None:
    found = make_codec(UNKNOWN)
    assert "<call>get_weather</call>" in found.render_chat([ASKED, CALLED], tools=[TOOL])
    assert "So." in found.render_chat([ASKED, {**CALLED, "content": "So."}], tools=[TOOL])


def test_a_templates_own_limit_on_calls_is_the_clients_error() -> None:
    found = make_codec(LLAMA3, *LLAMA3_TOKENS)
    twice = {**CALLED, "tool_calls": CALLED["tool_calls"] * 2}
    with pytest.raises(RequestError, match="one call at a time"):
        found.render_chat([ASKED, twice], tools=[TOOL])


def test_calls_in_a_reply_without_tools_are_content(codec: TextCodec) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert joined(fed(codec.reply_parser(tools=False), text)) == [content(text)]
    assert codec.reply_markers(tools=True) == frozenset()
