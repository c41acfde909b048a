#!/usr/bin/env python3
"""Cascade attention against flat attention, in one process, alternating: what does sharing save?

Attention alone runs over as many layers as fill --rotate-mb, one after the other, so that caches hold none
of the KV when its turn comes; whole steps run the default model. Both over prefix length x batch x groups.
Then the bars: what this engine promises of its attention, each as `bar: ...; measured: ...: ok|MISSED`.

    .venv/bin/python scripts/bench_cascade.py [--quick | --bars-only] [--json FILE] [--png FILE]

Exit code 1 if a bar is missed. Let the machine be quiet: a busy neighbour slows everything by much.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_tools import report_bars

from engine import machine

EXECUTORS = ("compiled", "torch")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--executor", choices=EXECUTORS, default=EXECUTORS[0])
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    add("--threads", type=int, default=0, help="default: what this process may use")
    add("--rounds", type=int, default=31, help="alternating runs of each variant; 11 or more")
    add("--rotate-mb", type=int, default=250, help="KV that layers rotate through; several times the cache")
    add("--quick", action="store_true", help="a small table")
    add("--bars-only", action="store_true", help="no table, and nothing said of the gate")
    add("--attention-only", action="store_true", help="no whole steps, hence no model")
    add("--json", metavar="FILE", help="write table and bars here")
    add("--png", metavar="FILE", help="draw the table as a heat map")
    options = parser.parse_args(arguments)
    options.threads = options.threads or machine.usable_cpus()
    if options.png and options.bars_only:
        parser.error("--png draws the table, and --bars-only leaves it out")
    return options


def main() -> int:
    options = parse()
    machine.calm_openmp()  # before anything imports torch

    import torch
    from bench_cascade_bars import measure_bars
    from bench_cascade_table import gate_bars, heat_map, measure_table, show

    from engine.models.linear import native_bf16

    if options.dtype == "auto":
        options.dtype = "bfloat16" if native_bf16() else "float32"
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(
        f"executor {options.executor}, {options.dtype}, {options.threads} threads, torch {torch.__version__}"
    )
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        if not options.bars_only:
            rows = measure_table(options)
            show(rows)
        bars = [*measure_bars(options), *gate_bars(rows)]
    if options.png:
        heat_map(rows, options.png)
    if options.json:
        found = {"options": vars(options), "table": rows, "bars": [bar._asdict() for bar in bars]}
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return report_bars(bars)


if __name__ == "__main__":
    sys.exit(main())
