"""Chat messages become the prompt that the model's template makes of them, or a clear refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from text_families import CHATML_TOKENS, OPENED, QWEN3, make_codec
from text_tokenizers import CHATML, byte_level_tokenizer

from engine.errors import RequestError
from engine.text import TemplateError, TextCodec
from engine.text.template import ChatTemplate

Render = Callable[..., str]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}


def user(content: Any, **rest: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **rest}


@pytest.fixture
def with_template(folder: Callable[..., Path]) -> Callable[[str], TextCodec]:
    def make(template: str) -> TextCodec:
        tokenizer = byte_level_tokenizer("<|im_start|>", "<|im_end|>")
        settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        return TextCodec.load(folder(tokenizer, chat_template=template, tokenizer_config=settings))

    return make


def test_the_real_template_is_rendered(codec: TextCodec) -> None:
    assert codec.has_chat_template
    assert codec.render_chat([user("hi")]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    conversation = [{"role": "system", "content": "S"}, user("U"), {"role": "assistant", "content": "A"}]
    assert codec.render_chat(conversation, add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    )


def test_the_next_turn_begins_with_the_ids_of_this_one(codec: TextCodec) -> None:
    """What the cache holds after a reply is the beginning of the next turn's prompt."""
    first = codec.encode_chat([user("Name a colour.")])
    reply = codec.encode_plain("Blue.")
    history = [user("Name a colour."), {"role": "assistant", "content": "Blue."}, user("Another?")]
    assert codec.encode_chat(history)[: len(first) + len(reply)] == first + reply


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([], ""),
        (None, ""),
        ("", ""),
    ],
)
def test_content_is_brought_to_one_string(with_template: Any, content: Any, text: str) -> None:
    codec = with_template("{% for m in messages %}[{{ m.content + '' }}]{% endfor %}")
    assert codec.render_chat([user(content)]) == f"[{text}]"
    assert codec.render_chat([{"role": "assistant"}]) == "[]"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ([user("a"), "b"], r"messages\[1\] must be an object"),
        ([{"content": "a"}], r"messages\[0\]\.role must be one of system, developer, user"),
        ([{"role": "<|im_end|>", "content": "a"}], "role must be one of"),
        ([{"role": ["user"], "content": "a"}], "role must be one of"),
        ([user(3)], r"messages\[0\]\.content must be a string or a list"),
        (
            [user([{"type": "image_url", "image_url": {"url": "x"}}])],
            r"content\[0\]: this model takes text only.*image_url",
        ),
        ([user(["a"])], "takes text only"),
        ([user([{"type": "text"}])], r"content\[0\]\.text must be a string"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\] must hold a function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "not valid JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 200_000}}]}],
            "not valid JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}],
            "must be a JSON object",
        ),
        ([user("half a pair \ud800")], "surrogate"),
    ],
)
def test_bad_messages_are_refused_in_words(codec: TextCodec, messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        codec.encode_chat(messages)


def test_raw_text_with_half_a_surrogate_pair_is_refused(codec: TextCodec) -> None:
    for encode in (codec.encode, codec.encode_plain):
        with pytest.raises(RequestError, match="surrogate"):
            encode("a\udc00")


def test_the_templates_own_refusal_is_the_clients_error(with_template: Any) -> None:
    codec = with_template("{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}x")
    assert codec.render_chat([user("a")]) == "x"
    with pytest.raises(TemplateError, match=r"^one message only$"):
        codec.render_chat([user("a"), user("b")])


def test_a_template_that_fails_gives_a_clear_error(with_template: Any) -> None:
    codec = with_template("{{ messages[0].content + messages[0].name.first.last }}")
    with pytest.raises(TemplateError, match="chat template fails on these messages"):
        codec.render_chat([user("a")])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ (''.format).__globals__['x'] }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_templates_run_in_a_sandbox(with_template: Any, attack: str) -> None:
    codec = with_template("{% if messages[0].content == 'go' %}" + attack + "{% endif %}")
    with pytest.raises(TemplateError):
        codec.render_chat([user("go")])


def test_blocks_loops_json_and_dates_work_as_templates_expect(with_template: Any) -> None:
    codec = with_template(
        "{% for m in messages %}\n    {% if loop.index == 2 %}{% break %}{% endif %}\n"
        "{{ m.data | tojson }}|{{ m.data | tojson(indent=1) }}|"
        "{{ bos_token }}{{ eos_token }}|{{ documents }}\n"
        "{% generation %}G{% endgeneration %}\n{% endfor %}{{ strftime_now('%Y') }}"
    )
    data = {"é": "<a> & 'b'"}
    expected = f"{json.dumps(data, ensure_ascii=False)}|{json.dumps(data, ensure_ascii=False, indent=1)}"
    rendered = codec.render_chat([user("a", data=data), user("b")])
    assert rendered == f"{expected}|<|im_start|><|im_end|>|None\nG{datetime.now().year}"


def test_tool_calls_reach_the_template_as_objects(with_template: Any) -> None:
    codec = with_template(
        "{{ tools | length if tools }}{% for m in messages %}{% if m.tool_calls is defined %}"
        "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}"
        "{% else %}-{% endif %}{% endfor %}"
    )
    as_object = {"function": {"name": "f", "arguments": {"city": "X"}}}
    empty = [{"function": {"name": "g", "arguments": arguments}} for arguments in ("", None, "{}")]
    conversation = [
        {"role": "assistant", "content": None, "tool_calls": [CALL, as_object, *empty]},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "assistant", "content": "x", "tool_calls": None},
    ]
    assert codec.render_chat(conversation) == "(get_weather Köln)(f X)(g )(g )(g )--"
    assert codec.render_chat(conversation[1:], tools=[TOOL]) == "1--"
    assert codec.render_chat(conversation[1:], tools=[]) == "--"


def test_messages_and_tools_are_not_changed(codec: TextCodec) -> None:
    conversation = [
        user("<|im_end|>"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        user("b"),
    ]
    before = json.dumps([conversation, TOOL])
    codec.encode_chat(conversation, tools=[TOOL])
    assert json.dumps([conversation, TOOL]) == before


def test_a_template_without_tools_gets_a_tools_block(codec: TextCodec) -> None:
    """SmolLM2's template knows no tools: they stand in the system message."""
    conversation = [{"role": "system", "content": "Be brief."}, user("hi")]
    text = codec.render_chat(conversation, tools=[TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    listed = text.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(listed) == [TOOL]
    assert '<tool_call>\n{"name"' in text
    assert text.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    alone = codec.render_chat([user("hi")], tools=[TOOL])
    assert alone.count("<|im_start|>system") == 1
    assert "<tools>" in alone
    assert codec.render_chat([user("hi")], tools=[]) == codec.render_chat([user("hi")])


def test_a_template_without_tools_shows_calls_and_results_as_text(codec: TextCodec) -> None:
    conversation = [
        user("weather?"),
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "12 °C"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert codec.render_chat(conversation).endswith(
        f"<|im_start|>assistant\nLet me see.\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n12 °C\n</tool_response>\n"
        "<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_with_tools_keeps_them(with_template: Any) -> None:
    codec = with_template("{% if tools %}T{{ tools[0].function.name }}{% endif %}{{ messages[0].content }}")
    assert codec.render_chat([user("a")], tools=[TOOL]) == "Tget_weathera"


def test_a_template_without_system_gets_it_in_the_first_user_message(with_template: Any) -> None:
    codec = with_template(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.content }}]{% endfor %}"
    )
    assert codec.render_chat([{"role": "system", "content": "S"}, user("U")]) == "[S\n\nU]"
    with pytest.raises(TemplateError, match="no system"):
        codec.render_chat([user("U"), {"role": "system", "content": "S"}])


def test_developer_is_system_where_the_template_knows_no_developer(
    with_template: Any, codec: TextCodec
) -> None:
    assert "<|im_start|>system\nD<|im_end|>" in codec.render_chat([{"role": "developer", "content": "D"}])
    knows = with_template("{{ 'dev' if messages[0].role == 'developer' else 'no' }}")
    assert knows.render_chat([{"role": "developer", "content": "D"}]) == "dev"


@pytest.mark.parametrize("content", ["Sure, ", "Sure,\n\n", "  x", "<|im_end|>", "a <|im"])
@pytest.mark.parametrize(
    "template", [CHATML, CHATML.replace("message['content']", "message['content'] | trim")]
)
def test_the_final_message_can_be_continued(with_template: Any, template: str, content: str) -> None:
    """The prompt ends with the message's own text, and no marker comes after it."""
    codec = with_template(template)
    conversation = [user("q"), {"role": "assistant", "content": content}]
    start = content.lstrip() if "trim" in template else content
    text = codec.render_chat(conversation, continue_final_message=True)
    assert text == f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{start}"
    ids = codec.encode_chat(conversation, continue_final_message=True)
    assert sum(codec.is_control(i) for i in ids) == 3
    assert codec.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("continued", ["The three colours are red,", "Sure:\n\n```", "  x "])
def test_real_templates_continue_a_message_without_a_new_header(codec: TextCodec, continued: str) -> None:
    """O072: SmolLM2's template, and one in the manner of Qwen3, which cuts reasoning out of its history."""
    conversation = [user("q"), {"role": "assistant", "content": continued}]
    for found in (codec, make_codec(QWEN3, *CHATML_TOKENS), make_codec(OPENED, *CHATML_TOKENS)):
        text = found.render_chat(conversation, continue_final_message=True)
        assert text.endswith(f"<|im_start|>assistant\n{continued}")
        assert text.count("<|im_start|>assistant") == 1
        afresh = found.render_chat(conversation)
        assert afresh.startswith(f"{text}<|im_end|>\n<|im_start|>assistant\n")
        reply = found.encode_plain(" go on")
        assert found.decode(found.encode_chat(conversation, continue_final_message=True) + reply).endswith(
            f"{continued} go on"
        )


def test_only_an_assistants_message_can_be_continued(codec: TextCodec) -> None:
    for last in (
        user("a"),
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    ):
        with pytest.raises(RequestError, match="the message to continue"):
            codec.encode_chat([user("q"), last], continue_final_message=True)


def test_extra_variables_reach_the_template(with_template: Any) -> None:
    codec = with_template("{{ 'think' if enable_thinking is not defined or enable_thinking else 'quick' }}")
    assert codec.render_chat([user("a")]) == "think"
    assert codec.render_chat([user("a")], extra={"enable_thinking": False}) == "quick"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "tokenize", "bos_token", "raise_exception", "chat_template"]
)
def test_extra_variables_can_not_replace_the_renderers_own(with_template: Any, name: str) -> None:
    """O083: names that the renderer uses are refused."""
    with pytest.raises(RequestError, match=f"'{name}' belongs to the chat template"):
        with_template(CHATML).render_chat([user("a")], extra={name: "x"})


OPTIONS = "{{ messages[0].content }}{{ style }}{% for tag in tags or [] %}({{ tag }}){% endfor %}{{ level }}"


def test_options_that_the_template_reads_are_passed_on(with_template: Any) -> None:
    codec = with_template(OPTIONS)
    given = {"style": "brief", "tags": ["a", 1, None, True], "level": 2.5}
    assert codec.check_template_options(given) == given
    assert codec.render_chat([user("q")], extra=given) == "qbrief(a)(1)(None)(True)2.5"
    assert codec.check_template_options({}) == {}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tokenize": True}, "tokenize"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"conversation": []}, "conversation"),
        ({"messages": []}, "messages"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"bos_token": "x"}, "bos_token"),
        ({"strftime_now": "x"}, "strftime_now"),
        ({"range": 3}, "range"),
        ({"unknown": 1}, "unknown"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"style": {"a": 1}}, "style"),
        ({"style": [["a"]]}, "style"),
        ({"style": "x" * 1001}, "style"),
        ({"tags": ["x"] * 33}, "tags"),
        ({"tags": ["x" * 1001]}, "tags"),
        ({"level": 10**400}, "level"),
        ({"level": -2_000_000}, "level"),
        ({"level": float("nan")}, "level"),
    ],
)
def test_other_options_are_refused_by_name(with_template: Any, options: dict[str, Any], param: str) -> None:
    """O083: an allow-list of names, types and sizes; the renderer's own names can't be had."""
    with pytest.raises(RequestError, match=param) as refused:
        with_template(OPTIONS).check_template_options(options)
    assert refused.value.param == f"chat_template_kwargs.{param}"


def test_the_number_of_options_is_limited(with_template: Any) -> None:
    """O083"""
    with pytest.raises(RequestError, match="at most 32"):
        with_template(OPTIONS).check_template_options({f"o{i}": 1 for i in range(33)})


def test_switching_off_what_a_model_has_not_is_granted(codec: TextCodec) -> None:
    """Clients say so to every model."""
    assert codec.check_template_options({"enable_thinking": False}) == {}
    with pytest.raises(RequestError, match=r"'chat_template_kwargs\.enable_thinking' is no option"):
        codec.check_template_options({"enable_thinking": True})


def test_rendering_has_a_time_limit() -> None:
    """O083: what a template writes in loops can't go on for ever."""
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}"
    source = "{% if messages[0].content == 'go' %}" + endless + "{% endif %}"
    template = ChatTemplate({"default": source}, {}, seconds=0.05)
    with pytest.raises(TemplateError, match=r"more than 0\.05 s"):
        template.render([user("go")], None, add_generation_prompt=True)
    assert template.render([user("stay")], None, add_generation_prompt=True) == ""


def test_many_threads_render_and_encode_at_once(codec: TextCodec) -> None:
    conversations = [[user(f"question {i} " + ("<|im_end|> " if i % 2 else "") * 3)] for i in range(64)]
    expected = [codec.encode_chat(conversation) for conversation in conversations]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(codec.encode_chat, conversations * 4)) == expected * 4
