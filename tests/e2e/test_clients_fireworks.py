"""Fireworks' unmodified client: its own fields, metrics and headers, and its sampler for training."""

from __future__ import annotations

import logging
from typing import Any

import fireworks
import pytest
from fireworks import Fireworks
from fireworks.training.sdk.sampling import DeploymentSampler, ServerMetrics

from engine.text import TextCodec
from tests.e2e.clients import FRANCE, MODEL, apart, numbers, user


def complete(client: Fireworks, prompt: Any = FRANCE, **fields: Any) -> Any:
    return client.completions.create(
        model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 3} | fields
    )


def chat(client: Fireworks, **fields: Any) -> Any:
    messages = [user("What is the capital of France?")]
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 8} | fields
    )


def test_the_clients_parser_reads_our_headers(fireworks_client: Fireworks) -> None:
    """ServerMetrics.from_headers finds tokens and seconds under the names it looks for."""
    prompt = numbers(50, 200)
    raw = [
        fireworks_client.completions.with_raw_response.create(
            model=MODEL, prompt=prompt, max_tokens=2, extra_headers={"x-request-id": "mine-1"}
        )
        for _ in "12"
    ]
    cold, warm = (ServerMetrics.from_headers(one.headers) for one in raw)
    assert (cold.prompt_tokens, cold.cached_prompt_tokens) == (50, 0)
    assert (warm.prompt_tokens, warm.cached_prompt_tokens) == (50, 49)
    assert warm.response_request_id == "mine-1"
    assert warm.num_concurrent_requests == 1
    assert warm.server_ttft is not None
    assert warm.server_processing_time is not None
    assert 0 < warm.server_ttft < warm.server_processing_time
    assert None not in (warm.tokenizer_duration, warm.prefill_duration, warm.generation_duration)
    usage = raw[1].parse().usage
    assert usage.prompt_tokens_details.cached_tokens == 49


@pytest.mark.parametrize("call", [complete, chat])
@pytest.mark.parametrize("stream", [False, True])
def test_perf_metrics_come_in_the_body_where_asked_for(
    fireworks_client: Fireworks, call: Any, stream: bool
) -> None:
    """In a stream with the last finish_reason and usage; without the wish nowhere."""
    replies = [call(fireworks_client, stream=stream, perf_metrics_in_response=p) for p in (True, False)]
    asked, plain = (list(reply) if stream else [reply] for reply in replies)
    assert all(one.perf_metrics is None for one in [*asked[:-1], *plain])
    last = asked[-1]
    assert last.choices[0].finish_reason
    metrics = ServerMetrics.from_headers(last.perf_metrics)
    assert metrics.prompt_tokens == last.usage.prompt_tokens
    assert metrics.cached_prompt_tokens == last.usage.prompt_tokens_details.cached_tokens
    assert metrics.server_ttft is not None
    assert metrics.server_processing_time is not None


def test_isolation_keys_and_caps_decide_what_is_found(fireworks_client: Fireworks) -> None:
    prompt = numbers(64, 201)

    def cached(**fields: Any) -> int:
        return complete(fireworks_client, prompt, **fields).usage.prompt_tokens_details.cached_tokens

    assert cached() == 0
    assert cached(prompt_cache_isolation_key="one") == 0
    assert cached(prompt_cache_isolation_key="one") == 63
    assert cached(extra_headers={"x-prompt-cache-isolation-key": "one"}) == 63
    assert cached(prompt_cache_key="session", user="someone") == 63
    assert cached(extra_body={"prompt_cache_max_len": 0}) == 0
    assert cached(extra_body={"prompt_cache_max_len": 20}) == 20


@pytest.mark.parametrize("call", [complete, chat])
def test_ids_and_raw_output_tell_what_the_model_saw(
    fireworks_client: Fireworks, codec: TextCodec, call: Any
) -> None:
    fields = {"return_token_ids": True, "raw_output": True, "logprobs": True}
    reply = call(fireworks_client, **fields)
    (choice,) = reply.choices
    prompt = choice.prompt_token_ids if call is complete else reply.prompt_token_ids
    text = choice.text if call is complete else choice.message.content
    assert len(prompt) == reply.usage.prompt_tokens
    assert len(choice.token_ids) == reply.usage.completion_tokens
    assert codec.decode(choice.token_ids) == text
    raw = choice.raw_output
    assert raw.prompt_token_ids == prompt
    assert raw.completion_token_ids == choice.token_ids
    assert raw.completion.startswith(text)
    assert "".join(raw.prompt_fragments) == codec.decode(prompt, skip_special=False)
    assert [entry.token_id for entry in raw.completion_logprobs.content] == choice.token_ids
    chunks = list(call(fireworks_client, stream=True, **fields))
    told = [i for chunk in chunks for i in chunk.choices[0].token_ids or ()]
    assert told == choice.token_ids
    begins = [c.choices[0].prompt_token_ids if call is complete else c.prompt_token_ids for c in chunks]
    assert begins == [prompt] + [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].raw_output.completion_token_ids == choice.token_ids


def test_the_grammar_of_a_reply_is_told_as_it_was_written(fireworks_client: Fireworks) -> None:
    grammar = 'root ::= "yes" | "no"'
    reply = chat(fireworks_client, raw_output=True, response_format={"type": "grammar", "grammar": grammar})
    assert reply.choices[0].raw_output.grammar == grammar


@pytest.mark.parametrize("form", [0, True])
def test_both_forms_of_log_probabilities_are_read_by_the_client(
    fireworks_client: Fireworks, form: int | bool
) -> None:
    (choice,) = complete(fireworks_client, logprobs=form, echo=True, max_tokens=1).choices
    told = choice.logprobs
    if form is True:
        assert [entry.text_offset for entry in told.content] == [0, 3, 11, 14, 21, 24]
        tokens, ids = [e.token for e in told.content], [e.token_id for e in told.content]
    else:
        assert told.text_offset == [0, 3, 11, 14, 21, 24]
        tokens, ids = told.tokens, told.token_ids
    assert "".join(tokens) == choice.text
    assert len(ids) == len(tokens) == 6


def test_an_application_may_go_on_naming_models_as_at_fireworks(fireworks_client: Fireworks) -> None:
    name = f"accounts/fireworks/models/{MODEL}"
    reply = fireworks_client.completions.create(model=name, prompt=FRANCE, max_tokens=1)
    assert reply.model == name
    with pytest.raises(fireworks.NotFoundError, match="is not served here"):
        fireworks_client.completions.create(model=name + "x", prompt=FRANCE, max_tokens=1)


def test_the_messages_of_fireworks_client_are_answered(fireworks_client: Fireworks) -> None:
    reply = fireworks_client.messages.create(
        model=MODEL, messages=[user("What is the capital of France?")], max_tokens=12, temperature=0
    )
    assert reply.role == "assistant"
    assert "Paris" in reply.content[0].text
    assert reply.stop_reason == "end_turn"


async def test_the_sampler_for_training_gets_ids_and_log_probabilities(
    server: str, codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    """Fireworks' DeploymentSampler: token ids in and out, metrics, and echo aligned with the ids."""
    caplog.set_level(logging.ERROR)
    sampler, prompt = DeploymentSampler(server, MODEL, "none"), codec.encode(FRANCE)
    plain = await sampler.sample_with_prompt_tokens_result(
        prompt, max_tokens=4, logprobs=True, prompt_cache_key="run-1", seed=1
    )
    (sample,) = plain.completions
    assert sample.full_tokens[:5] == prompt
    assert sample.completion_len == 4 == len(sample.inference_logprobs)
    assert plain.server_metrics.completion_tokens == 4
    assert plain.server_metrics.prompt_tokens == 5
    echoed = await sampler.sample_with_prompt_tokens(
        prompt, max_tokens=4, logprobs=True, top_logprobs=2, echo=True, seed=1
    )
    assert echoed[0].full_tokens == sample.full_tokens
    # All but the first token, which nothing predicts.
    assert echoed[0].logprobs_echoed
    assert len(echoed[0].inference_logprobs) == 4 + 4
    assert echoed[0].inference_logprobs[4:] == sample.inference_logprobs
    last = await sampler.sample_with_prompt_tokens(prompt, max_tokens=4, logprobs=True, echo_last=2, seed=1)
    assert last[0].inference_logprobs == echoed[0].inference_logprobs[2:]
    sampler.close()


def test_isolation_keys_that_contradict_each_other_are_refused(fireworks_client: Fireworks) -> None:
    with pytest.raises(fireworks.BadRequestError, match="isolation"):
        complete(
            fireworks_client,
            prompt_cache_isolation_key="a",
            extra_headers={"x-prompt-cache-isolation-key": "b"},
        )


def test_a_field_that_does_not_exist_is_refused_in_fireworks_words(fireworks_client: Fireworks) -> None:
    """O056: the text that Fireworks' own clients look for."""
    with pytest.raises(fireworks.BadRequestError) as caught:
        complete(fireworks_client, extra_body={"routing_matrix_format": "parquet_v1"} | apart())
    error = caught.value.body
    assert error["error"]["message"] == (
        "Extra inputs are not permitted, field: 'routing_matrix_format', value: 'parquet_v1'"
    )
    assert error["error"]["param"] == "routing_matrix_format"
