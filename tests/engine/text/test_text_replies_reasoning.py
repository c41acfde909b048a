"""What a model thinks is split from what it answers, the same however its text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_families import HERMES, IMPLICIT, OPENED, QWEN3, make_codec, token
from text_replies import call, content, cut, fed, joined, reasoning

from engine.text import TextCodec
from engine.text.call_formats import HERMES as HERMES_CALLS
from engine.text.call_formats import LLAMA3
from engine.text.replies import Part, make_parser
from engine.text.reply_reasoning import Thinking

THINK = Thinking("<think>", "</think>", implicit=False)
IMPLIED = THINK._replace(implicit=True)
CALL = '<tool_call>\n{"name": "n", "arguments": {}}\n</tool_call>'


def split(
    text: str, *, thinking: Thinking = THINK, opened: str = "", pieces: list[str] | None = None
) -> list[Part]:
    parser = make_parser(HERMES_CALLS, thinking, tools=True, opened=opened)
    return joined(fed(parser, [text] if pieces is None else pieces))


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm, 2+2.\n</think>\n\nIt is 4.\n", "", [reasoning("Hm, 2+2."), content("It is 4.\n")]),
        ("\n<think>Hm.</think>4", "", [reasoning("Hm."), content("4")]),
        ("Hm, 2+2.\n</think>\n\nIt is 4.", "<think>\n", [reasoning("Hm, 2+2."), content("It is 4.")]),
        ("<think>\nHm.</think>4", "<think>\n", [reasoning("Hm."), content("4")]),
        (" on.</think>4", "<think>\nSo it goes", [reasoning(" on."), content("4")]),
        ("<think>\n\n</think>\n\n4", "", [content("4")]),
        ("4 <think> 5", "<think>\n\n</think>\n\n", [content("4 <think> 5")]),
        ("4</think>5", "</think>\n\n", [content("4</think>5")]),
        ("<think>\nHm, 2+", "", [reasoning("Hm, 2+")]),
        ("<think>\nHm.\n</thi", "", [reasoning("Hm.\n</thi")]),
        ("<thin", "", [content("<thin")]),
        ("  It is 4.", "", [content("  It is 4.")]),
        ("The tag <think> opens, </think> closes.", "", [content("The tag <think> opens, </think> closes.")]),
        (
            "<think>a</think>b<think>c</think>",
            "",
            [reasoning("a"), content("b<think>c</think>")],
        ),
        (f"<think>\nI call.\n</think>\n\n{CALL}", "", [reasoning("I call."), call(0, "n", "{}")]),
        (
            f"<think>Not {CALL} yet</think>Now:\n{CALL}\nso",
            "",
            [reasoning(f"Not {CALL} yet"), content("Now:"), call(0, "n", "{}"), content("so")],
        ),
    ],
)
def test_reasoning_is_split_off(text: str, opened: str, expected: list[Part]) -> None:
    assert split(text, opened=opened) == expected
    for place in range(1, len(text)):
        assert split("", opened=opened, pieces=[text[:place], text[place:]]) == expected
    assert split("", opened=opened, pieces=list(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hm.\n</think>\n\n4", [reasoning("Hm."), content("4")]),
        ("<think>\nHm.\n</think>\n\n4", [reasoning("Hm."), content("4")]),
        ("Hm, but", [reasoning("Hm, but")]),
    ],
)
def test_a_model_that_always_thinks_may_leave_out_the_opening(text: str, expected: list[Part]) -> None:
    assert split(text, thinking=IMPLIED) == split("", thinking=IMPLIED, pieces=list(text)) == expected


def test_a_bare_call_behind_reasoning_is_at_the_replys_beginning() -> None:
    parser = make_parser(LLAMA3, THINK, tools=True)
    text = '<think>Hm.</think>\n{"name": "n", "parameters": {}}'
    assert joined(fed(parser, text)) == [reasoning("Hm."), call(0, "n", "{}")]


def test_reasoning_comes_as_it_is_written() -> None:
    parser = make_parser(HERMES_CALLS, THINK, tools=False)
    assert parser.push("<think>\n") == []
    assert parser.push("Hm, ") == [reasoning("Hm,")]
    assert parser.push("2 < 3 </th") == [reasoning(" 2 < 3")]
    assert parser.push("ink>\n\nYes") == [content("Yes")]


def test_white_space_is_held_back_up_to_a_thousand_blanks() -> None:
    for text, expected in (
        (f"<think>x{' ' * 1500}</think>y", [reasoning("x" + " " * 500), content("y")]),
        (f"{' ' * 1001}<think>x</think>y", [content(f"{' ' * 1001}<think>x</think>y")]),
        (f"{' ' * 1000}<think>x</think>y", [reasoning("x"), content("y")]),
    ):
        assert split(text) == split("", pieces=list(text)) == expected
    late = f"{' ' * 1500}<think>x</think>y"
    assert split(late, opened="<think>") == split("", opened="<think>", pieces=list(late))


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "</", "nk>", "a", " ", "\n", CALL]), max_size=15
    ).map("".join),
    st.sampled_from(["", "<think>\n", "<think>x", "</think>"]),
    st.sampled_from([THINK, IMPLIED]),
    st.data(),
)
@settings(deadline=None, max_examples=150)
def test_the_split_does_not_depend_on_the_cut(
    text: str, opened: str, thinking: Thinking, data: st.DataObject
) -> None:
    whole = split(text, thinking=thinking, opened=opened)
    places = data.draw(st.sets(st.integers(0, len(text))))
    assert split("", thinking=thinking, opened=opened, pieces=cut(text, places)) == whole
    assert split("", thinking=thinking, opened=opened, pieces=list(text)) == whole


def chat_codec(template: str) -> TextCodec:
    return make_codec(template, "<|im_start|>", "<|im_end|>", plain=("<think>", "</think>"))


@pytest.mark.parametrize(
    ("template", "reasons"), [(HERMES, False), (QWEN3, True), (OPENED, True), (IMPLICIT, True)]
)
def test_the_template_says_whether_a_model_reasons(template: str, reasons: bool) -> None:
    codec = chat_codec(template)
    assert codec.reasons == reasons
    parts = joined(fed(codec.reply_parser(tools=False), ["<think>a</think>b"]))
    assert parts == ([reasoning("a"), content("b")] if reasons else [content("<think>a</think>b")])
    assert joined(fed(codec.reply_parser(tools=False, reasoning=False), ["<think>a</think>b"])) == [
        content("<think>a</think>b")
    ]


def test_the_prompts_end_says_what_it_has_begun() -> None:
    """Only the reply's own turn counts: users write what they like."""
    question = [{"role": "user", "content": "what is <think> and\n<think>\n"}]

    def opened(codec: TextCodec, **options: object) -> str:
        return codec.opened_by(codec.encode_chat(question, **options))

    assert opened(chat_codec(OPENED)) == "<think>\n"
    assert opened(chat_codec(QWEN3)) == ""
    assert opened(chat_codec(QWEN3), extra={"enable_thinking": False}) == "</think>\n\n"
    assert opened(chat_codec(HERMES)) == ""
    codec = chat_codec(OPENED)
    begun = [*question, {"role": "assistant", "content": "<think>\nHm, "}]
    ids = codec.encode_chat(begun, continue_final_message=True)
    assert codec.opened_by(ids) == "<think>\nHm, "
    parser = codec.reply_parser(tools=False, opened=codec.opened_by(ids))
    assert joined(fed(parser, ["so.</think>4"])) == [reasoning("so."), content("4")]
    assert codec.opened_by([]) == ""


def test_markers_that_are_control_tokens_are_seen_and_end_no_turn() -> None:
    codec = make_codec(OPENED, "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    markers = {token(codec, "<think>"), token(codec, "</think>")}
    assert codec.reply_markers(tools=False) == markers
    ids = codec.encode_chat([{"role": "user", "content": "a"}])
    assert codec.opened_by(ids) == "<think>\n"
    assert chat_codec(OPENED).reply_markers(tools=True) == frozenset()


def test_another_spelling_of_the_markers_is_known() -> None:
    codec = make_codec("{{ messages[0].content }}[THINK]a[/THINK]", "[THINK]", "[/THINK]")
    assert joined(fed(codec.reply_parser(tools=False), ["[THINK]a[/THINK]b"])) == [
        reasoning("a"),
        content("b"),
    ]
    assert len(codec.reply_markers(tools=False)) == 2


def test_an_effort_becomes_the_templates_own_variable() -> None:
    hybrid = chat_codec(QWEN3)
    for effort in ("low", "high", True, 2048):
        assert hybrid.thinking_options(effort) == {"enable_thinking": True}
    for effort in ("none", False, 0):
        assert hybrid.thinking_options(effort) == {"enable_thinking": False}
    assert chat_codec(OPENED).thinking_options("high") is None
    assert chat_codec(HERMES).thinking_options("none") is None
    graded = chat_codec("{{ reasoning_effort }}{{ messages[0].content }}")
    assert graded.thinking_options("max") == {"reasoning_effort": "high"}
    assert graded.thinking_options(True) == {"reasoning_effort": "medium"}
    assert graded.thinking_options("none") is None
    silent = chat_codec("{% if reasoning_effort != 'none' %}{{ thinking }}{% endif %}")
    assert silent.thinking_options(False) == {"thinking": False, "reasoning_effort": "none"}
