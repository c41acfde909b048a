"""The engine for the benches: executors by name, KV that is not all zeros, and batches that really decode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from engine.attention.base import AttentionBackend, KvShape
from engine.cache.pool import PagePool
from engine.config import EngineConfig
from engine.plan import StepPlan, StepResult
from engine.runner import Runner
from engine.scheduling.cascade import CascadeMode
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.types import EngineRequest, SamplingParams

# Rows of KV that are drawn at once; the same ones stand in every layer.
_FILL_ROWS = 1 << 14


def make_executor(name: str, shape: KvShape, dtype: torch.dtype, tile: int, threads: int) -> AttentionBackend:
    """A CPU executor alone, without a model."""
    if name == "torch":
        from engine.attention.cpu import CpuAttention

        return CpuAttention(shape, dtype, tile=tile)
    from engine.attention.compiled import CompiledAttention
    from engine.kernels.library import load_library

    return CompiledAttention(load_library(), shape, dtype, tile=tile, threads=threads)


def load_runner(executor: Literal["compiled", "torch"], threads: int, kv_gb: float) -> Runner:
    """The default model on an executor, as a server would load it."""
    return Runner.load(EngineConfig(executor=executor, threads=threads, kv_gb=kv_gb))


def fill(attention: AttentionBackend, shape: KvShape, dtype: torch.dtype, pages: int) -> None:
    """Write random KV to pages 1 .. pages of every layer: memory that was never written reads too fast."""
    random = torch.Generator().manual_seed(1)
    end = (pages + 1) * shape.page_size
    for first in range(shape.page_size, end, _FILL_ROWS):
        slots = torch.arange(first, min(end, first + _FILL_ROWS))
        kv = torch.randn(len(slots), 2, shape.num_kv_heads, shape.head_dim, generator=random).to(dtype)
        for layer in range(shape.num_layers):
            attention.write_rows(layer, slots, kv)


def runner_shape(runner: Runner) -> KvShape:
    """The shape of a runner's KV memory."""
    model, info = runner.pipeline.decoder.config, runner.info
    return KvShape(
        model.num_layers, info.num_pages, info.page_size, model.num_heads, model.num_kv_heads, model.head_dim
    )


class StepTime(NamedTuple):
    """Seconds of one step, by who spent them."""

    plan: float
    run: float
    commit: float

    @property
    def total(self) -> float:
        return self.plan + self.run + self.commit


class Decoding:
    """Sequences that decode on a runner, greedily and without end, under a scheduler of their own.

    Their prompts are scheduled but never computed: what stands in their pages is whatever was there.
    `skip` pages at the start of the pool are left to others.
    """

    def __init__(
        self,
        runner: Runner,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *,
        cascade: CascadeMode = "auto",
        skip: int = 0,
    ) -> None:
        self.runner = runner
        self._rows = len(prompts)
        self.scheduler = make_scheduler(runner, cascade, max(1, len(prompts)))
        self.scheduler.pool.take(skip)
        # Some may begin a few steps before the last does.
        most = tokens + 1 + len(prompts)
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        for prompt in prompts:
            request = EngineRequest(request_id="bench", prompt=tuple(prompt), params=params)
            self.scheduler.submit(request, "bench", 0)
        decoding: set[int] = set()
        while len(decoding) < len(prompts):
            plan = self.scheduler.plan()
            if plan is None:
                raise RuntimeError("the bench's sequences do not fit the KV memory")
            self.scheduler.commit(plan, _made_up(plan))
            decoding.update(plan.sequence_ids[index] for index in plan.sample_sequences)
        self.scheduler.take_events()

    def step(self) -> StepTime:
        """Plan, run and commit one step."""
        return self.step_with_plan()[0]

    def step_with_plan(self) -> tuple[StepTime, StepPlan]:
        began = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        if plan is None:
            raise RuntimeError("the bench's sequences have ended")
        if plan.rows != self._rows:
            raise RuntimeError(f"a step has {plan.rows} rows, not {self._rows}: some sequence is not running")
        result = self.runner.run(plan)
        ran = time.perf_counter()
        self.scheduler.commit(plan, result)
        self.scheduler.take_events()
        return StepTime(planned - began, ran - planned, time.perf_counter() - ran), plan


def make_scheduler(runner: Runner, cascade: CascadeMode, running: int, rows: int = 1 << 20) -> Scheduler:
    """A scheduler with an empty cache over all of the runner's pages. Steps are bounded by rows alone."""
    info = runner.info
    shape = runner_shape(runner)
    limits = Limits(
        context=info.context_length,
        max_running=running,
        max_step_tokens=rows,
        step_ms=1e9,
        align=runner.pipeline.attention.align,
        cascade=cascade,
        gate=runner.gate,
        token_bytes=2 * shape.num_kv_heads * shape.head_dim * runner.pipeline.decoder.dtype.itemsize,
        layers=shape.num_layers,
    )
    return Scheduler(PagePool(info.num_pages, info.page_size), limits, runner.costs)


def _made_up(plan: StepPlan) -> StepResult:
    count = len(plan.samples)
    return StepResult(tuple([1] * count), tuple([None] * count))
