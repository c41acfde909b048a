"""The server in front of the real engine, with a runner that only counts: each token is the last plus one."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from engine import Engine, EngineConfig, EngineInfo
from engine.plan import GateCosts, StepCosts, StepResult
from server.lifecycle import banner
from tests.server.fakes import MODEL, VOCAB, running, until
from tests.server.sockets import connect, leave

CONTEXT = 400


class CountingRunner:
    """Runs no model: after byte b comes byte b + 1."""

    costs = StepCosts()
    gate = GateCosts()

    def __init__(self, pace):
        self.pace = pace
        self.fail = False
        self.info = EngineInfo(
            model=MODEL,
            dtype="float32",
            executor="reference",
            threads=1,
            context_length=CONTEXT,
            vocab_size=VOCAB,
            page_size=16,
            num_pages=200,
            kv_bytes=200 * 16 * 8,
            num_layers=2,
            fingerprint="counting",
            bit_identical=True,
        )

    def run(self, plan):
        time.sleep(self.pace)
        if self.fail:
            raise RuntimeError("boom")
        tokens = tuple((int(plan.token_ids[sample.row]) + 1) % 256 for sample in plan.samples)
        return StepResult(tokens=tokens, logprobs=(None,) * len(tokens))


@asynccontextmanager
async def serving(pace=0.0005, **settings):
    runner = CountingRunner(pace)
    engine = Engine(EngineConfig(**settings), runner, ThreadPoolExecutor(1))
    engine.runner = runner
    async with running(engine) as client:
        yield client
    assert engine.stats().pinned_pages == 0
    engine.check()


async def test_cached_tokens_are_exact_in_body_and_headers():
    """A repeat of n tokens reports n - 1; a prompt that diverges at token k reports k."""
    async with serving() as client:
        base = [5 + i % 200 for i in range(100)]
        await client.complete(base, max_tokens=3)
        for k in (100, 1, 15, 16, 17, 48, 99):
            prompt = base if k == 100 else [*base[:k], 250, 251]
            request = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
            status, body, headers = await client.post("/v1/completions", request)
            assert status == 200
            cached = min(k, 99)
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            assert headers["fireworks-cached-prompt-tokens"] == str(cached)


async def test_the_next_turn_finds_prompt_and_reply_even_after_a_stop_string():
    """O004 over HTTP: the history is found up to the last token that has KV, however the reply ended."""
    async with serving() as client:
        prompt = [ord("A")]
        first = await client.complete(prompt, stop="KL", return_token_ids=True)
        assert first["choices"][0]["text"] == "BCDEFGHIJ"
        history = prompt + first["choices"][0]["token_ids"]
        second = await client.complete([*history, ord("x")], max_tokens=1)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(history) - 1


async def test_max_tokens_zero_and_the_contexts_edge():
    """O034, O035 over the real engine."""
    async with serving() as client:
        body = await client.complete([1] * 50, max_tokens=0)
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (0, "length")
        body = await client.complete([1] * (CONTEXT - 1))
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (1, "length")
        status, body, _ = await client.post("/v1/completions", {"model": MODEL, "prompt": [1] * CONTEXT})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_leave_free_their_pages(stream):
    """O038, O040, O041: running, prefilling or queued, their pages come back and others go on."""
    async with serving(max_running=4, max_step_tokens=32) as client:
        engine = client.engine
        body = {"model": MODEL, "max_tokens": 300, "ignore_eos": True, "stream": stream}
        writers = []
        for i in range(12):
            _, writer = await connect(client, body | {"prompt": [i] * (20 + 20 * i % 90)})
            writers.append(writer)
        await until(lambda: engine.stats().running == 4 and engine.stats().waiting == 8)
        for writer in writers[1:]:
            leave(writer, "reset")
        await until(lambda: engine.stats().finished.get("abort", 0) == 11)
        leave(writers[0], "close")
        await until(lambda: engine.stats().running == 0)
        assert engine.stats().pinned_pages == 0
        assert (await client.complete([7], max_tokens=2))["choices"][0]["text"] == "\x08\t"


async def test_a_failed_step_ends_its_requests_only():
    """A step that raises gives its clients an error; the next request is served."""
    async with serving(pace=0.002) as client:
        stream = asyncio.create_task(
            client.stream("/v1/completions", {"model": MODEL, "prompt": [1], "ignore_eos": True})
        )
        await until(lambda: client.engine.stats().generated_tokens > 5)
        client.engine.runner.fail = True
        events, _ = await stream
        client.engine.runner.fail = False
        assert events[-1]["error"]["code"] == "step_failed"
        assert "boom" in events[-1]["error"]["message"]
        assert (await client.complete([7], max_tokens=2))["usage"]["completion_tokens"] == 2


async def test_the_start_counts_the_pages_that_the_metrics_count():
    """The page of zeros is nobody's: neither the pool's line nor /metrics has it."""
    async with serving() as client:
        await client.complete("a" * 100)
        async with client.session.get(client.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        pages = sum(float(line.split()[-1]) for line in lines if line.startswith("headwater_kv_pages{"))
        assert f"KV pool: {pages:.0f} pages of 16 = {pages * 16:.0f} tokens" in "\n".join(
            banner(client.engine.info)
        )


async def test_metrics_tell_what_shared_prefixes_saved():
    """Three streams under 64 common tokens, in tiles of 32."""
    shared = [5 + i % 200 for i in range(70)]
    async with serving(tile=32, cascade="force", cascade_levels=3) as client:
        await client.complete(shared, max_tokens=1)
        await asyncio.gather(*(client.complete([*shared, 210 + i], max_tokens=20) for i in range(3)))
        async with client.session.get(client.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        found = {
            name.removeprefix("headwater_").removesuffix("_total"): float(value)
            for name, value in (line.split() for line in lines if "{" not in line and line[0] != "#")
        }
        assert found["cascade_steps"] > 10
        assert found["cascade_groups"] == found["cascade_levels"] == found["cascade_steps"]
        assert found["cascade_rows"] > 2 * found["cascade_steps"]
        assert found["kv_bytes_saved"] == 8 * 64 * (found["cascade_rows"] - found["cascade_steps"])
        assert found["kv_bytes_read"] > 0
        assert found["kv_bytes_read"] % 8 == 0
        assert (found["cascade_refused"], found["verified_steps"], found["differing_steps"]) == (0, 0, 0)
