"""Where the cascade bench runs its plans: attention alone over rotated layers, and whole steps of a model."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from bench_batches import Batch
from bench_engine import fill, load_runner, make_executor, runner_shape
from bench_tools import alternate

from engine.attention.base import KvShape
from engine.plan import SampleRow, StepPlan
from engine.types import SamplingParams

# SmolLM2-135M's attention; the pages and tiles that a server has by default.
LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE, TILE = 30, 9, 3, 64, 16, 256
# A timed run of attention takes as many layers as last about this long.
SAMPLE_SECONDS = 0.006


class Timed(NamedTuple):
    """What plans took, in seconds a layer (attention) or a step, [plan][round]; `begin` is the median time
    of preparing a step."""

    runs: list[list[float]]
    begin: list[float]

    def median(self, which: int) -> float:
        return statistics.median(self.runs[which])


class Lab:
    """Attention alone: an executor over rotated layers of random KV."""

    def __init__(self, options: argparse.Namespace, batch: Batch) -> None:
        self.options, self.batch = options, batch
        self.dtype = self.dtype_of(options)
        self.token_bytes = 2 * KV_HEADS * HEAD_DIM * self.dtype.itemsize
        layer_bytes = (batch.pages + 1) * PAGE * self.token_bytes
        self.layers = max(6, -(-options.rotate_mb * 1_000_000 // layer_bytes))
        shape = KvShape(self.layers, batch.pages + 1, PAGE, HEADS, KV_HEADS, HEAD_DIM)
        self.executor = make_executor(options.executor, shape, self.dtype, TILE, options.threads)
        fill(self.executor, shape, self.dtype, batch.pages)
        rows = len(batch.spans)
        self._qkv = [torch.randn(rows, n, HEAD_DIM).to(self.dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]

    def time(
        self, plans: Sequence[StepPlan], rounds: int, beside: Sequence[Callable[[int], float]] = ()
    ) -> Timed:
        """Time plans against each other, and against what `beside` measures, which comes after them."""
        chunk = self._chunk(plans)
        begins: list[list[float]] = [[] for _ in plans]

        def runner(which: int) -> Callable[[int], float]:
            def run(number: int) -> float:
                # Plans stand apart in the rotation: none finds in a cache what another has just read.
                first = number * chunk + which * self.layers // len(plans)
                begins[which].append(self._begin(plans[which]))
                began = time.perf_counter()
                for layer in range(first, first + chunk):
                    self.executor.attend(layer % self.layers, *self._qkv)
                return (time.perf_counter() - began) / chunk

            return run

        runs = alternate([*(runner(i) for i in range(len(plans))), *beside], rounds)
        return Timed(runs, [statistics.median(times) for times in begins])

    @staticmethod
    def dtype_of(options: argparse.Namespace) -> torch.dtype:
        return torch.bfloat16 if options.dtype == "bfloat16" else torch.float32

    def reads(self, plan: StepPlan) -> int:
        """KV tokens that a layer reads for a plan, as the executor counts them."""
        self.executor.begin(plan)
        return sum(self.executor.kv_tokens_read)

    def _begin(self, plan: StepPlan) -> float:
        began = time.perf_counter()
        self.executor.begin(plan)
        return time.perf_counter() - began

    def _chunk(self, plans: Sequence[StepPlan]) -> int:
        """Layers of one timed run; also warms everything up."""
        slowest = 0.0
        for plan in plans:
            self.executor.begin(plan)
            for layer in range(2):
                began = time.perf_counter()
                self.executor.attend(layer, *self._qkv)
            slowest = max(slowest, time.perf_counter() - began)
        return max(1, min(self.layers // max(2, len(plans)), round(SAMPLE_SECONDS / slowest)))


class Steps:
    """Whole steps of the default model over random KV."""

    def __init__(self, options: argparse.Namespace, pages: int) -> None:
        shape = KvShape(LAYERS, 0, PAGE, HEADS, KV_HEADS, HEAD_DIM)
        page_bytes = shape.page_bytes(Lab.dtype_of(options).itemsize)
        self.runner = load_runner(options.executor, options.threads, (pages + 8) * page_bytes / 1e9)
        dtype = self.runner.pipeline.decoder.dtype
        fill(self.runner.pipeline.attention, runner_shape(self.runner), dtype, pages)

    def time(self, plans: Sequence[StepPlan], rounds: int) -> Timed:
        sampled = [_sampled(plan) for plan in plans]
        for plan in sampled:
            self.runner.run(plan)

        def runner(plan: StepPlan) -> Callable[[int], float]:
            return lambda _: self.runner.run(plan).seconds

        return Timed(alternate([runner(plan) for plan in sampled], rounds), [0.0] * len(plans))


def _sampled(plan: StepPlan) -> StepPlan:
    """The plan with every row sampled greedily."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    samples = tuple(SampleRow(row, params, 0, 0, 0, 0) for row in range(plan.rows))
    return plan._replace(samples=samples, sample_sequences=tuple(range(plan.rows)))
