#!/usr/bin/env python3
"""Check Headwater on an NVIDIA GPU: correctness, deterministic mode, the engine end to end, and speed.

Needs headwater[cuda] (and headwater[plot] for the picture), and nvcc for FlashInfer's kernels, which are
compiled at first use: that takes minutes, once, and is not counted in --budget. Exits 0 if every check
holds, 1 if one fails, 2 where there is no GPU or no FlashInfer.

    .venv/bin/python scripts/gpu_check.py [--out gpu-check] [--sections attention engine] [--budget 280]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_check_bench import Cell, Sizes, cells, copy_gb_per_s, cuda_clock
from gpu_check_exact import (
    Check,
    attention_checks,
    deterministic_checks,
    deterministic_engine_checks,
    engine_checks,
    run_every_kernel,
)
from gpu_check_model import write_model
from gpu_check_report import Report, plot, summary, write_json

from engine.attention.flashinfer_library import load_flashinfer, require_cuda
from engine.errors import ConfigError, HeadwaterError, ModelError
from engine.models import store

SECTIONS = ("attention", "deterministic", "engine", "bench", "fa3")
_SEEDS = range(6)
# FA3's kernels take minutes to compile, and exist for Hopper only.
_HOPPER = 9
_FA3_SECONDS = 60


class Run:
    """Runs sections within a budget of seconds and keeps what they find."""

    def __init__(self, device: str, budget: float, say: Callable[[str], None] = print) -> None:
        self._device, self._say = device, say
        self._started = time.monotonic()
        self._until = self._started + budget
        self.checks: list[tuple[str, Check]] = []
        self.cells: list[Cell] = []
        self.copy_gb_per_s = 0.0
        self.skipped: list[str] = []

    def compile(self, model: Path) -> None:
        """Have FlashInfer build what all sections need, before the budget starts."""
        self._say("compiling kernels where that was not done before (minutes, the first time)")
        run_every_kernel(model, self._device)
        spent = time.monotonic() - self._started
        self._say(f"  {spent:.0f} s")
        self._started += spent
        self._until += spent

    def exact(self, section: str, checks: Iterator[Check]) -> None:
        """Take checks from an iterator until it ends, or time does."""
        for check in checks:
            self._keep(section, check)
            if time.monotonic() > self._until:
                self.skipped.append(f"the rest of {section}: out of time")
                return

    def engine(self, executor: str, models: list[Path]) -> None:
        """The engine on each model, fast and deterministic."""
        for model in models:
            for checks in (engine_checks, deterministic_engine_checks):
                if time.monotonic() > self._until:
                    self.skipped.append(f"{checks.__name__} of {model.name}: out of time")
                    continue
                try:
                    found = asyncio.run(checks(model, executor))
                except HeadwaterError as error:
                    found = [Check(checks.__name__, False, str(error))]
                for check in found:
                    self._keep("engine", check._replace(name=f"{model.name}: {check.name}"))

    def bench(self, kernel: Any, sizes: Sizes, clock: Callable[[Callable[[], object]], float]) -> None:
        """Measure cells until all are done, or time is up."""
        if not self.copy_gb_per_s:
            self.copy_gb_per_s = copy_gb_per_s(self._device, clock)
        found = list(cells(self._device, clock, kernel, sizes, self._until))
        self.cells += found
        self._say(f"{kernel}: {len(found)} sizes measured")
        if time.monotonic() > self._until:
            self.skipped.append(f"the rest of bench {kernel}: out of time")

    def report(self, machine: dict[str, Any]) -> Report:
        seconds = time.monotonic() - self._started
        return Report(machine, self.checks, self.cells, self.copy_gb_per_s, self.skipped, seconds)

    @property
    def seconds_left(self) -> float:
        return self._until - time.monotonic()

    def _keep(self, section: str, check: Check) -> None:
        self.checks.append((section, check))
        if not check.ok:
            self._say(f"FAILED {section}: {check.name} ({check.detail})")


def run_sections(run: Run, sections: list[str], models: list[Path]) -> None:
    """Run the named sections on the GPU, cheapest first."""
    run.compile(models[0])
    if "attention" in sections:
        run.exact("attention", attention_checks("cuda", _SEEDS))
    if "deterministic" in sections:
        run.exact("deterministic", deterministic_checks("cuda", _SEEDS))
    if "engine" in sections:
        run.engine("flashinfer", models)
    if "bench" in sections:
        run.bench("fa2", Sizes(), cuda_clock)
    if "fa3" in sections:
        if torch.cuda.get_device_capability()[0] != _HOPPER:
            run.skipped.append("fa3: its kernels are for compute capability 9")
        elif run.seconds_left < _FA3_SECONDS:
            run.skipped.append("fa3: out of time (run it alone: --sections fa3)")
        else:
            run.bench("fa3", Sizes(batches=(8, 64, 256), prefixes=(1024, 4096, 16384)), cuda_clock)


def models_here(folder: Path) -> list[Path]:
    """Two random models, and the default model if it was fetched before."""
    found = [
        write_model(folder / "random-qwen3", head_dim=64),
        write_model(folder / "random-llama", head_dim=128, qk_norm=False),
    ]
    with contextlib.suppress(ModelError):
        found.append(store.resolve(store.DEFAULT_MODEL).path)
    return found


def machine() -> dict[str, Any]:
    """What the figures are of."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "memory_gb": round(torch.cuda.mem_get_info()[1] / 1e9, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "flashinfer": load_flashinfer().__version__,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--budget", type=float, default=280.0, help="seconds, compiling not counted")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="writes OUT.json and OUT.png")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        require_cuda()
    except ConfigError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    run = Run("cuda", options.budget)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        run_sections(run, options.sections, models_here(Path(folder)))
    report = run.report(about)
    print(summary(report))
    write_json(report, options.out.with_suffix(".json"))
    if plot(report.cells, options.out.with_suffix(".png")):
        print(f"wrote {options.out.with_suffix('.png')}")
    print(f"wrote {options.out.with_suffix('.json')} after {report.seconds:.0f} s")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
