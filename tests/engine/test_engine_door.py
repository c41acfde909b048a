"""What the engine takes, in which order, and whom it sends away."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from engine import (
    ConstraintFailed,
    Engine,
    Overloaded,
    RequestError,
    RequestStream,
    SamplingParams,
    machine,
)
from tests.engine.engines import Start, collect, prompt, request, run

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("token", [320, -1, 2**40])
async def test_token_ids_beyond_the_vocabulary_are_refused(start: Start, token: int) -> None:
    """O063, O064: at the door, naming the field; who runs beside it does not notice."""
    engine = await start()
    canary = engine.submit(request(prompt(20), 30))
    await anext(canary)
    for field, value in (("stop_token_ids", (5, token)), ("logit_bias", ((5, 1.0), (token, 1.0)))):
        params = SamplingParams(max_tokens=3, min_tokens=2, **{field: value})  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="0 to 319") as refused:
            engine.submit(request(prompt(20), params=params))
        assert refused.value.param == field
    rest = await collect(canary)
    assert rest.ids == (await run(engine, request(prompt(20), 30))).ids[1:]
    edge = SamplingParams(max_tokens=3, stop_token_ids=(0, 319), logit_bias=((0, 1.0), (319, 1.0)))
    assert (await run(engine, request(prompt(20), params=edge))).finish in ("length", "stop")


@pytest.mark.parametrize("field", ["prompt_logprobs", "prompt_logprobs_from", "cache_max_len"])
async def test_counts_below_nothing_are_refused(start: Start, field: str) -> None:
    """O085: -1 does not mean all."""
    engine = await start()
    with pytest.raises(RequestError, match=f"{field} must be 0 or more") as refused:
        engine.submit(request(prompt(20), **{field: -1}))
    assert refused.value.param == field


async def test_more_alternatives_than_tokens_are_all_there_are(start: Start) -> None:
    engine = await start()
    result = await run(engine, request(prompt(4), 0, prompt_logprobs=10**6))
    assert all(len(s.top) == 320 for s in result.scores if s)


def ordered(streams: dict[str, RequestStream]) -> tuple[list[str], asyncio.Future[list[None]]]:
    """The names of streams in the order of their first tokens (it grows), and the end of them all."""
    order: list[str] = []

    async def watch(name: str) -> None:
        async for delta in streams[name]:
            if delta.token_ids and name not in order:
                order.append(name)

    return order, asyncio.gather(*map(watch, streams))


async def test_an_urgent_request_goes_first_and_costs_the_last_one_its_place(start: Start) -> None:
    """In a queue that is full the last of the ordinary ones ends with "shed", and no equal does."""
    engine = await start(max_running=1, max_waiting=2)
    running = engine.submit(request(prompt(20), 40))
    await anext(running)
    streams = {name: engine.submit(request(prompt(20, i))) for i, name in enumerate(("first", "second"))}
    with pytest.raises(Overloaded):
        engine.submit(request(prompt(20)))
    with pytest.raises(RequestError):
        engine.submit(request((-1,), priority=1))
    streams["urgent"] = engine.submit(request(prompt(20, 5), priority=1))
    shed = await collect(streams.pop("second"))
    assert (shed.finish, shed.receipt, shed.ids) == ("shed", None, ())
    order, ends = ordered(streams)
    await asyncio.gather(collect(running), ends)
    assert order == ["urgent", "first"]
    assert engine.stats().finished == {"length": 3, "shed": 1}


async def test_a_reload_keeps_the_order_of_the_queue(start: Start) -> None:
    engine = await start(max_running=1)
    running = engine.submit(request(prompt(20), 20))
    await anext(running)
    names = {"first": 0, "urgent": 1, "second": 0, "late": -1, "also urgent": 1}
    streams = {
        name: engine.submit(request(prompt(20, i), priority=priority))
        for i, (name, priority) in enumerate(names.items())
    }
    order, ends = ordered(streams)
    await engine.reload()
    await asyncio.gather(collect(running), ends)
    assert order == ["urgent", "also urgent", "first", "second", "late"]


class Even:
    """Lets even tokens through, and knows no more than `limit` of them; a reply ends after `length`."""

    source = "even"

    def __init__(self, length: int, limit: int = 1000) -> None:
        self.length, self.limit = length, limit

    def mask(self, generated: object) -> bytes:
        if len(generated) >= self.limit:  # type: ignore[arg-type]
            raise ConstraintFailed("too many even tokens")
        return bytes([0b01010101] * 40)

    def complete(self, generated: object) -> bool:
        return len(generated) >= self.length  # type: ignore[arg-type]


async def constrained(engine: Engine, constraint: Even | None) -> tuple[tuple[int, ...], object, str | None]:
    result = await run(engine, request(prompt(20), params=GREEDY, constraint=constraint))
    return result.ids, result.finish, result.error


async def test_a_constraint_binds_its_own_sequence_and_fails_alone(start: Start) -> None:
    """One is finished, one is cut, one can't be followed: beside each other, and beside one that is free."""
    engine = await start()
    free, ended, cut, failed = await asyncio.gather(
        *(constrained(engine, c) for c in (None, Even(7), Even(100), Even(100, 4)))
    )
    assert free == await constrained(engine, None)
    assert any(token % 2 for token in free[0])
    assert (ended[0], ended[1]) == (cut[0][:7], "stop")
    assert (len(cut[0]), cut[1]) == (12, "length")
    assert failed == (cut[0][:4], "error", "too many even tokens")
    assert not any(token % 2 for token in cut[0])
    assert engine.stats().failed_steps == 0


async def test_a_start_warns_once_of_more_threads_than_cpus_and_of_a_missing_compiler(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(machine, "usable_cpus", lambda: 1)

    async def warned(threads: int) -> list[str]:
        caplog.clear()
        await start(threads=threads)
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]

    alone = await warned(1)
    assert len([text for text in alone if "no-such-compiler" in text]) == 1
    assert not any("THREADS" in text for text in alone)
    (threads,) = [text for text in await warned(2) if "THREADS" in text]
    assert threads.startswith("HEADWATER_THREADS=2 is more than the 1 CPUs that may be used")
