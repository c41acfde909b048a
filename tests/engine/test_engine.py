"""The engine over a real (tiny) model: streams, the cache's promises, failures, draining and reloading."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import pytest

from engine import (
    ContextLengthExceeded,
    Engine,
    EngineRequest,
    EngineUnavailable,
    Namespace,
    Overloaded,
    RequestError,
    SamplingParams,
    StepFailed,
)
from engine.plan import StepPlan, StepResult
from tests.engine.engines import Result, Start, collect, prompt, request, run


async def test_a_repeat_is_cached_up_to_the_last_token_and_changes_no_bit(start: Start) -> None:
    engine = await start()
    cold = await run(engine, request(prompt(77)))
    warm = await run(engine, request(prompt(77)))
    assert (cold.cached, warm.cached) == (0, 76)
    assert (cold.ids, cold.logprobs) == (warm.ids, warm.logprobs)
    assert len(cold.ids) == 8
    assert cold.finish == "length"


@pytest.mark.parametrize("page_size", [1, 4, 16])
async def test_divergence_is_found_to_the_token(start: Start, page_size: int) -> None:
    engine = await start(page_size=page_size)
    base = prompt(70)
    await run(engine, request(base))
    for k in [1, 3, 15, 16, 17, 31, 32, 33, 48, 69]:
        other = (*base[:k], (base[k] + 1) % 320, *prompt(5, seed=k))
        assert (await run(engine, request(other, 1))).cached == k


async def test_the_next_turn_finds_prompt_and_reply(start: Start) -> None:
    """O004: turn 1 is 120 + 40 tokens; turn 2 repeats them and finds 159."""
    engine = await start()
    first = await run(engine, request(prompt(120), 40))
    second = await run(engine, request(prompt(120) + first.ids + prompt(30, seed=9), 4))
    assert second.cached == 159


async def test_namespaces_share_nothing(start: Start) -> None:
    """O007, O008, O011: first use of each key is cold, the second hits; absent differs from empty."""
    engine = await start()
    spaces = [
        Namespace(),
        Namespace(isolation_key=""),
        Namespace(isolation_key="a"),
        Namespace(account="a"),
        Namespace(account="a", isolation_key="a"),
    ]
    first = [(await run(engine, request(prompt(50), namespace=s))).cached for s in spaces]
    again = [(await run(engine, request(prompt(50), namespace=s))).cached for s in spaces]
    assert first == [0] * 5
    assert again == [49] * 5


async def test_cache_max_len_caps_the_match_and_zero_turns_it_off(start: Start) -> None:
    engine = await start()
    await run(engine, request(prompt(60), cache_max_len=0))
    assert (await run(engine, request(prompt(60), cache_max_len=0))).cached == 0
    assert (await run(engine, request(prompt(60), cache_max_len=21))).cached == 21
    assert (await run(engine, request(prompt(60)))).cached == 59


@pytest.mark.parametrize("diverge", [96, 100])
async def test_a_cold_prefix_is_computed_once(start: Start, diverge: int) -> None:
    """O018: 16 cold requests together run the prefix once, and their tails; also when one ends in a page."""
    engine = await start(max_step_tokens=32)
    shared = prompt(diverge)
    results = await asyncio.gather(
        *(run(engine, request((*shared, i, *prompt(6, seed=i)), 1)) for i in range(16))
    )
    assert engine.stats().computed_rows == diverge + 16 * 7
    assert sorted(r.cached for r in results) == [0] + [diverge] * 15


async def test_a_follower_takes_over_when_the_first_one_leaves(start: Start) -> None:
    engine = await start(max_step_tokens=16)
    shared = prompt(160)
    streams = [engine.submit(request((*shared, i), 1)) for i in range(4)]
    while engine.stats().computed_rows < 64:
        await asyncio.sleep(0)
    streams[0].abort()
    results = await asyncio.gather(*(collect(s) for s in streams))
    assert [r.finish for r in results] == ["abort", "length", "length", "length"]
    assert engine.stats().computed_rows == 160 + 3


async def test_the_door_refuses_what_cannot_run(start: Start) -> None:
    """O027, O028, O033, O035, O036, O065: one limit, checked before anything is queued."""
    engine = await start()
    assert engine.info.context_length == 512
    with pytest.raises(RequestError):
        engine.submit(request(()))
    for length in (512, 513, 1024):
        with pytest.raises(ContextLengthExceeded, match="512"):
            engine.submit(request(prompt(length)))
    for bad in (-1, 320, 2**40):
        with pytest.raises(RequestError):
            engine.submit(request((1, bad)))
    with pytest.raises(RequestError):
        engine.submit(request((1,), -1))
    for length in (511, 510):
        result = await run(engine, request(prompt(length), 2))
        assert len(result.ids) == min(2, 512 - length)
        assert result.finish == "length"


async def test_the_context_is_no_longer_than_the_pool(start: Start) -> None:
    """O027, O029, O037: a request that fills the pool alone ends with "length"; the next one is served."""
    engine = await start(kv_gb=200 * 1024 / 1e9)
    limit = engine.info.context_length
    assert limit == (engine.info.num_pages - 2) * 16 < 512
    result = await run(engine, request(prompt(limit - 5), 10_000))
    assert len(result.ids) == 5
    assert result.finish == "length"
    assert (await run(engine, request(prompt(20, seed=3), 4))).finish == "length"


async def test_a_prompt_that_fills_the_pool_is_found_to_the_token(start: Start) -> None:
    """One page is spare, so that even then the rows of a page in use can be copied."""
    engine = await start(kv_gb=200 * 1024 / 1e9)
    longest = engine.info.context_length - 1
    for length in (longest, longest - 3):
        ids = prompt(length, seed=length)
        assert [(await run(engine, request(ids, 1))).cached for _ in range(2)] == [0, length - 1]


async def test_max_tokens_zero_only_fills_the_cache(start: Start) -> None:
    """O034: nothing is generated, the prompt is cached, the receipt is right."""
    engine = await start()
    result = await run(engine, request(prompt(40), 0))
    assert result.ids == ()
    assert result.finish == "length"
    assert result.cached == 0
    assert (await run(engine, request(prompt(40), 0))).cached == 39


async def test_preemption_changes_no_bit(start: Start) -> None:
    """O005, O032: in a pool too small for all, streams are those of a roomy one; nothing counts as cached."""
    cases = [request(prompt(60, seed=i), 40) for i in range(8)]
    roomy = await start(kv_gb=0.05)
    wanted = [await run(roomy, c) for c in cases]
    tight = await start(kv_gb=22 * 2 * 2 * 2 * 16 * 16 * 4 / 1e9, max_context=128)
    results = await asyncio.gather(*(run(tight, c) for c in cases))
    assert tight.stats().preemptions > 0
    assert [(r.ids, r.logprobs, r.finish) for r in results] == [(w.ids, w.logprobs, w.finish) for w in wanted]
    assert [r.cached for r in results] == [0] * 8
    assert tight.stats().cached_tokens == 0


async def test_two_hundred_at_once(start: Start) -> None:
    engine = await start(kv_gb=0.002)
    results = await asyncio.gather(*(run(engine, request(prompt(5 + i % 90, seed=i), 4)) for i in range(200)))
    assert all(len(r.ids) == 4 for r in results)
    assert engine.stats().requests == 200


async def test_a_full_queue_is_refused(start: Start) -> None:
    engine = await start(max_waiting=3, max_running=1)
    streams = [engine.submit(request(prompt(20, seed=i), 50)) for i in range(3)]
    with pytest.raises(Overloaded):
        engine.submit(request(prompt(20)))
    assert all(len(r.ids) == 50 for r in await asyncio.gather(*map(collect, streams)))


async def test_aborts_at_any_moment_lose_no_page(start: Start) -> None:
    """O038, O039, O041, O042: waiting, in prefill, in decode, at once; the others are complete."""
    engine = await start(max_step_tokens=16, max_running=6)
    rng = random.Random(1)

    async def leave(i: int) -> Result:
        stream = engine.submit(request(prompt(80, seed=i), 60))
        for _ in range(rng.choice([0, 0, 1, 5, 40, 120])):
            await asyncio.sleep(0)
        stream.abort()
        stream.abort()
        return await collect(stream)

    async def stay(i: int) -> Result:
        return await run(engine, request(prompt(80, seed=i), 20))

    left, stayed = (
        asyncio.gather(*(leave(i) for i in range(50))),
        asyncio.gather(*(stay(100 + i) for i in range(4))),
    )
    assert {r.finish for r in await left} == {"abort"}
    alone = [await run(engine, request(prompt(80, seed=100 + i), 20)) for i in range(4)]
    assert [r.ids for r in await stayed] == [r.ids for r in alone]


async def test_leaving_the_block_aborts(start: Start) -> None:
    engine = await start()
    async with engine.submit(request(prompt(20), 400)) as stream:
        assert (await anext(stream)).token_ids
    assert [d async for d in stream][-1].finish_reason == "abort"


async def test_stop_ends_with_stop(start: Start) -> None:
    engine = await start()
    stream = engine.submit(request(prompt(20), 400))
    await anext(stream)
    stream.stop()
    assert [d async for d in stream][-1].finish_reason == "stop"


def fail_on(engine: Engine, monkeypatch: pytest.MonkeyPatch, when: Callable[[StepPlan], str | None]) -> None:
    """Let the real runner raise, or report its first sequence as not finite, where `when` says so."""
    real = engine._runner.run

    def run_step(plan: StepPlan) -> StepResult:
        kind = when(plan)
        if kind == "raise":
            raise RuntimeError("injected")
        result = real(plan)
        if kind == "nan":
            return StepResult(result.tokens, result.logprobs, frozenset({0}), result.seconds)
        return result

    monkeypatch.setattr(engine._runner, "run", run_step)


@pytest.mark.parametrize("kind", ["raise", "nan"])
@pytest.mark.parametrize("at", [0, 2, 5, 9])
async def test_a_bad_step_ends_only_its_own_requests(
    start: Start, monkeypatch: pytest.MonkeyPatch, kind: str, at: int
) -> None:
    """O088: its requests end with an error, those that wait go on, no page is lost."""
    engine = await start(max_step_tokens=24, max_running=2)
    hit: list[tuple[int, ...]] = []

    def when(plan: StepPlan) -> str | None:
        if plan.step != at:
            return None
        hit.append(plan.sequence_ids if kind == "raise" else plan.sequence_ids[:1])
        return kind

    fail_on(engine, monkeypatch, when)
    results = await asyncio.gather(*(run(engine, request(prompt(50, seed=i // 2), 6)) for i in range(6)))
    failed = [i for i, r in enumerate(results) if r.finish == "error"]
    assert failed == sorted(hit[0])
    assert all(results[i].error for i in failed)
    assert all(len(r.ids) == 6 for i, r in enumerate(results) if i not in failed)
    again = await run(engine, request(prompt(50, seed=0), 6))
    other = await (await start()).submit(request(prompt(50, seed=0), 6)).__anext__()
    assert again.deltas[0].token_ids == other.token_ids
    assert engine.ready


async def test_three_failed_steps_in_a_row_end_the_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """O088, O090: in-flight and waiting requests end with an error, new ones are refused, and it says why."""
    engine = await start(max_running=1)
    fail_on(engine, monkeypatch, lambda plan: "raise")
    results = await asyncio.gather(*(run(engine, request(prompt(20, seed=i))) for i in range(5)))
    assert {r.finish for r in results} == {"error"}
    error = await asyncio.wait_for(engine.failed(), 5)
    assert isinstance(error, StepFailed)
    assert "injected" in str(error)
    assert not engine.ready
    with pytest.raises(EngineUnavailable):
        engine.submit(request(prompt(20)))
    await engine.drain()
    monkeypatch.undo()


async def test_draining_finishes_what_runs_and_refuses_the_rest(start: Start) -> None:
    engine = await start()
    stream = engine.submit(request(prompt(20), 30))
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    assert not engine.ready
    with pytest.raises(EngineUnavailable):
        engine.submit(request(prompt(20)))
    assert len((await collect(stream)).ids) == 30
    await draining


async def test_closing_ends_every_stream(start: Start) -> None:
    engine = await start(max_running=1)
    streams = [engine.submit(request(prompt(20, seed=i), 400)) for i in range(3)]
    await anext(streams[0])
    await engine.close()
    assert [(await collect(s)).finish for s in streams] == ["abort"] * 3


async def test_reload_forgets_the_cache_and_keeps_the_queue(start: Start) -> None:
    """O013: the old weights' pages never match again; running requests finish, waiting ones run after."""
    engine = await start(max_running=1)
    before = await run(engine, request(prompt(40)))
    streams = [engine.submit(request(prompt(40, seed=i), 20)) for i in (1, 2)]
    await anext(streams[0])
    await engine.reload()
    results = [await collect(s) for s in streams[1:]]
    after = await run(engine, request(prompt(40)))
    assert len(results[0].ids) == 20
    assert after.cached == 0
    assert after.ids == before.ids
    assert (await run(engine, request(prompt(40)))).cached == 39


async def test_each_request_logs_one_line(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = await start(max_step_tokens=64)
    with caplog.at_level(logging.INFO, "headwater.request"):
        await run(engine, request(prompt(33), 5))
        await run(engine, request(prompt(33), 5))
        stream = engine.submit(request(prompt(500, seed=1)))
        while not engine.stats().running:
            await asyncio.sleep(0)
        stream.abort()
        await collect(stream)
    lines = [r.getMessage() for r in caplog.records if r.name == "headwater.request"]
    assert len(lines) == 3
    assert "prompt=33 cached=32 computed=1 generated=5" in lines[1]
    assert "finish=length" in lines[1]
    assert "prompt=500 cached=0 computed=64 generated=0" in lines[2], "what was really run"


async def test_a_seed_decides_the_sample(start: Start) -> None:
    engine = await start()

    async def sample(seed: int | None, choice: int = 0) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=seed)
        req = EngineRequest(request_id="s", prompt=prompt(20), params=params, choice_index=choice)
        return (await run(engine, req)).ids

    assert await sample(7) == await sample(7)
    assert await sample(7) != await sample(8)
    assert await sample(7) != await sample(7, 1)
    assert await sample(None) != await sample(None)
