"""Several choices of a prompt: how they are keyed, told, ranked and counted."""

from __future__ import annotations

from typing import Any

import pytest

from engine import EngineRequest
from tests.server.fakes import MODEL, FakeEngine, chat_body, running, text_ids


def by_choice(request: EngineRequest) -> list[int]:
    """Choice k of prompt p says p, then k."""
    return text_ids(f"{request.prompt_index}{request.choice_index}")


async def test_choices_stand_in_order_of_prompt_then_choice() -> None:
    async with running(FakeEngine(by_choice)) as client:
        body = await client.complete(["a", "b"], n=3, seed=5)
        assert [(c["index"], c["text"]) for c in body["choices"]] == [
            (0, "00"),
            (1, "01"),
            (2, "02"),
            (3, "10"),
            (4, "11"),
            (5, "12"),
        ]
        assert {r.params.seed for r in client.engine.submitted} == {5}
        assert len({r.request_id for r in client.engine.submitted}) == 6


async def test_a_prompt_counts_once_however_many_choices_it_has() -> None:
    async with running(FakeEngine(by_choice)) as client:
        first = await client.complete(["abc", "xyz!"], n=3)
        usage = first["usage"]
        assert usage["prompt_tokens"] == 7
        assert usage["completion_tokens"] == 6 * 3
        assert usage["total_tokens"] == 25
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 7}
        again = await client.complete(["abc", "xyz!"], n=3)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 + 3


@pytest.mark.parametrize("include_usage", [None, True, False])
async def test_a_stream_of_choices_adds_up_to_the_whole_reply(include_usage: bool | None) -> None:
    """O053, O054: one finish reason a choice, in its last event; one usage, as in the whole reply."""
    async with running(FakeEngine(by_choice)) as client:
        fields: dict[str, Any] = {"n": 3}
        if include_usage is not None:
            fields["stream_options"] = {"include_usage": include_usage}
        events, _ = await client.stream("/v1/chat/completions", chat_body(**fields))
        assert events.pop() == "[DONE]"
        whole = await client.chat(n=3, prompt_cache_max_len=0)
        usages = [event["usage"] for event in events if event.get("usage")]
        if include_usage is False:
            assert usages == []
        else:
            assert len(usages) == 1
            assert usages[0]["completion_tokens"] == whole["usage"]["completion_tokens"] == 9
        if include_usage:
            assert events[-1]["choices"] == []
            assert all(event["usage"] is None for event in events[:-1])
        told = [event["choices"][0] for event in events if event["choices"]]
        for index in range(3):
            own = [c for c in told if c["index"] == index]
            assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]
            assert own[0]["delta"]["role"] == "assistant"
            assert "".join(c["delta"].get("content", "") for c in own) == f"0{index}"


async def test_best_of_shows_the_likeliest_and_counts_all() -> None:
    """The fake engine finds low bytes likely, so choices with lower digits win."""
    replies = ["zz", "aa", "mm", "bb"]
    engine = FakeEngine(lambda request: text_ids(replies[request.choice_index]))
    async with running(engine) as client:
        body = await client.complete("a", n=2, best_of=4)
        assert [(c["index"], c["text"], c["logprobs"]) for c in body["choices"]] == [
            (0, "aa", None),
            (1, "bb", None),
        ]
        assert body["usage"]["completion_tokens"] == 4 * 3


async def test_best_of_shows_the_prompt_too_where_that_is_asked_for() -> None:
    """Choices are told apart by log-probabilities that the prompt's own tokens don't have then."""
    async with running(FakeEngine()) as client:
        for echo in ({"echo": True}, {"echo_last": 2}, {"echo_last": 9}):
            body = await client.complete("ab", n=1, best_of=3, max_tokens=2, **echo)
            (choice,) = body["choices"]
            assert choice["text"].startswith("ab")
            assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 128, "prompt": ["a", "b", "c"]}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 0}, "best_of"),
    ],
)
async def test_too_many_or_contradicting_choices_are_refused(fields: dict[str, Any], param: str) -> None:
    async with running(FakeEngine()) as client:
        status, body, _ = await client.post("/v1/completions", {"model": MODEL, "prompt": "a", **fields})
        assert (status, body["error"]["param"]) == (400, param)
        assert not client.engine.submitted


async def test_a_request_never_asks_for_more_than_the_queue_holds() -> None:
    async with running(FakeEngine(max_waiting=4)) as client:
        status, body, _ = await client.post("/v1/completions", {"model": MODEL, "prompt": "a", "n": 5})
        assert (status, body["error"]["param"]) == (400, "n")
        assert "4" in body["error"]["message"]


async def test_urgent_requests_say_so_to_the_engine_and_in_the_reply() -> None:
    async with running(FakeEngine("a")) as client:
        urgent = await client.chat(service_tier="priority")
        assert urgent["service_tier"] == "priority"
        assert (await client.chat(service_tier="flex"))["service_tier"] == "default"
        assert "service_tier" not in await client.chat()
        assert [r.priority for r in client.engine.submitted] == [1, 0, 0]
