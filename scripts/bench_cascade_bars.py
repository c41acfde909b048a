"""The cascade bench's bars: what this engine promises of its attention, measured."""

from __future__ import annotations

import argparse
import random
import statistics

from bench_batches import attention_flops, grouped, least_reads, nested, private, step_of
from bench_cascade_lab import HEAD_DIM, HEADS, PAGE, TILE, Lab, Steps
from bench_engine import Decoding
from bench_machine import Reader, rate_meter
from bench_tools import Bar, alternate, at_least, at_most, ratio_interval

# Steps with `auto`, each beside one with `off`, that share nothing.
PAIRS = 220


def flat_bar(options: argparse.Namespace) -> Bar:
    """Long private sequences: does flat decode move KV as fast as torch reads memory?"""
    batch = private(16, 4000, PAGE)
    lab, reader = Lab(options, batch), Reader()
    timed = lab.time([step_of(batch, TILE, "off")], options.rounds, [lambda _: reader.seconds()])
    share = ratio_interval(
        [reader_seconds / reader.bytes for reader_seconds in timed.runs[1]],
        [layer / (batch.tokens * lab.token_bytes) for layer in timed.runs[0]],
    )
    rate, read = (
        batch.tokens * lab.token_bytes / timed.median(0) / 1e9,
        reader.bytes / timed.median(1) / 1e9,
    )
    note = f" ({rate:.1f} of {read:.1f} GB/s; begin {timed.begin[0] * 1e3:.2f} ms)"
    return at_least(f"flat decode of {batch.name}, of torch's own read", 60.0, 100 * share.median, " %", note)


def shared_bars(options: argparse.Namespace) -> list[Bar]:
    """Many rows under one prefix: does cascade compute as fast as linears, and faster than flat?"""
    batch = grouped(1, 16, 5000, 8, PAGE)
    lab, linears = Lab(options, batch), rate_meter()
    plans = [step_of(batch, TILE, mode) for mode in ("off", "force")]
    timed = lab.time(plans, options.rounds, [lambda _: linears.seconds()])
    flops = attention_flops(batch, HEADS, HEAD_DIM)
    share = ratio_interval(
        [took / linears.flops for took in timed.runs[2]], [took / flops for took in timed.runs[1]]
    )
    gain = ratio_interval(timed.runs[0], timed.runs[1])
    rates = flops / timed.median(1) / 1e9, linears.flops / timed.median(2) / 1e9
    percent, note = 100 * share.median, f" ({rates[0]:.0f} of {rates[1]:.0f} GFLOP/s)"
    times = f"{timed.median(0) * 1e3:.3f} and {timed.median(1) * 1e3:.3f} ms a layer"
    begins = f"begin {timed.begin[0] * 1e3:.2f} and {timed.begin[1] * 1e3:.2f} ms"
    return [
        at_least(f"cascade of {batch.name}, of the rate of 512-row linears", 50.0, percent, " %", note),
        Bar(
            f"flat / cascade of {batch.name}",
            "at least 1.4, or 65 % of the linears' rate",
            f"{gain}, {percent:.0f} % ({times}; {begins})",
            gain.median >= 1.4 or percent >= 65,
        ),
    ]


def groups_bar(options: argparse.Namespace) -> Bar:
    batch = grouped(4, 4, 2000, 8, PAGE)
    timed = Lab(options, batch).time(
        [step_of(batch, TILE, mode) for mode in ("off", "force")], options.rounds
    )
    gain = ratio_interval(timed.runs[0], timed.runs[1])
    times = f"{timed.median(0) * 1e3:.3f} and {timed.median(1) * 1e3:.3f} ms a layer"
    return at_least(f"flat / cascade of {batch.name}", 1.2, gain.median, note=f", {gain} ({times})")


def nested_bars(options: argparse.Namespace) -> list[Bar]:
    """Prefixes within prefixes: three levels against the best plan of two, and what both read."""
    batch = nested(4, 4, 2000, 2000, 8, PAGE)
    lab = Lab(options, batch)
    plans = [step_of(batch, TILE, "force", levels) for levels in (2, 3)]
    timed = lab.time(plans, options.rounds)
    slower = ratio_interval(timed.runs[1], timed.runs[0])
    reads, predicted = [lab.reads(plan) for plan in plans], least_reads(batch, TILE)
    note = f", {slower} ({timed.median(0) * 1e3:.3f} and {timed.median(1) * 1e3:.3f} ms a layer)"
    return [
        at_most(f"three levels / best two levels of {batch.name}", 1.0, slower.median, note=note),
        Bar(
            f"KV bytes that a layer reads of {batch.name}",
            f"exactly {predicted * lab.token_bytes:,}",
            f"{reads[1] * lab.token_bytes:,} (two levels {reads[0] * lab.token_bytes:,})",
            reads[1] == predicted,
        ),
    ]


def nothing_shared_bar(options: argparse.Namespace) -> Bar:
    """Whole steps of sequences that share nothing: does looking for what to share cost anything?

    Two schedulers decode on one runner, each on pages of its own; they change roles half way.
    """
    count, context = 16, 300
    need = count * -(-(context + PAIRS + 20) // PAGE)
    steps = Steps(options, 2 * need + 2)
    rng = random.Random(5)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(context)] for _ in range(count)]
    runs: list[list[float]] = [[], []]
    for roles in (("auto", "off"), ("off", "auto")):
        batches = [
            Decoding(steps.runner, prompts, PAIRS // 2 + 12, cascade=mode, skip=half * need)
            for half, mode in enumerate(roles)
        ]
        for batch in batches:
            for _ in range(6):
                batch.step()
        found = alternate([lambda _, b=batch: b.step().total for batch in batches], PAIRS // 2)
        for mode, times in zip(roles, found, strict=True):
            runs[("auto", "off").index(mode)] += times
    slower = ratio_interval(runs[0], runs[1])
    name = f"{count} sequences that share nothing, whole steps, auto / off, upper bound of {PAIRS} pairs"
    note = f", {slower} (off {statistics.median(runs[1]) * 1e3:.2f} ms)"
    return at_most(name, 1.05, slower.high, note=note)


def measure_bars(options: argparse.Namespace) -> list[Bar]:
    bars = [
        flat_bar(options),
        *shared_bars(options),
        groups_bar(options),
        *nested_bars(options),
    ]
    return bars if options.attention_only else [*bars, nothing_shared_bar(options)]
