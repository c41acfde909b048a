#!/usr/bin/env python3
"""Steps of the engine alone, without HTTP: how long they take, and where the time goes.

A table over batch and context splits decode steps into linears, attention, head, sampling and Python
(planning, commit and preparing the executor). Then the bars: what this engine promises of its steps, each as
`bar: ...; measured: ...: ok|MISSED`. Medians of alternating runs; the machine's own read bandwidth and FLOP
rate are measured in the same run.

    .venv/bin/python scripts/bench_step.py [--quick | --bars-only] [--json FILE]

Exit code 1 if a bar is missed. Let the machine be quiet: a busy neighbour slows everything by much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_tools import report_bars, table

from engine import machine

# Pages that the bars need: 16 sequences that grow behind the 1,024 that stand for the ones beside them.
_BAR_PAGES = 1500


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--executor", choices=("compiled", "torch"), default="compiled")
    add("--threads", type=int, default=0, help="default: what this process may use")
    add("--batches", type=int, nargs="+", default=[1, 4, 16, 64], help="rows of a step")
    add("--contexts", type=int, nargs="+", default=[128, 1000, 4000], help="tokens of context of each row")
    add("--rounds", type=int, default=21, help="alternating runs of each; 11 or more")
    add("--quick", action="store_true", help="a small table, and three prefills")
    add("--bars-only", action="store_true", help="no table")
    add("--json", metavar="FILE", help="write table and bars here")
    options = parser.parse_args(arguments)
    if options.quick:
        options.batches, options.contexts = [1, 16], [128, 1000]
    options.threads = options.threads or machine.usable_cpus()
    return options


def main() -> int:
    options = parse()
    machine.calm_openmp()  # before anything imports torch

    import torch
    from bench_engine import load_runner
    from bench_machine import Reader, rate_meter
    from bench_step_bars import busy_bars, decode_bars, prefill_bar
    from bench_step_parts import how, most_pages, prepared, split_table

    torch.manual_seed(0)
    sizes = [(count, context) for count in options.batches for context in options.contexts]
    pages = _BAR_PAGES if options.bars_only else max(_BAR_PAGES, most_pages(sizes, options.rounds + 8, 16))
    page_bytes = 30 * 16 * 2 * 3 * 64 * 2
    runner = load_runner(options.executor, options.threads, (pages + 64) * page_bytes / 1e9)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        prepared(runner, pages)
        reader, linears = Reader(), rate_meter(runner.pipeline.decoder.dtype)
        read = reader.bytes / statistics.median(reader.seconds() for _ in range(11)) / 1e9
        rate = linears.flops / statistics.median(linears.seconds() for _ in range(11)) / 1e9
        print(f"executor {options.executor}, {runner.info.dtype}, {options.threads} threads")
        print(f"torch reads {read:.1f} GB/s; linears of 512 rows reach {rate:.0f} GFLOP/s")
        if not options.bars_only:
            rows = split_table(runner, options)
            print(f"\nms of a decode step; linears and attention timed {how(runner)}\n")
            print(table(rows) + "\n")
        bars = [
            *decode_bars(runner, options.rounds),
            *busy_bars(runner, max(11, options.rounds // 2)),
            prefill_bar(runner, 3 if options.quick else 11),
        ]
    if options.json:
        machine_rates = {"read_gb_s": read, "linear_gflops": rate}
        found = {
            "options": vars(options),
            "machine": machine_rates,
            "table": rows,
            "bars": [bar._asdict() for bar in bars],
        }
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return report_bars(bars)


if __name__ == "__main__":
    sys.exit(main())
