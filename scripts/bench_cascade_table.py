"""The cascade bench's table: off, force and auto over prefix length x batch x groups, and its picture."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bench_batches import grouped, same_plan, step_of
from bench_cascade_lab import HEAD_DIM, HEADS, KV_HEADS, LAYERS, PAGE, TILE, Lab, Steps, Timed
from bench_engine import make_executor
from bench_tools import Bar, at_most, geometric_mean, ratio_interval, table

from engine import gate
from engine.attention.base import KvShape
from engine.plan import GateCosts, StepPlan

MODES = ("off", "force", "auto")
# Tokens that each sequence has of its own.
TAIL = 100
# What names a cell, and what the gate made of it.
CELL = ("groups", "batch", "prefix", "auto is")


def sizes(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """(groups, sequences in all, prefix tokens) of the table's cells: every group has two or more."""
    if options.quick:
        every = itertools.product((1, 4), (4, 16), (512, 2048))
    else:
        every = itertools.product((1, 2, 4), (4, 8, 16, 32), (256, 512, 1024, 2048, 4096))
    return [(groups, batch, prefix) for groups, batch, prefix in every if batch >= 2 * groups]


def measure_table(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Off, force and auto in every cell: attention alone (ms a layer), and whole steps (ms)."""
    cells = sizes(options)
    batches = [grouped(g, b // g, prefix, TAIL, PAGE) for g, b, prefix in cells]
    steps = None if options.attention_only else Steps(options, max(batch.pages for batch in batches))
    costs = gate_costs(options) if steps is None else steps.runner.gate
    print(f"gate: {costs}")
    rows = []
    for number, ((groups, count, prefix), batch) in enumerate(zip(cells, batches, strict=True)):
        lab = Lab(options, batch)
        plans = {mode: step_of(batch, TILE, mode, 4, costs, lab.token_bytes) for mode in MODES}
        auto = next(m for m in MODES if same_plan(plans["auto"].attention, plans[m].attention))
        row: dict[str, Any] = dict(zip(CELL, (groups, count, prefix, auto), strict=True))
        row |= _cell("layer", _by_mode(_timer(lab, options.rounds), plans))
        if steps is not None:
            row |= _cell("step", _by_mode(_timer(steps, options.rounds), plans))
        rows.append(row)
        print(f"  cell {number + 1} of {len(cells)}", end="\r", file=sys.stderr, flush=True)
    return rows


def gate_costs(options: argparse.Namespace) -> GateCosts:
    """What the gate of a server would weigh, measured now on an executor without a model."""
    pages, dtype = 2000, Lab.dtype_of(options)
    shape = KvShape(LAYERS, pages, PAGE, HEADS, KV_HEADS, HEAD_DIM)
    executor = make_executor(options.executor, shape, dtype, TILE, options.threads)
    costs = gate.measure(executor, shape, dtype, torch.device("cpu"))
    if costs is None:
        print("the machine is too busy to measure the gate's costs: sharing counts as free")
    return costs or GateCosts()


def _timer(where: Lab | Steps, rounds: int) -> Callable[[Sequence[StepPlan]], Timed]:
    return lambda plans: where.time(plans, rounds)


def _by_mode(
    measure: Callable[[Sequence[StepPlan]], Timed], plans: dict[str, StepPlan]
) -> dict[str, list[float]]:
    """Runs by mode. `auto` is not run again where it plans what another mode plans: it would be the same
    work, and only noise would tell them apart."""
    same = {mode for mode in ("off", "force") if same_plan(plans["auto"].attention, plans[mode].attention)}
    wanted = ["off", "force", *([] if same else ["auto"])]
    runs = dict(zip(wanted, measure([plans[mode] for mode in wanted]).runs, strict=True))
    return runs if not same else {**runs, "auto": runs[min(same)]}


def _cell(what: str, runs: dict[str, list[float]]) -> dict[str, Any]:
    off, force, auto = (statistics.median(runs[mode]) * 1e3 for mode in MODES)
    gain = ratio_interval(runs["off"], runs["force"])
    worse = max(ratio_interval(runs["auto"], runs[mode]).median for mode in ("off", "force"))
    return {
        f"{what} off": off,
        f"{what} force": force,
        f"{what} auto": auto,
        f"{what} off/force": gain.median,
        f"{what} low": gain.low,
        f"{what} high": gain.high,
        f"{what} auto/best": worse,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table: attention alone, then whole steps."""
    print("medians in ms; off/force: above 1 sharing is faster, with its 95 % interval")
    for what, title in (("layer", "attention alone, a layer"), ("step", "whole steps")):
        part = [
            {k.removeprefix(f"{what} "): v for k, v in row.items() if k in CELL or k.startswith(f"{what} ")}
            for row in rows
        ]
        if len(part[0]) > len(CELL):
            print(f"\n{title}\n\n{table(part)}")
    print()


def gate_bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """How far auto is from the better of off and force, over the whole table."""
    bars = []
    for what, name in (("layer", "attention alone"), ("step", "whole steps")):
        losses = [row[f"{what} auto/best"] for row in rows if f"{what} auto/best" in row]
        if losses:
            note = f", over {len(losses)} cells"
            mean = geometric_mean(losses)
            bars.append(at_most(f"gate, {name}: auto / better of both, mean", 1.05, mean, note=note))
            bars.append(at_most(f"gate, {name}: auto / better of both, worst", 1.15, max(losses), note=note))
    return bars


def heat_map(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw flat over cascade: a panel for each number of groups, attention alone above whole steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [what for what in ("layer", "step") if f"{what} off/force" in rows[0]]
    groups = sorted({row["groups"] for row in rows})
    prefixes = sorted({row["prefix"] for row in rows})
    batches = sorted({row["batch"] for row in rows})
    figure, axes = pyplot.subplots(
        len(kinds),
        len(groups),
        figsize=(4.5 * len(groups), 3.8 * len(kinds)),
        squeeze=False,
        layout="constrained",
    )
    for (kind, count), axis in zip(itertools.product(kinds, groups), axes.flat, strict=True):
        found = {(r["batch"], r["prefix"]): r[f"{kind} off/force"] for r in rows if r["groups"] == count}
        grid = [[found.get((batch, prefix), float("nan")) for prefix in prefixes] for batch in batches]
        image = axis.imshow(grid, cmap="RdYlGn", vmin=0.5, vmax=1.5, origin="lower", aspect="auto")
        for (y, batch), (x, prefix) in itertools.product(enumerate(batches), enumerate(prefixes)):
            if (batch, prefix) in found:
                axis.text(x, y, f"{found[batch, prefix]:.2f}", ha="center", va="center", fontsize=9)
        axis.set_xticks(range(len(prefixes)), [str(p) for p in prefixes])
        axis.set_yticks(range(len(batches)), [str(b) for b in batches])
        what = "attention alone" if kind == "layer" else "whole steps"
        axis.set(title=f"{what}, {count} group(s)", xlabel="shared tokens a group", ylabel="sequences")
    figure.colorbar(image, ax=axes, label="time flat / time cascade")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
