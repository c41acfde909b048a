"""Log-probabilities of prompts over a real (tiny) model: the cache changes no bit, and all else goes on."""

from __future__ import annotations

import asyncio

import pytest
import torch

from engine import Engine, SamplingParams
from engine.models.linear import native_bf16
from tests.engine.engines import Result, Start, collect, prompt, request, run

PAGE = 16
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 300)
DTYPES = ["float32", *(["bfloat16"] if native_bf16() else [])]


async def scored(engine: Engine, length: int, first: int = 0, max_tokens: int = 1) -> Result:
    req = request(prompt(length, length), max_tokens, prompt_logprobs=5, prompt_logprobs_from=first)
    return await run(engine, req)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_warm_prompt_has_the_scores_of_a_cold_one(start: Start, dtype: str) -> None:
    """O001, O002, O003: at every length, with the alternatives, whole or from the middle on; the receipt says
    what ran, and an ordinary request is served from the cache in between."""
    engine = await start(dtype=dtype)
    for length in LENGTHS:
        cold, warm = await scored(engine, length), await scored(engine, length)
        assert [s and s.token_id for s in cold.scores] == [None, *prompt(length, length)[1:]]
        assert all(len(s.top) == 5 for s in cold.scores if s)
        assert (warm.scores, warm.ids, warm.logprobs) == (cold.scores, cold.ids, cold.logprobs)
        assert (cold.cached, warm.cached) == (0, 0)
        assert warm.receipt is not None
        assert (warm.receipt.computed_tokens, warm.receipt.written_tokens) == (length, 0)
        for first in {1, length // 2, length - 1} - {0}:
            part = await scored(engine, length, first)
            assert part.scores == cold.scores[first:]
            assert None not in part.scores
            assert part.cached == first - 1
        assert (await run(engine, request(prompt(length, length)))).cached == length - 1


async def test_scores_of_a_reply_are_those_with_which_it_was_generated(start: Start) -> None:
    """The prompt and its reply, sent back: each token's number, and the alternatives, to the bit."""
    engine = await start()
    first = await run(engine, request(prompt(45), 40))
    again = await run(engine, request(prompt(45) + first.ids, 0, prompt_logprobs=2, prompt_logprobs_from=45))
    assert again.scores == first.logprobs
    assert (again.finish, again.ids, again.cached) == ("length", (), 44)


async def test_company_and_chunks_and_preemption_change_no_score(start: Start) -> None:
    """O034: with no token to generate, too."""
    roomy = await start()
    wanted = {length: await scored(roomy, length) for length in LENGTHS}
    for settings in ({"max_step_tokens": 23}, {"max_step_tokens": 64, "kv_gb": 24 * 4096 * 2 / 1e9}):
        engine = await start(**settings)
        if "kv_gb" in settings:
            filler = [engine.submit(request(prompt(30, 1000 + i), 60, priority=1)) for i in range(5)]
        results = await asyncio.gather(
            *(scored(engine, n, max_tokens=max_tokens) for n in LENGTHS for max_tokens in (1, 0))
        )
        assert [r.scores for r in results] == [wanted[n].scores for n in LENGTHS for _ in range(2)]
        if "kv_gb" in settings:
            await asyncio.gather(*map(collect, filler))
            assert engine.stats().preemptions > 0


async def test_a_score_that_is_not_finite_ends_its_own_request(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O002: beside it one that generates goes on; then both are served again."""
    engine = await start()
    neighbour = engine.submit(request(prompt(20, 7), 30))
    wanted = await anext(neighbour)
    decoder = engine._runner.pipeline.decoder  # type: ignore[attr-defined]
    logits = decoder.logits

    def overflowing(hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = logits(hidden).clone()
        if len(found) > 32:  # only where a prompt is scored
            found[5, 3] = float("nan")
        return found

    monkeypatch.setattr(decoder, "logits", overflowing)
    failed = await scored(engine, 40)
    assert (failed.finish, failed.scores) == ("error", ())
    assert "not finite" in (failed.error or "")
    monkeypatch.undo()
    rest = await collect(neighbour)
    assert (wanted.token_ids + rest.ids, rest.finish) == (
        (await run(engine, request(prompt(20, 7), 30))).ids,
        "length",
    )
    assert (await scored(engine, 40)).finish == "length"


async def test_choices_of_one_prompt_run_a_row_each_and_repeat(start: Start) -> None:
    """n choices with one seed at temperature 1: they differ, they repeat, and the prompt runs once."""
    engine = await start()
    params = SamplingParams(max_tokens=32, temperature=1.0, seed=11)

    async def choices(n: int) -> list[Result]:
        return await asyncio.gather(
            *(run(engine, request(prompt(77), params=params, choice_index=i)) for i in range(n))
        )

    first = await choices(5)
    rows = engine.stats().computed_rows
    assert rows == 77 + 4 + 5 * 31
    assert len({r.ids for r in first}) == 5
    assert [r.receipt and r.receipt.written_tokens for r in first] == [77, 0, 0, 0, 0]
    assert [r.ids for r in await choices(5)] == [r.ids for r in first]
    assert engine.stats().computed_rows - rows == 5 + 5 * 31
