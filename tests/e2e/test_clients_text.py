"""What users see of a reply's text: stop strings, characters, spaces, ends and counts."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from engine.text import TextCodec
from tests.e2e.clients import FRANCE, MODEL, at_once, tools, user

CHAT = [user("What is the capital of France?")]
WRITTEN = "Once upon a time there was a"
CHARACTERS = "👩🏽‍🚀 né 中文 ไทย שלום ✓"


def complete(client: openai.OpenAI, prompt: Any = WRITTEN, **fields: Any) -> Any:
    return client.completions.create(
        model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 12} | fields
    )


def streamed(client: openai.OpenAI, prompt: Any = WRITTEN, **fields: Any) -> list[Any]:
    return list(complete(client, prompt, stream=True, **fields))


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def test_text_is_cut_before_the_earliest_stop_wherever_its_edges_lie(openai_client: openai.OpenAI) -> None:
    """O046: at each character of a word, several stops, one a prefix of another, and in the last token."""
    base = complete(openai_client).choices[0].text
    word = max(base.split(), key=len)
    at = base.index(word)
    cut = [[base[at + i : at + len(word) + 1]] for i in range(len(word))]
    several = [[word, base[at - 3 : at + 2]], [word, word[:2]], [word[:2], word], [base.rstrip()[-2:]]]
    stops = [*cut, *several]

    def both(stop: list[str]) -> tuple[str, str, set[str | None]]:
        whole, chunks = complete(openai_client, stop=stop).choices[0], streamed(openai_client, stop=stop)
        reasons = {whole.finish_reason, chunks[-1].choices[0].finish_reason}
        return whole.text, text_of(chunks), reasons

    for stop, (whole, joined, reasons) in zip(stops, at_once(both, stops), strict=True):
        expected = base[: min(base.index(one) for one in stop)]
        assert (whole, joined, reasons) == (expected, expected, {"stop"}), stop


def test_a_stop_that_never_occurs_delays_nothing_for_good(openai_client: openai.OpenAI) -> None:
    """O047: no chunk in the middle is empty, and all of the text arrives."""
    chunks = streamed(openai_client, stop="x" * 40)
    assert text_of(chunks) == complete(openai_client).choices[0].text
    assert all(chunk.choices[0].text for chunk in chunks[:-1])
    assert chunks[-1].choices[0].finish_reason == "length"


def test_no_stop_in_any_spelling_leaves_the_models_own_end(openai_client: openai.OpenAI) -> None:
    """O048: absent, null and [] are the same."""
    replies = [
        openai_client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=0, max_tokens=40, **fields
        ).choices[0]
        for fields in ({}, {"stop": None}, {"extra_body": {"stop": []}})
    ]
    assert [reply.finish_reason for reply in replies] == ["stop"] * 3
    assert len({reply.message.content for reply in replies}) == 1


@pytest.mark.parametrize("stop", ["", [""], ["", "x"], ["x"] * 1000, "x" * 1_000_000], ids=lambda s: len(s))
def test_an_impossible_stop_is_refused(openai_client: openai.OpenAI, stop: Any) -> None:
    """O049: empty, too many, too long: a 400 that names the field, never an instant match."""
    with pytest.raises(openai.BadRequestError) as caught:
        complete(openai_client, stop=stop)
    assert caught.value.param == "stop"


def test_characters_of_several_tokens_arrive_whole(openai_client: openai.OpenAI, codec: TextCodec) -> None:
    """O050: eight streams at once and one whole reply, with emoji sequences and four scripts."""
    fields: dict[str, Any] = {
        "max_tokens": 120,
        "extra_body": {
            "response_format": {"type": "grammar", "grammar": f'root ::= "{CHARACTERS}"'},
            "return_token_ids": True,
        },
    }
    whole = complete(openai_client, **fields).choices[0]
    assert whole.text == codec.decode(whole.token_ids) == CHARACTERS
    assert len(whole.token_ids) > len(CHARACTERS)
    for chunks in at_once(lambda _: streamed(openai_client, **fields), range(8)):
        assert text_of(chunks) == CHARACTERS
        assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == whole.token_ids


@pytest.mark.parametrize("left_out", [1, 2])
def test_a_prompt_that_ends_inside_a_character_is_not_told(
    openai_client: openai.OpenAI, codec: TextCodec, left_out: int
) -> None:
    """O051: only new text comes, whole and streamed, and nothing of the prompt."""
    letter = codec.encode("ᚠ")
    assert len(letter) == 3
    prompt = [*codec.encode("The secret word is swordfish. "), *letter[:-left_out]]
    whole = complete(openai_client, prompt, max_tokens=4).choices[0].text
    assert text_of(streamed(openai_client, prompt, max_tokens=4)) == whole
    for part in ("The", "secret", "word", "fish"):
        assert part not in whole


def test_a_reply_keeps_its_first_space(openai_client: openai.OpenAI, codec: TextCodec) -> None:
    """O052: streamed, whole and decoded at once, spaces and all."""
    extra = {"return_token_ids": True}
    whole = complete(openai_client, FRANCE, extra_body=extra).choices[0]
    assert whole.text.startswith(" Paris")
    assert text_of(streamed(openai_client, FRANCE)) == codec.decode(whole.token_ids) == whole.text


@pytest.mark.parametrize("kind", ["chat", "tools", "completions"])
def test_each_choice_ends_once_and_counts_are_those_of_the_whole_reply(
    openai_client: openai.OpenAI, kind: str
) -> None:
    """O053, O054: with n, a stop string, tools and the model's own end."""
    fields: dict[str, Any] = {"model": MODEL, "n": 3, "seed": 11, "temperature": 1, "max_tokens": 24}
    if kind == "completions":
        fields |= {"prompt": WRITTEN, "stop": [",", "."]}
        create = openai_client.completions.create
    else:
        fields["messages"] = CHAT
        create = openai_client.chat.completions.create
    if kind == "tools":
        fields |= {"tools": tools(), "tool_choice": "required", "parallel_tool_calls": False}
        fields["max_tokens"] = 40
    whole = create(**fields)
    chunks = list(create(stream=True, **fields))
    usage = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usage) == 1
    assert usage[0].completion_tokens == whole.usage.completion_tokens
    assert usage[0].prompt_tokens == whole.usage.prompt_tokens
    for index, choice in enumerate(whole.choices):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
