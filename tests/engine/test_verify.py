"""Cascades are verified while serving: sampled steps run a second time, flat, and what differs is counted."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.gate import BATCHES, batch_plan
from engine.plan import StepPlan, flatten
from engine.types import EngineRequest, EngineStats, SamplingParams
from engine.verify import Verifier

SHARED = tuple(range(5, 105))


def plans(levels: int) -> StepPlan:
    plan = batch_plan(BATCHES[0], 16, 32, 32)
    return plan if levels > 1 else plan._replace(attention=flatten(plan.attention))


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.01, 10), (0.25, 250), (1.0, 1000)])
def test_the_share_asked_for_is_verified(share: float, expected: int) -> None:
    verifier = Verifier(share, bit_identical=True)
    chosen = [verifier.wants(plans(2)._replace(step=step)) for step in range(1000)]
    assert abs(sum(chosen) - expected) <= 2
    again = [verifier.wants(plans(2)._replace(step=step)) for step in range(1000)]
    assert chosen == again, "chance decides"
    assert not any(verifier.wants(plans(1)._replace(step=step)) for step in range(100)), "nothing to verify"


class Pipeline:
    """Gives out the same memory at every step, as executors may."""

    class attention:
        kv_tokens_read = "of the cascade"

    def __init__(self, first: torch.Tensor, again: torch.Tensor) -> None:
        self.memory, self._again = first, again

    def hidden(self, plan: StepPlan) -> torch.Tensor:
        assert len(plan.attention.levels) == 1
        assert (plan.wipe, plan.copies) == ((), ())
        self.attention.kv_tokens_read = "of the second run"
        self.memory.copy_(self._again)
        return self.memory


def differing(first: torch.Tensor, again: torch.Tensor, *, bit_identical: bool) -> int:
    pipeline = Pipeline(first.clone(), again)
    plan = plans(2)._replace(wipe=(3,))
    verifier = Verifier(1.0, bit_identical=bit_identical)
    found = verifier.differing_rows(pipeline, plan, pipeline.memory)  # type: ignore[arg-type]
    assert pipeline.attention.kv_tokens_read == "of the cascade", "what was read is told of the step itself"
    return found


def test_bits_or_a_tolerance_are_compared_row_by_row(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    first = torch.randn(4, 8)
    with caplog.at_level(logging.WARNING):
        assert differing(first, first, bit_identical=True) == 0
        assert not caplog.records
        near = first.clone()
        near[2] *= 1 + 2**-20
        assert differing(first, near, bit_identical=True) == 1
        assert [r.getMessage() for r in caplog.records] == [
            "step 0: 1 of 16 rows differ between cascade and flat attention"
        ]
        assert differing(first, near, bit_identical=False) == 0
    near[1:3] += 0.5
    assert differing(first, near, bit_identical=False) == 2
    assert differing(first.bfloat16(), (first * (1 + 2**-7)).bfloat16(), bit_identical=False) == 0


def test_rows_that_are_not_finite_twice_do_not_differ() -> None:
    first = torch.ones(3, 4)
    first[1, 2] = float("nan")
    for bit_identical in (True, False):
        assert differing(first, first, bit_identical=bit_identical) == 0
        assert differing(first, torch.ones(3, 4), bit_identical=bit_identical) == 1


async def serve(engine: Engine) -> tuple[list[tuple[int, ...]], EngineStats]:
    """Five requests under a common prefix, one after the first's prefill."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

    async def one(last: int) -> tuple[int, ...]:
        request = EngineRequest(request_id="", prompt=(*SHARED, last), params=params)
        return tuple([token async for delta in engine.submit(request) for token in delta.token_ids])

    replies = await asyncio.gather(*(one(i) for i in range(5)))
    return list(replies), engine.stats()


async def start(model: Path, **settings: object) -> Engine:
    fields = {"model": str(model), "tile": 32, "kv_gb": 0.05, "cascade": "force", **settings}
    return await Engine.start(EngineConfig(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("executor", ["cpu", "torch"])
async def test_every_cascade_step_can_be_verified_and_none_differs(tiny_model: Path, executor: str) -> None:
    replies = []
    for verify in (0.0, 1.0):
        engine = await start(tiny_model, executor=executor, cascade_verify=verify)
        tokens, stats = await serve(engine)
        replies.append(tokens)
        assert stats.cascade_steps > 5
        assert stats.verified_steps == (stats.cascade_steps if verify else 0)
        assert stats.differing_steps == 0
        assert stats.kv_bytes_saved > 0
        await engine.close()
    assert replies[0] == replies[1], "looking changed the result"


async def test_a_cascade_that_is_wrong_is_counted(tiny_model: Path) -> None:
    engine = await start(tiny_model, executor="torch", cascade_verify=0.5)
    attention = engine._runner.pipeline.attention  # type: ignore[attr-defined]
    begin, attend = attention.begin, attention.attend
    shared = []

    def wrong_begin(plan: StepPlan) -> None:
        shared[:] = plan.attention.levels[:-1]
        begin(plan)

    attention.begin = wrong_begin
    attention.attend = lambda *args: attend(*args) * (1.5 if shared else 1.0)
    _, stats = await serve(engine)
    assert 0 < stats.verified_steps < stats.cascade_steps
    assert stats.differing_steps == stats.verified_steps
    await engine.close()
