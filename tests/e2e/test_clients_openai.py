"""OpenAI's unmodified client: completions, chats, streams and usage."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from engine.text import TextCodec
from tests.e2e.clients import FRANCE, MODEL, apart, at_once, numbers, user

PARIS = [user("What is the capital of France?")]


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(
        model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 3} | fields
    )


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=PARIS, **{"temperature": 0, "max_tokens": 20} | fields
    )


def test_a_prompt_may_be_a_text_a_list_of_texts_ids_or_lists_of_ids(
    openai_client: openai.OpenAI, codec: TextCodec
) -> None:
    ids, other = codec.encode(FRANCE), codec.encode("Water boils at")
    prompts = [FRANCE, [FRANCE, "Water boils at"], ids, [ids, other]]
    text, texts, one, two = at_once(lambda prompt: complete(openai_client, prompt), prompts)
    assert text.choices[0].text == texts.choices[0].text == one.choices[0].text == two.choices[0].text
    assert "Paris" in text.choices[0].text
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert texts.choices[1].text == two.choices[1].text != text.choices[0].text
    assert text.usage.prompt_tokens == one.usage.prompt_tokens == len(ids)
    assert texts.usage.prompt_tokens == two.usage.prompt_tokens == len(ids) + len(other)
    assert texts.usage.completion_tokens == 6


def test_echo_puts_the_prompt_in_front(openai_client: openai.OpenAI) -> None:
    plain, echoed = at_once(lambda echo: complete(openai_client, FRANCE, echo=echo), [False, True])
    assert echoed.choices[0].text == FRANCE + plain.choices[0].text


@pytest.mark.parametrize("n", [1, 3])
def test_usage_counts_a_prompt_once_and_a_repeat_finds_all_but_one_token(
    openai_client: openai.OpenAI, n: int
) -> None:
    prompt, fields = numbers(101, 10 + n), {"n": n, "temperature": 1, "max_tokens": 2}
    first, again = (complete(openai_client, prompt, extra_body={"ignore_eos": True}, **fields) for _ in "12")
    for reply in (first, again):
        assert len(reply.choices) == n
        assert reply.usage.prompt_tokens == 101
        assert reply.usage.completion_tokens == 2 * n
        assert reply.usage.total_tokens == 101 + 2 * n
    details = [reply.usage.prompt_tokens_details for reply in (first, again)]
    assert [one.cached_tokens for one in details] == [0, 100]
    assert [one.cache_write_tokens for one in details] == [101, 0]


def test_usage_of_a_batch_is_the_sum_over_its_prompts(openai_client: openai.OpenAI) -> None:
    warm, cold = numbers(40, 20), numbers(30, 21)
    complete(openai_client, warm)
    details = complete(openai_client, [warm, cold]).usage.prompt_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == (39, 30)


PLACES = {
    "absent": ({}, [False, True]),
    "true": ({"stream_options": {"include_usage": True}}, [False, False, True]),
    "false": ({"stream_options": {"include_usage": False}}, [False, False]),
}


@pytest.mark.parametrize("form", PLACES)
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_streamed_usage_comes_where_it_was_asked_for(
    openai_client: openai.OpenAI, kind: str, form: str
) -> None:
    """With the last finish_reason, in a chunk of its own after it with null before, or not at all."""
    fields, places = PLACES[form]
    call = chat if kind == "chat" else lambda client, **more: complete(client, FRANCE, **more)
    whole = call(openai_client)
    chunks = list(call(openai_client, stream=True, **fields))
    ends = [bool(chunk.choices and chunk.choices[0].finish_reason) for chunk in chunks]
    assert ends.count(True) == 1
    after_end = chunks[ends.index(True) :]
    before, told = chunks[: ends.index(True)], [chunk.usage is not None for chunk in after_end]
    assert [False, *told] == places
    # null is not the same as absent: OpenAI's form has it in every chunk before the last.
    assert {"usage" in chunk.model_fields_set for chunk in before} == {form == "true"}
    if form != "false":
        assert after_end[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert after_end[-1].usage.prompt_tokens == whole.usage.prompt_tokens
        details = after_end[-1].usage.prompt_tokens_details
        assert details.cached_tokens == whole.usage.prompt_tokens - 1
    assert bool(after_end[-1].choices) == (form != "true")


async def test_a_chat_streams_the_same_text_as_it_gives_whole(server: str) -> None:
    """Through the asynchronous client, one id and one role a reply."""
    async with openai.AsyncOpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as client:
        whole = await chat(client)
        chunks = [chunk async for chunk in await chat(client, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)


def test_the_clients_stream_helper_rebuilds_the_reply(openai_client: openai.OpenAI) -> None:
    whole = chat(openai_client)
    with openai_client.chat.completions.stream(
        model=MODEL, messages=PARIS, temperature=0, max_tokens=20, stream_options={"include_usage": True}
    ) as stream:
        rebuilt = stream.get_final_completion()
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert rebuilt.usage is not None
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def test_the_next_turn_of_a_chat_hits_the_whole_history(openai_client: openai.OpenAI) -> None:
    """Prompt and reply are both found again, up to the reply's last token."""
    key = apart()
    first = chat(openai_client, extra_body=key)
    reply = first.choices[0].message
    history = [*PARIS, {"role": "assistant", "content": reply.content}, user("And of Italy?")]
    second = openai_client.chat.completions.create(
        model=MODEL, messages=history, max_tokens=2, extra_body=key
    )
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens + first.usage.completion_tokens - 1


def test_models_are_listed_and_told_one_by_one(openai_client: openai.OpenAI) -> None:
    (card,) = openai_client.models.list().data
    assert card.id == MODEL == openai_client.models.retrieve(MODEL).id
