"""Where the time of a step goes: linears, attention, head, sampling and Python, over batch and context."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from bench_engine import Decoding, StepTime, fill, runner_shape
from bench_machine import Linears, layer_linears
from bench_tools import seconds

from engine.attention.compiled import CompiledAttention
from engine.plan import StepPlan
from engine.runner import Runner

# Steps before anything is timed.
WARM = 3


def random_prompts(count: int, tokens: int, seed: int = 3) -> list[list[int]]:
    """Prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40_000) for _ in range(tokens)] for _ in range(count)]


def pages_for(count: int, tokens: int, page_size: int) -> int:
    return count * -(-tokens // page_size)


def prepared(runner: Runner, pages: int) -> Runner:
    """The runner, its first pages filled."""
    attention = runner.pipeline.attention
    fill(attention, runner_shape(runner), runner.pipeline.decoder.dtype, pages)
    return runner


def split_table(runner: Runner, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians of each part, in ms, for every batch and context that fits the model and the memory."""
    rows = []
    for context in options.contexts:
        for count in options.batches:
            tokens = context + options.rounds + WARM + 2
            if tokens < runner.info.context_length and pages_for(count, tokens, 16) < runner.info.num_pages:
                rows.append(split(runner, count, context, options.rounds))
                print(f"  {count} rows of {context} tokens ", end="\r", file=sys.stderr, flush=True)
    return rows


def split(runner: Runner, count: int, context: int, rounds: int) -> dict[str, Any]:
    """One batch. Each round runs a step, and beside it by themselves the parts that a step does not time."""
    decoding = Decoding(runner, random_prompts(count, context), rounds + WARM)
    for _ in range(WARM):
        decoding.step()
    parts = Parts(runner, count)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        parts.forget()
        step, plan = decoding.step_with_plan()
        for name, took in parts.measure(step, plan).items():
            found.setdefault(name, []).append(took * 1e3)
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {"rows": count, "context": context, **medians}


class Parts:
    """Splits steps of so many rows.

    The compiled executor runs all layers in one call and times its own phases. For the torch executor
    linears and attention run once more by themselves: linears of the same shapes with other weights.
    """

    def __init__(self, runner: Runner, rows: int) -> None:
        self._pipeline = runner.pipeline
        self._attention = runner.pipeline.attention
        config, dtype = runner.pipeline.decoder.config, runner.pipeline.decoder.dtype
        self._layers = config.num_layers
        self._hidden = torch.randn(rows, config.hidden_size).to(dtype)
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._qkv = [torch.randn(rows, n, config.head_dim).to(dtype) for n in heads]
        self._linears = None
        if not isinstance(self._attention, CompiledAttention):
            padded = runner.pipeline.decoder.padded_rows(rows)
            self._linears = Linears(layer_linears(config), self._layers, padded, dtype)

    @property
    def how(self) -> str:
        """How linears and attention were timed."""
        return "inside the kernel" if self._linears is None else "apart"

    def forget(self) -> None:
        """Start the kernel's clocks from zero, before the step that will be split."""
        if isinstance(self._attention, CompiledAttention):
            self._attention.library.take_seconds(self._attention.step)

    def measure(self, step: StepTime, plan: StepPlan) -> dict[str, float]:
        """Seconds of the parts of a step that has just run. `other` is what is left: norms and RoPE, and
        in the torch executor Python between its calls."""
        layers = self._in_layers()
        begin = seconds(lambda: self._attention.begin(plan))
        if not layers:
            layers = self._apart()
        rows = [sample.row for sample in plan.samples]
        with torch.inference_mode():
            head = seconds(lambda: self._pipeline.logits(self._hidden, rows))
            logits = self._pipeline.logits(self._hidden, rows)
            sampling = seconds(lambda: self._pipeline.sampler.sample(logits, plan.samples))
        python = step.plan + step.commit + begin
        known = sum(layers.values()) + head + sampling + python
        return {
            "step ms": step.total,
            **layers,
            "head": head,
            "sampling": sampling,
            "python": python,
            "other": step.total - known,
        }

    def _in_layers(self) -> dict[str, float]:
        if not isinstance(self._attention, CompiledAttention):
            return {}
        phases = self._attention.library.take_seconds(self._attention.step)
        return {"linears": phases["linear"], "attention": phases["attention"]}

    def _apart(self) -> dict[str, float]:
        assert self._linears is not None
        with torch.inference_mode():
            return {"linears": self._linears.seconds(), "attention": seconds(self._attend)}

    def _attend(self) -> None:
        for layer in range(self._layers):
            self._attention.attend(layer, *self._qkv)


def how(runner: Runner) -> str:
    return Parts(runner, 1).how


def most_pages(sizes: Sequence[tuple[int, int]], extra: int, page_size: int) -> int:
    """Pages of the largest of some (sequences, context) with so many more tokens each."""
    return max(pages_for(count, context + extra, page_size) for count, context in sizes)
