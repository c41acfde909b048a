#!/usr/bin/env python3
"""How long the planner takes: from scratch, and a step of pure decoding. No torch, no model.

A batch of 1,000 sequences in a tree of prefixes, five deep, is served through a real scheduler over a real
prefix tree: each step grows every table, publishes full pages and plans. Printed are medians over runs: the
cascade plan from nothing, the cascade plan a step averaged over 16 consecutive decode steps (in which each
sequence turns a page once), the whole StepPlan, and apart from these the time spent in tables and tree.

What is promised of the cascade plan, for this batch, is printed as bars. Exit code: 0, 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from bench_tools import Bar, at_most, report_bars

from engine.cache.pool import PagePool
from engine.cache.tree import PrefixTree
from engine.plan import GateCosts
from engine.scheduling.assemble import Chunk, assemble
from engine.scheduling.cascade import CascadePlanner, Rules
from engine.scheduling.sequence import Sequence, State
from engine.scheduling.tables import PageTables
from engine.types import EngineRequest, SamplingParams

PAGE = 16
STEPS = 16
# The batch that the bars are about.
SEQUENCES, DEPTH = 1000, 5


class Times(NamedTuple):
    """Milliseconds of one run; all but `scratch` are averages over the decode steps."""

    scratch: float
    cascade: float
    assemble: float
    tree: float


class Batch:
    """Decoding sequences under a tree of prefixes, with their pages in a real prefix tree."""

    def __init__(self, sequences: int, depth: int, branches: int, tile: int, seed: int) -> None:
        rng = random.Random(seed)
        self.rules = Rules(
            PAGE, tile, "auto", levels=4, costs=GateCosts(0.003, 400.0, 1000.0), token_bytes=768
        )
        prompts = _prompts(rng, sequences, depth, branches, tile)
        pages = sum(-(-(len(p) + STEPS + 1) // PAGE) for p in prompts) + sequences
        pool = PagePool(pages + 1, PAGE)
        self.tree = PrefixTree(pool)
        self.tables = PageTables(pool, self.tree)
        self.members = [self._start(i, prompt) for i, prompt in enumerate(prompts)]

    def _start(self, id: int, prompt: tuple[int, ...]) -> Sequence:
        """Admit a sequence and run all of its prompt but the last token."""
        request = EngineRequest(request_id="", prompt=prompt, params=SamplingParams(max_tokens=1000))
        seq = Sequence(id, request, "bench", seed=0)
        self.tables.attach(seq, self.tree.match("bench", prompt, (len(prompt) - 1) // PAGE * PAGE))
        self.tables.grow(seq, len(prompt))
        seq.computed = len(prompt) - 1
        seq.state = State.RUNNING
        self.tables.publish(seq, tail=False)
        return seq

    def grow(self) -> None:
        """A token each, and what follows from it in tables and tree."""
        for seq in self.members:
            seq.tokens.append(seq.id)
            seq.computed += 1
            if seq.computed % PAGE == 0:
                self.tables.publish(seq, tail=False)
            self.tables.grow(seq, seq.computed + 1)

    def plan(self, planner: CascadePlanner) -> int:
        """The cascade plan alone; returns its levels."""
        members = self.members
        planned = planner.plan(
            [seq.table for seq in members], [seq.computed for seq in members], [1] * len(members)
        )
        return len(planned.attention.levels)


def _prompts(
    rng: random.Random, sequences: int, depth: int, branches: int, tile: int
) -> list[tuple[int, ...]]:
    """Prompts below prefixes of one to three tiles, nested `depth` deep; tails of 20 to 800 tokens."""
    prefixes: list[tuple[int, ...]] = [()]
    for level in range(depth):
        prefixes = [
            prefix + tuple([1_000_000 * level + 1000 * i + b] * (tile * rng.randint(1, 3)))
            for i, prefix in enumerate(prefixes)
            for b in range(1 if level == 0 else branches)
        ]
    return [
        prefixes[i % len(prefixes)] + tuple([10_000_000 + i] * rng.randint(20, 800)) for i in range(sequences)
    ]


def measure(batch: Batch) -> Times:
    """One run: a plan from nothing, then decode steps."""
    planner = CascadePlanner(batch.rules)
    scratch = _ms(lambda: batch.plan(planner))
    cascade = tree = 0.0
    for _ in range(STEPS):
        tree += _ms(batch.grow)
        cascade += _ms(lambda: batch.plan(planner))
    whole = 0.0
    chunks = [Chunk(seq, 1) for seq in batch.members]
    for step in range(STEPS):
        batch.grow()
        whole += _ms(lambda step=step: assemble(step, chunks, planner, ()))
    return Times(scratch, cascade / STEPS, whole / STEPS, tree / STEPS)


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def bars_of(times: Iterable[Times], sequences: int, depth: int) -> list[Bar]:
    """The bars on the medians of all runs; none where the batch is another one."""
    if (sequences, depth) != (SEQUENCES, DEPTH):
        return []
    scratch, step = (statistics.median(column) for column in list(zip(*times, strict=True))[:2])
    return [
        at_most("cascade plan from nothing", 5.0, scratch, " ms"),
        at_most(f"cascade plan a step, over {STEPS} decode steps", 0.5, step, " ms"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--depth", type=int, default=DEPTH, help="prefixes nested in each other")
    parser.add_argument("--branches", type=int, default=4, help="prefixes below each prefix")
    parser.add_argument("--tile", type=int, default=256)
    parser.add_argument("--runs", type=int, default=11)
    args = parser.parse_args()
    for name in ("sequences", "depth", "branches", "tile", "runs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    times = []
    for run in range(args.runs):
        batch = Batch(args.sequences, args.depth, args.branches, args.tile, seed=run)
        gc.collect()
        gc.freeze()  # the batch is long-lived in a server; its collection is not the planner's time
        times.append(measure(batch))
        gc.unfreeze()
    levels = batch.plan(CascadePlanner(batch.rules))
    print(
        f"{args.sequences} sequences, prefixes nested {args.depth} deep, {args.branches} below each,"
        f" tile {args.tile}, {levels} levels; medians of {args.runs} runs"
    )
    for name, text in (
        ("scratch", "cascade plan from scratch"),
        ("cascade", f"cascade plan a decode step, over {STEPS} steps"),
        ("assemble", "whole step plan a decode step (with ids, slots, samples)"),
        ("tree", "tables and prefix tree a decode step, not in the above"),
    ):
        values = [getattr(t, name) for t in times]
        print(f"{statistics.median(values):8.3f} ms  {text}  [{min(values):.3f} .. {max(values):.3f}]")
    return report_bars(bars_of(times, args.sequences, args.depth))


if __name__ == "__main__":
    sys.exit(main())
