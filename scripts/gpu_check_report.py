"""What the GPU check writes: JSON, a table in words, and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_check_bench import Cell
from gpu_check_exact import Check


class Report(NamedTuple):
    """Everything that one run found. `skipped` says in words what was left out."""

    machine: dict[str, Any]
    checks: list[tuple[str, Check]]
    cells: list[Cell]
    copy_gb_per_s: float
    skipped: list[str]
    seconds: float

    @property
    def failures(self) -> list[str]:
        return [f"{section}: {check.name} ({check.detail})" for section, check in self.checks if not check.ok]


def write_json(report: Report, path: Path) -> None:
    """Write everything, with what can be derived from it."""
    content = {
        "machine": report.machine,
        "ok": not report.failures,
        "checks": [{"section": section, **check._asdict()} for section, check in report.checks],
        "copy_gb_per_s": report.copy_gb_per_s,
        "bench": [
            {
                **cell._asdict(),
                "speedup": cell.speedup,
                "flat_share_of_copy": share(cell.flat_bytes, cell.flat_ms, report.copy_gb_per_s),
                "cascade_share_of_copy": share(cell.cascade_bytes, cell.cascade_ms, report.copy_gb_per_s),
            }
            for cell in report.cells
        ],
        "skipped": report.skipped,
        "seconds": report.seconds,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def share(moved: int, ms: float, copy_gb_per_s: float) -> float:
    """KV bytes a second, as a share of what a copy moves; more than 1 where a cache gave them."""
    return moved / (ms * 1e6) / copy_gb_per_s if copy_gb_per_s else 0.0


def summary(report: Report) -> str:
    """A few lines for the terminal."""
    sections: dict[str, list[Check]] = {}
    for section, check in report.checks:
        sections.setdefault(section, []).append(check)
    lines = [
        f"{section}: {sum(c.ok for c in checks)} of {len(checks)} hold"
        for section, checks in sections.items()
    ]
    lines += [f"FAILED {failure}" for failure in report.failures]
    if report.cells:
        lines.append(f"copy: {report.copy_gb_per_s:.0f} GB/s")
        lines.append("kernel  prefix  batch  groups   flat ms  cascade ms  speed-up  of copy: flat, cascade")
    for cell in sorted(report.cells, key=lambda c: (c.kernel, c.groups, c.batch, c.prefix)):
        lines.append(
            f"{cell.kernel:6}  {cell.prefix:6}  {cell.batch:5}  {cell.groups:6}  {cell.flat_ms:8.4f}"
            f"  {cell.cascade_ms:10.4f}  {cell.speedup:8.2f}"
            f"  {share(cell.flat_bytes, cell.flat_ms, report.copy_gb_per_s):13.2f}"
            f"  {share(cell.cascade_bytes, cell.cascade_ms, report.copy_gb_per_s):7.2f}"
        )
    lines += [f"left out: {reason}" for reason in report.skipped]
    return "\n".join(lines)


def plot(cells: Sequence[Cell], path: Path) -> bool:
    """Speed-up over prefix length, a panel for each kernel and number of groups, a line a batch. False where
    there is nothing to draw, or matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    if not cells:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(cell.kernel, cell.groups) for cell in cells})
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5 * len(panels), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for (kernel, groups), axis in zip(panels, axes[0], strict=True):
        here = [cell for cell in cells if (cell.kernel, cell.groups) == (kernel, groups)]
        for batch in sorted({cell.batch for cell in here}):
            line = sorted((cell.prefix, cell.speedup) for cell in here if cell.batch == batch)
            axis.plot(*zip(*line, strict=True), marker="o", label=f"batch {batch}")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("shared prefix, tokens")
        axis.set_title(f"{kernel}, {groups} group{'s' if groups > 1 else ''}")
        axis.legend()
    axes[0][0].set_ylabel("flat time / cascade time")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
