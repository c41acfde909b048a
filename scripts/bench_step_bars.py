"""What this engine promises of its steps, measured: weights, batch, a busy loop beside it, and prefill."""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from bench_engine import Decoding, make_scheduler
from bench_machine import Reader, rate_meter
from bench_step_parts import WARM, random_prompts
from bench_tools import Bar, alternate, at_least, at_most, ratio_interval, seconds

from engine.engine import SWITCH_INTERVAL
from engine.models.config import ModelConfig
from engine.models.linear import make_linear
from engine.runner import Runner
from engine.types import EngineRequest, SamplingParams

CONTEXT = 128
PREFILL = 4000
# Steps, and native calls, of one measurement beside an idle or a busy loop.
BURST = 5
# Sizes of the native call: [rows, 2048] by [2048, columns], at most 268 MB of bf16.
_NATIVE_IN, _MOST_COLUMNS, _MOST_ROWS = 2048, 65536, 1024


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of the model's weights in bf16, a tied embedding once."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden = config.hidden_size
    layer = hidden * (2 * heads + 2 * kv + 3 * config.intermediate_size + 2)
    embeddings = config.vocab_size * hidden * (1 if config.tied else 2)
    return 2 * (config.num_layers * layer + embeddings + hidden)


def decode_bars(runner: Runner, rounds: int) -> list[Bar]:
    """A step of one row against reading the weights, and of sixteen rows against one."""
    reader = Reader()
    alone, batch = (Decoding(runner, random_prompts(n, CONTEXT), rounds + WARM, skip=n * 64) for n in (1, 16))
    for _ in range(WARM):
        alone.step()
        batch.step()
    one, sixteen, read = alternate(
        [
            lambda _: alone.step().total,
            lambda _: batch.step().total,
            lambda _: reader.seconds(),
        ],
        rounds,
    )
    size = weight_bytes(runner.pipeline.decoder.config)
    share = ratio_interval(one, [took * size / reader.bytes for took in read])
    more = ratio_interval(sixteen, one)
    rate = reader.bytes / statistics.median(read) / 1e9
    return [
        at_most(
            f"one-row step / reading {size / 1e6:.0f} MB of weights",
            1.8,
            share.median,
            note=f", {share} ({statistics.median(one) * 1e3:.2f} ms, torch reads {rate:.1f} GB/s)",
        ),
        at_most(
            "16-row step / one-row step",
            1.6,
            more.median,
            note=f", {more} ({statistics.median(sixteen) * 1e3:.2f} ms)",
        ),
    ]


def busy_bars(runner: Runner, rounds: int) -> list[Bar]:
    """How much a thread of pure Python slows a step, against one native call that takes as long."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        return [_busy_bar(runner, rows, rounds) for rows in (1, 16)]
    finally:
        sys.setswitchinterval(before)


def _busy_bar(runner: Runner, rows: int, rounds: int) -> Bar:
    decoding = Decoding(runner, random_prompts(rows, CONTEXT), (2 * rounds + 4) * BURST)

    def steps() -> float:
        return sum(decoding.step().run for _ in range(BURST)) / BURST

    native = NativeCall(statistics.median(steps() for _ in range(3)))

    def natives() -> float:
        return sum(native.seconds() for _ in range(BURST)) / BURST

    idle_steps, idle_natives, busy = [], [], []
    for _ in range(rounds):
        idle_steps.append(steps())
        idle_natives.append(natives())
        with busy_loop():
            busy.append((steps(), natives()))
    step = ratio_interval([pair[0] for pair in busy], idle_steps)
    call = ratio_interval([pair[1] for pair in busy], idle_natives)
    times = f"{statistics.median(idle_steps) * 1e3:.2f} and {statistics.median(idle_natives) * 1e3:.2f} ms"
    note = f" (step {step}, call {call}; idle {times})"
    name = f"busy loop: slowdown of a {rows}-row step / of one native call"
    return at_most(name, 1.15, step.median / call.median, note=note)


class NativeCall:
    """One linear that takes about as long as was asked: long enough a weight to be read for that time, and
    where that would take much memory, more rows."""

    def __init__(self, target: float) -> None:
        columns, rows = _MOST_COLUMNS // 8, 4
        for _ in range(4):
            self._linear = make_linear(torch.ones(columns, _NATIVE_IN, dtype=torch.bfloat16), None, "packed")
            self._x = torch.ones(rows, _NATIVE_IN, dtype=torch.bfloat16)
            self.seconds()
            more = target / statistics.median(self.seconds() for _ in range(7))
            if 0.9 < more < 1.1:
                break
            wanted = columns * more
            columns = min(_MOST_COLUMNS, max(256, int(wanted) // 64 * 64))
            rows = min(_MOST_ROWS, max(4, int(rows * wanted / columns)))

    def seconds(self) -> float:
        return seconds(lambda: self._linear.apply(self._x))


@contextmanager
def busy_loop() -> Iterator[None]:
    """A thread that does nothing but Python."""
    stop = threading.Event()

    def spin() -> None:
        total = 0
        while not stop.is_set():
            for i in range(2000):
                total += i

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def prefill_bar(runner: Runner, rounds: int) -> Bar:
    """A cold prompt in chunks, against the linears of the same machine."""
    linears = rate_meter()
    prompts = random_prompts(rounds + 1, PREFILL, seed=11)

    def prefill(number: int) -> float:
        scheduler = make_scheduler(runner, "auto", 1, rows=512)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        request = EngineRequest(request_id="bench", prompt=tuple(prompts[number]), params=params)
        scheduler.submit(request, "bench", 0)

        def run() -> None:
            while (plan := scheduler.plan()) is not None:
                scheduler.commit(plan, runner.run(plan))

        return seconds(run)

    prefill(rounds)
    took, rates = alternate([prefill, lambda _: linears.seconds()], rounds)
    speed = PREFILL / statistics.median(took)
    gflops = linears.flops / statistics.median(rates) / 1e9
    name = f"cold prefill of {PREFILL} tokens, 1,300 a second where linears reach 800 GFLOP/s"
    return at_least(name, 1300 * gflops / 800, speed, " tokens/s", f" (linears {gflops:.0f} GFLOP/s)")
