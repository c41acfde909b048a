"""A reply is split into content and calls of tools, the same however its text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_replies import call, content, cut, fed, joined

from engine.text.call_formats import HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, CallFormat
from engine.text.replies import Part, make_parser
from engine.text.reply_parts import join_parts

FAMILIES = (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED)
# Braces, quotes and markers inside strings, escapes, numbers of all forms, white space.
HARD = (
    '{"code": "if (x) { return \\"}\\"; }</tool_call>", "path": "C:\\\\dir\\\\",\n'
    ' "text": "\\u00e9\\ud83d\\ude00 é", "list": [1, -2.5e+3, true, null, {"deep": [[], {}]}],'
    ' "marker": "[TOOL_CALLS]<|python_tag|><tool_call>"}'
)
PARIS = '{"city": "Paris"}'

CALLS: list[tuple[CallFormat, str, list[Part]]] = [
    # Hermes and Qwen
    (
        HERMES,
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        [call(0, "get_weather", PARIS)],
    ),
    (
        HERMES,
        f'Let me look.\n\n<tool_call>\n{{"name": "a", "arguments": {HARD}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "b", "arguments": {{}}}}\n</tool_call>',
        [content("Let me look."), call(0, "a", HARD), call(1, "b", "{}")],
    ),
    (
        HERMES,
        f'One <tool_call>{{"name":"a","arguments":{PARIS}}}</tool_call> two <tool_call>\n'
        f'{{"arguments": {PARIS}, "name": "b"}}</tool_call>\nthree\n',
        [content("One"), call(0, "a", PARIS), content("two"), call(1, "b", PARIS), content("three\n")],
    ),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', [call(0, "now", "{}")]),
    (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', [call(0, "now", "{}")]),
    (HERMES, '<tool_call>{"name": "n", "parameters": {"a": 1}}</tool_call>', [call(0, "n", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "n", "arguments": "{\\"a\\": 1}"}</tool_call>', [call(0, "n", '{"a": 1}')]),
    (
        HERMES,
        '<tool_call>{"id": [1, "x"], "name": "n\\u00e9", "arguments": {}, "more": {"name": 2}}</tool_call>',
        [call(0, "né", "{}")],
    ),
    # slips of small models: a brace too many or too few, several objects in one pair, no closing marker
    (
        HERMES,
        '<tool_call>{"name": "n", "arguments": {}}}\n</tool_call>ok',
        [call(0, "n", "{}"), content("ok")],
    ),
    (HERMES, '<tool_call>{"name": "n", "arguments": {}\n</tool_call>ok', [call(0, "n", "{}"), content("ok")]),
    (
        HERMES,
        '<tool_call>\n{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}\n</tool_call>',
        [call(0, "a", "{}"), call(1, "b", "{}")],
    ),
    (
        HERMES,
        '<tool_call>{"name": "a", "arguments": {}}<tool_call>{"name": "b", "arguments": {}}',
        [call(0, "a", "{}"), call(1, "b", "{}")],
    ),
    # Llama 3
    (LLAMA3, f'{{"name": "get_weather", "parameters": {PARIS}}}', [call(0, "get_weather", PARIS)]),
    (
        LLAMA3,
        f'\n{{"type": "function", "name": "a", "arguments": {HARD}}}; {{"name": "b", "parameters": {{}}}}',
        [call(0, "a", HARD), call(1, "b", "{}")],
    ),
    (
        LLAMA3,
        f'<|python_tag|>{{"name": "a", "parameters": {PARIS}}};<|python_tag|>{{"name": "b"}} done',
        [call(0, "a", PARIS), call(1, "b", "{}"), content("done")],
    ),
    (
        LLAMA3,
        f'Let me look. <|python_tag|>{{"name": "a", "parameters": {PARIS}}}',
        [content("Let me look."), call(0, "a", PARIS)],
    ),
    # Mistral
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]',
        [call(0, "get_weather", PARIS)],
    ),
    (
        MISTRAL,
        f'Hm.\n[TOOL_CALLS][{{"name": "a", "arguments": {HARD}, "id": "VvvODy9mT"}}, '
        f'{{"name": "b", "arguments": {{}}}}] Well.',
        [content("Hm."), call(0, "a", HARD), call(1, "b", "{}"), content("Well.")],
    ),
    (MISTRAL, '[TOOL_CALLS] {"name": "a", "arguments": {}}', [call(0, "a", "{}")]),
    (
        MISTRAL_NAMED,
        f"Hm. [TOOL_CALLS]get_weather[ARGS]{HARD}[TOOL_CALLS]b.c-d[ARGS] {{}}\nWell.",
        [content("Hm."), call(0, "get_weather", HARD), call(1, "b.c-d", "{}"), content("Well.")],
    ),
    (
        MISTRAL_NAMED,
        f"[TOOL_CALLS]a[CALL_ID]VvvODy9mT[ARGS]{PARIS}[TOOL_CALLS] b{PARIS}",
        [call(0, "a", PARIS), call(1, "b", PARIS)],
    ),
]
LOOK_ALIKES: list[tuple[CallFormat, str]] = [
    (HERMES, "Use <tool_call> tags </tool_call> for that."),
    (HERMES, '<tool_call>\n{"arguments": {"city": "Paris"}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "half \\ud800", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "n", "arguments": [1]}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "n", "arguments": "no object"}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "n", "arguments": "{\\"half\\": \\"\\ud800\\"}"}\n</tool_call>'),
    (HERMES, "<tool_call>\n{'name': 'n', 'arguments': {}}\n</tool_call>"),
    (HERMES, '<tool_call>\n{"name": "n" "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"id": 01, "name": "n", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"id": nul, "name": "n", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"id": "\\x", "name": "n", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"id": [1}, "name": "n", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"id": [1, "name": "n", "arguments": {}}\n</tool_call>'),
    (HERMES, f'<tool_call>\n{{"id": {"9" * 1500}, "name": "n", "arguments": {{}}}}\n</tool_call>'),
    (HERMES, "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter></function></tool_call>"),
    (HERMES, '```json\n{"name": "n", "arguments": {}}\n```'),
    (HERMES, '{"name": "n", "arguments": {}}'),
    (HERMES, '<tool_call>\n{"name": "get_wea'),
    (HERMES, '  <tool_call>\n {"arguments": {"city": "Par'),
    (HERMES, "so <tool_ca"),
    (HERMES, " \n "),
    (LLAMA3, '{"name": "Anna", "age": 31}'),
    (LLAMA3, '{"name": "Anna"}'),
    (LLAMA3, '{"answer": {"name": "n", "parameters": {}}}'),
    (LLAMA3, 'I would call {"name": "n", "parameters": {}}'),
    (LLAMA3, '{"name": "n", "par'),
    (LLAMA3, '<|python_tag|>print("hello")'),
    (LLAMA3, '[{"name": "n", "parameters": {}}]'),
    (MISTRAL, "[TOOL_CALLS] none"),
    (MISTRAL, "[TOOL_CALLS] []"),
    (MISTRAL, "[TOOL_CALLS] [[]]"),
    (MISTRAL, '[TOOL_CALLS] [{"function": "n"}]'),
    (MISTRAL, f"[TOOL_CALLS] {'word ' * 100}{{}}"),
    (MISTRAL_NAMED, "[TOOL_CALLS]get_weather"),
    (MISTRAL_NAMED, "[TOOL_CALLS]get_weather[ARGS]Paris"),
    (MISTRAL_NAMED, "[TOOL_CALLS]get the weather{}"),
]


def split(family: CallFormat, *pieces: str) -> list[Part]:
    return joined(fed(make_parser(family, None, tools=True), pieces))


@pytest.mark.parametrize(("family", "text", "expected"), CALLS)
def test_calls_are_found_wherever_the_text_is_cut(
    family: CallFormat, text: str, expected: list[Part]
) -> None:
    """O077: an index a call, its name once and whole, its arguments as written from the first brace on."""
    assert split(family, text) == expected
    assert split(family, *text) == expected
    for place in range(1, len(text)):
        assert split(family, text[:place], text[place:]) == expected


@pytest.mark.parametrize(("family", "text"), LOOK_ALIKES)
def test_what_only_looks_like_a_call_stays_visible(family: CallFormat, text: str) -> None:
    assert split(family, text) == [content(text)]
    assert split(family, *text) == [content(text)]
    for place in range(1, len(text)):
        assert split(family, text[:place], text[place:]) == [content(text)]


def test_a_call_behind_what_only_looked_like_one_is_found() -> None:
    found = split(
        HERMES, '<tool_call>no<tool_call>{"x": 1}<tool_call>{"name": "n", "arguments": {}}</tool_call>'
    )
    assert found == [content('<tool_call>no<tool_call>{"x": 1}'), call(0, "n", "{}")]
    assert split(MISTRAL, "[TOOL_CALLS] or [TOOL_CALLS]n[ARGS]{}") == [
        content("[TOOL_CALLS] or"),
        call(0, "n", "{}"),
    ]


@pytest.mark.parametrize(
    ("family", "text", "name", "arguments"),
    [
        (HERMES, '<tool_call>\n{"name": "n", "arguments": {"city": "Par', "n", '{"city": "Par'),
        (HERMES, '<tool_call>\n{"name": "n", "arguments": {"city": "Par\\u00', "n", '{"city": "Par\\u00'),
        (HERMES, '<tool_call>\n{"name": "n", "argum', "n", ""),
        (HERMES, '<tool_call>\n{"name": "n", "arguments": {}}\n</tool', "n", "{}"),
        (LLAMA3, '{"name": "n", "parameters": {"city"', "n", '{"city"'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "n", "arguments": {"a": [1, 2', "n", '{"a": [1, 2'),
        (MISTRAL_NAMED, '[TOOL_CALLS]n[ARGS]{"a": -', "n", '{"a": -'),
        (MISTRAL_NAMED, "[TOOL_CALLS]n[ARGS]", "n", ""),
    ],
)
def test_a_call_cut_off_is_delivered_as_far_as_it_came(
    family: CallFormat, text: str, name: str, arguments: str
) -> None:
    assert split(family, *text)[0] == split(family, text)[0] == call(0, name, arguments)


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        (
            HERMES,
            '<tool_call>{"name": "n", "arguments": {\'a\': True}}\n</tool_call>\nok',
            [call(0, "n", "{'a': True}"), content("ok")],
        ),
        (
            HERMES,
            '<tool_call>{"name": "n", "arguments": {"a": "two\nlines"}}</tool_call>'
            '<tool_call>{"name": "m", "arguments": {}}</tool_call>',
            [call(0, "n", '{"a": "two\nlines"}'), call(1, "m", "{}")],
        ),
        (HERMES, '<tool_call>{"name": "n", "arguments": {oops}} </tool', [call(0, "n", "{oops}} </tool")]),
        (
            HERMES,
            '<tool_call>{"name": "n", "arguments": {oops <tool_call>{"name": "m"}</tool_call>',
            [call(0, "n", "{oops "), call(1, "m", "{}")],
        ),
        (LLAMA3, '{"name": "n", "parameters": {a: 1}}', [call(0, "n", "{a: 1}}")]),
        (
            MISTRAL_NAMED,
            "[TOOL_CALLS]n[ARGS]{a: 1}[TOOL_CALLS]m[ARGS]{}",
            [call(0, "n", "{a: 1}"), call(1, "m", "{}")],
        ),
    ],
)
def test_arguments_that_break_on_the_way_come_as_written(
    family: CallFormat, text: str, expected: list[Part]
) -> None:
    assert split(family, text) == split(family, *text) == expected


def test_arguments_come_piece_by_piece() -> None:
    """O077: a stream's reader sees the name before the arguments are written, and each piece as it comes."""
    parser = make_parser(HERMES, None, tools=True)
    assert parser.push('Hi <tool_call>\n{"name": "get_wea') == [content("Hi")]
    assert parser.push('ther", "arguments": {') == [call(0, "get_weather", "{")]
    assert parser.push('"city": ') == [Part("call", '"city": ', 0)]
    assert parser.push('"Paris"}}\n</tool_') == [Part("call", '"Paris"}', 0)]
    assert parser.push('call>\n<tool_call>{"name": "b", "arguments": {}}') == [call(1, "b", "{}")]
    assert parser.finish() == []


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    parser = make_parser(HERMES, None, tools=True)
    assert parser.push("a < b") == [content("a < b")]
    assert parser.push(" and <tool") == [content(" and")]
    assert parser.push("box>") == [content(" <toolbox>")]
    assert parser.push("\n") == []
    assert parser.push("c") == [content("\nc")]
    bare = make_parser(LLAMA3, None, tools=True)
    assert bare.push(" The {") == [content(" The {")]


def test_white_space_without_end_is_not_held_back_without_end() -> None:
    """At most a thousand blanks wait for a marker, wherever the text is cut."""
    made = '<tool_call>{"name": "n", "arguments": {}}</tool_call>'
    broken = '<tool_call>{"name": "n", "arguments": {oops}'
    for text, expected in (
        (f"x{' ' * 1500}{made}", [content("x" + " " * 500), call(0, "n", "{}")]),
        (f"x{' ' * 1000}{made}", [content("x"), call(0, "n", "{}")]),
        (f"{broken}{'}' * 1500}</tool_call>", [call(0, "n", "{oops}" + "}" * 1499)]),
    ):
        for size in (1, 7, 1600):
            assert split(HERMES, *(text[i : i + size] for i in range(0, len(text), size))) == expected
    late = "\n" * 1001 + '{"name": "n", "parameters": {}}'
    assert split(LLAMA3, late) == split(LLAMA3, *late) == [content(late)]
    parser = make_parser(HERMES, None, tools=True)
    assert parser.push(" " * 3000) == [content(" " * 2000)]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_tools_everything_is_content(family: CallFormat) -> None:
    for _, text, _ in CALLS:
        assert joined(fed(make_parser(family, None, tools=False), text)) == [content(text)]


# Pieces of calls and their markers in any order, so that every state meets every text.
SHARDS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
            "<tool",
            "[TOOL",
        ),
        *(
            '{"name": "f"',
            '"arguments": {',
            '"parameters": {"a": ',
            '"arguments": "{}"',
            '{"a": 1}',
            "f",
            "null",
        ),
        *("{", "}", "[", "]", '"', ":", ",", ";", "\\", "\\u12", "-1.5e", " ", "\n", "x", "é", "}}", "}]"),
    ]
)


@given(st.sampled_from(FAMILIES), st.lists(SHARDS, max_size=25).map("".join), st.data())
@settings(deadline=None, max_examples=200)
def test_the_result_does_not_depend_on_the_cut(family: CallFormat, text: str, data: st.DataObject) -> None:
    """And no text is lost but what stands around arguments, and white space."""
    whole = split(family, text)
    places = data.draw(st.sets(st.integers(0, len(text))))
    assert split(family, *cut(text, places)) == whole
    assert split(family, *text) == whole
    if all(part.kind == "content" for part in whole):
        assert "".join(part.text for part in whole) == text
    at = 0
    for part in whole:
        for char in part.text if (part.kind, part.text) != ("call", "{}") else "":
            at = text.find(char, at) + 1
            assert at > 0, "parts hold the text in its order"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=3)


@given(
    st.sampled_from(FAMILIES),
    st.lists(st.tuples(st.text("abz_09", min_size=1), ARGUMENTS, st.booleans()), min_size=1, max_size=3),
    st.data(),
)
@settings(deadline=None, max_examples=40)
def test_calls_written_in_a_familys_format_come_back(
    family: CallFormat, calls: list[tuple[str, dict[str, object], bool]], data: st.DataObject
) -> None:
    """Whatever the arguments: the format that templates and grammars use is the one that parsers read."""
    texts = [json.dumps(arguments, ensure_ascii=plain) for _, arguments, plain in calls]
    written = []
    for (name, _, _), text in zip(calls, texts, strict=True):
        whole = f'{{"name": {json.dumps(name)}, "{family.arguments_key}": {text}}}'
        written.append(whole if family.after_name is None else f"{name}{family.after_name}{text}")
    if family.repeats:
        reply = family.between.join(f"{family.opening}{one}{family.closing}" for one in written)
    else:
        reply = family.opening + family.between.join(written) + family.closing
    places = data.draw(st.sets(st.integers(0, len(reply)), max_size=8))
    expected = [call(i, name, text) for i, ((name, _, _), text) in enumerate(zip(calls, texts, strict=True))]
    assert split(family, *cut(reply, places)) == expected


def test_neighbours_are_joined_where_they_belong_together() -> None:
    """Two calls, or the texts around a call, stay apart; what says nothing parts no neighbours."""
    parts = [content("a"), content(""), content("b")]
    parts += [call(0, "f", ""), Part("call", "{"), Part("call", "}"), call(1, "f", "{}"), content("")]
    parts += [Part("call", " ", 1), content("c")]
    assert join_parts(parts) == [content("ab"), call(0, "f", "{}"), call(1, "f", "{} "), content("c")]
    assert join_parts([content(""), Part("call", "")]) == []
