"""What the benches share: alternating runs, intervals of ratios, tables, and bars that are met or missed."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

RESAMPLES = 2000


class Interval(NamedTuple):
    """A median and the 95 % bootstrap interval around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


class Bar(NamedTuple):
    """One thing that is promised about speed: what was asked, what was measured, and whether it is enough."""

    name: str
    bar: str
    measured: str
    ok: bool

    def __str__(self) -> str:
        return f"bar: {self.name}: {self.bar}; measured: {self.measured}: {'ok' if self.ok else 'MISSED'}"


def at_least(name: str, bar: float, measured: float, unit: str = "", note: str = "") -> Bar:
    return Bar(name, f"at least {bar:.4g}{unit}", f"{measured:.4g}{unit}{note}", measured >= bar)


def at_most(name: str, bar: float, measured: float, unit: str = "", note: str = "") -> Bar:
    return Bar(name, f"at most {bar:.4g}{unit}", f"{measured:.4g}{unit}{note}", measured <= bar)


def alternate(variants: Sequence[Callable[[int], float]], rounds: int) -> list[list[float]]:
    """Seconds of each variant in each round: [variants][rounds].

    A variant takes the round's number and gives the seconds it measured. Their order turns from round to
    round, so that whatever changes in time on the machine falls on all alike.
    """
    found: list[list[float]] = [[0.0] * rounds for _ in variants]
    for number in range(rounds):
        for place in range(len(variants)):
            which = (place + number) % len(variants)
            found[which][number] = variants[which](number)
    return found


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ratio_interval(over: Sequence[float], under: Sequence[float], seed: int = 0) -> Interval:
    """Median of the paired ratios over[i] / under[i], and its 95 % interval by resampling the pairs."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return Interval(
        statistics.median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay rows of the same keys out in columns; floats get three significant digits or so."""
    if not rows:
        return "(nothing)"
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return (
            f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
        )
    return str(value)


def report_bars(bars: Sequence[Bar]) -> int:
    """Print each bar; returns the exit code: 0 if all are met."""
    for bar in bars:
        print(bar)
    return 0 if all(bar.ok for bar in bars) else 1
