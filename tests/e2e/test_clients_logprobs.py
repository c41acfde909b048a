"""Log-probabilities and choices through the clients: cold, warm and repeated, to the bit."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from engine.text import TextCodec
from tests.e2e.clients import FRANCE, MODEL, PAGE, apart, at_once, numbers, user

LENGTHS = [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 700]


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(
        model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 2} | fields
    )


def chat(client: openai.OpenAI, text: str = "What is the capital of France?", **fields: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=[user(text)], **{"temperature": 0, "max_tokens": 4} | fields
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_a_warm_prompts_log_probabilities_equal_the_cold_ones_to_the_bit(
    openai_client: openai.OpenAI, length: int
) -> None:
    """O001, O062: one entry a token, the first null, whether its pages came from a scored run or another."""
    prompt, scored, plain = numbers(length, 100), apart(), apart()
    fields: dict[str, Any] = {"echo": True, "logprobs": 2}
    cold = complete(openai_client, prompt, extra_body=scored, **fields)
    complete(openai_client, prompt, extra_body=plain)
    warm = [complete(openai_client, prompt, extra_body=key, **fields) for key in (scored, plain)]
    told = cold.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == length + 2
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    assert all(math.isfinite(value) and value <= 0 for value in told.token_logprobs[1:])
    for reply in warm:
        assert reply.choices[0].logprobs == told
        assert reply.choices[0].text == cold.choices[0].text
        # Prompt rows ran again: nothing of the prompt was taken from the cache.
        assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_one_echo_on_a_warm_prefix_leaves_the_server_as_it_was(openai_client: openai.OpenAI) -> None:
    """O002: the next request is answered, with the same text and from the cache."""
    prompt = numbers(300, 101)
    before = complete(openai_client, prompt, max_tokens=4)
    complete(openai_client, prompt, echo=True, logprobs=1)
    after = complete(openai_client, prompt, max_tokens=4)
    assert after.choices[0].text == before.choices[0].text
    assert after.usage.prompt_tokens_details.cached_tokens == 299


def test_the_token_after_the_cached_part_has_a_log_probability(openai_client: openai.OpenAI) -> None:
    """O003: turn 2 scores its new part only; the boundary's entry is a number, the same as in a full echo."""
    turn, more = numbers(45, 102), numbers(20, 103)
    complete(openai_client, turn)
    new = complete(openai_client, turn + more, logprobs=0, extra_body={"echo_last": len(more)})
    whole = complete(openai_client, turn + more, logprobs=0, echo=True)
    told = new.choices[0].logprobs.token_logprobs
    assert len(told) == len(more) + 2
    assert None not in told
    assert told == whole.choices[0].logprobs.token_logprobs[len(turn) :]


def test_choices_of_one_seed_differ_and_repeat(openai_client: openai.OpenAI) -> None:
    """Four choices of 32 tokens at temperature 1: each its own, all four the same the next time."""
    fields = {"n": 4, "seed": 1234, "temperature": 1, "max_tokens": 32, "logprobs": 0}
    first, again = (complete(openai_client, FRANCE, extra_body={"ignore_eos": True}, **fields) for _ in "12")
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 4
    assert [choice.text for choice in again.choices] == texts
    assert [choice.logprobs for choice in again.choices] == [choice.logprobs for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_harness_scores_a_prompt_by_echo(openai_client: openai.OpenAI, max_tokens: int) -> None:
    """O062: prompt and generated entries side by side, the likeliest token of each among them."""
    (choice,) = complete(openai_client, FRANCE, echo=True, logprobs=1, max_tokens=max_tokens).choices
    told = choice.logprobs
    count = 5 + max_tokens
    assert [len(x) for x in (told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset)] == [
        count
    ] * 4
    assert told.token_logprobs[0] is None
    for token, value, top in list(zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True))[1:]:
        assert top[token] == value <= max(top.values())
    assert "".join(told.tokens) == choice.text
    assert all(
        choice.text[at:].startswith(token) for token, at in zip(told.tokens, told.text_offset, strict=True)
    )


@pytest.mark.parametrize(("top", "beside"), [(None, 0), (0, 0), (3, 3)])
def test_chats_tell_log_probabilities_in_their_own_shape(
    openai_client: openai.OpenAI, top: int | None, beside: int
) -> None:
    """O057, O058, O060: content entries; top_logprobs null or absent is an empty list, also in chunks."""
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": top}
    whole = chat(openai_client, **fields).choices[0]
    content = whole.logprobs.content
    assert "".join(entry.token for entry in content) == whole.message.content
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == beside
        assert not beside or (entry.token, entry.logprob) in [
            (e.token, e.logprob) for e in entry.top_logprobs
        ]
    chunks = [chunk.choices[0] for chunk in chat(openai_client, stream=True, **fields)]
    streamed = [entry for one in chunks if one.logprobs for entry in one.logprobs.content]
    assert streamed == content
    assert chat(openai_client, logprobs=True).choices[0].logprobs.content == [
        entry.model_copy(update={"top_logprobs": []}) for entry in content
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 3},
        {"logprobs": False, "top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
    ],
)
def test_top_logprobs_that_can_not_be_given_are_refused(
    openai_client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    """O055, O057: by the client's typed exception, naming the field."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(openai_client, **fields)
    assert caught.value.param == "top_logprobs"
    assert "top_logprobs" in caught.value.message


def test_completions_tell_log_probabilities_for_every_number_allowed(openai_client: openai.OpenAI) -> None:
    """O059: 0 fills the lists without alternatives, null gives none, above the cap is refused."""
    none, zero, one, five = (complete(openai_client, FRANCE, logprobs=n).choices[0] for n in (None, 0, 1, 5))
    assert none.logprobs is None
    assert zero.logprobs.top_logprobs is None
    assert len(zero.logprobs.tokens) == len(zero.logprobs.text_offset) == 2
    assert zero.logprobs.token_logprobs == one.logprobs.token_logprobs == five.logprobs.token_logprobs
    assert [len(top) for top in five.logprobs.top_logprobs] == [5, 5]
    with pytest.raises(openai.BadRequestError) as caught:
        complete(openai_client, FRANCE, logprobs=6)
    assert caught.value.param == "logprobs"
    # A boolean asks for the form that chats have, as at Fireworks.
    told = complete(openai_client, FRANCE, extra_body={"logprobs": True}).choices[0].logprobs
    assert [entry["token"] for entry in told.content] == zero.logprobs.tokens


def test_the_bytes_of_the_tokens_are_the_texts_bytes(openai_client: openai.OpenAI, codec: TextCodec) -> None:
    """O061: words with their space and an emoji of several tokens, in the reply and in the echo."""
    text = " is 👍🏽 good"
    assert len(codec.encode("👍🏽")) > 2
    grammar = {"response_format": {"type": "grammar", "grammar": f'root ::= "{text}"'}}
    reply, echo = at_once(
        lambda call: call(),
        [
            lambda: chat(openai_client, logprobs=True, top_logprobs=5, max_tokens=40, extra_body=grammar),
            lambda: complete(
                openai_client, "It" + text, max_tokens=1, extra_body={"logprobs": True, "echo": True}
            ),
        ],
    )
    assert reply.choices[0].message.content == text
    content = reply.choices[0].logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes) == text.encode()
    spelled = [byte for entry in echo.choices[0].logprobs.content for byte in entry["bytes"]]
    assert bytes(spelled) == echo.choices[0].text.encode()
    assert echo.choices[0].text.startswith("It" + text)
