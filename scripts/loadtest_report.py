"""The report of a load test: what requests saw, as numbers, as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("shared-prefix", "multi-turn", "no-sharing")


@dataclass
class Record:
    """What one request saw. Times are seconds on one clock; token counts are None where not reported."""

    kind: str
    sent: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    detail: str = ""

    @property
    def output_tokens(self) -> int:
        return len(self.arrivals) if self.completion_tokens is None else self.completion_tokens


def summarise(records: Sequence[Record], seconds: float) -> dict[str, Any]:
    """Turn the records of so many seconds into the report's numbers. None is unknown."""
    good = [record for record in records if record.error is None]
    known = [r for r in good if r.prompt_tokens and r.cached_tokens is not None]
    prompt, cached = sum(r.prompt_tokens or 0 for r in known), sum(r.cached_tokens or 0 for r in known)
    output = sum(record.output_tokens for record in good)
    gaps = [b - a for r in good for a, b in zip(r.arrivals, r.arrivals[1:], strict=False)]
    errors: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.error is not None:
            entry = errors.setdefault(record.error, {"count": 0, "example": record.detail})
            entry["count"] += 1
    return {
        "seconds": seconds,
        "requests": len(records),
        "succeeded": len(good),
        "failed": len(records) - len(good),
        "errors": errors,
        "requests_per_second": len(good) / seconds if seconds else None,
        "output_tokens": output,
        "output_tokens_per_second": output / seconds if seconds else None,
        "prompt_tokens": prompt if known else None,
        "cached_tokens": cached if known else None,
        "cached_share": cached / prompt if known else None,
        "cached_share_per_request": spread([(r.cached_tokens or 0) / (r.prompt_tokens or 1) for r in known]),
        "ttft_ms": spread([1e3 * (r.arrivals[0] - r.sent) for r in good if r.arrivals]),
        "inter_token_ms": spread([1e3 * gap for gap in gaps]),
        "end_to_end_ms": spread([1e3 * (r.ended - r.sent) for r in good]),
    }


def duration(records: Sequence[Record]) -> float:
    """Seconds from the first request's start to the last one's end."""
    begun = min((record.sent for record in records), default=0.0)
    return max((record.ended for record in records), default=0.0) - begun


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Percentiles (linear between ranks), mean and maximum."""
    if not values:
        return dict.fromkeys(("p50", "p95", "p99", "mean", "max"))
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    mean = math.fsum(ordered) / len(ordered)
    return {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "mean": mean, "max": ordered[-1]}


def table(report: dict[str, Any]) -> str:
    """Write the report for people."""
    columns = ("p50", "p95", "p99", "mean", "max")
    lines = [f"{report['workload']} on {report['url']}, model {report['model']}, seed {report['seed']}"]
    if report["interrupted"]:
        lines.append("interrupted: what follows is what there was")
    for name, part in {"": report, **report["parts"]}.items():
        lines += ["", f"{name:24}" + "".join(f"{column:>11}" for column in columns)]
        for label, key, scale in (
            ("TTFT, ms", "ttft_ms", 1),
            ("inter-token, ms", "inter_token_ms", 1),
            ("end to end, ms", "end_to_end_ms", 1),
            ("cached share, %", "cached_share_per_request", 100),
        ):
            cells = [part[key][column] for column in columns]
            texts = ["-" if cell is None else f"{cell * scale:,.1f}" for cell in cells]
            lines.append(f"{label:24}" + "".join(f"{text:>11}" for text in texts))
        rates = [part["requests_per_second"] or 0, part["output_tokens_per_second"] or 0]
        done = f"{part['succeeded']} succeeded, {part['failed']} failed in {part['seconds']:.1f} s"
        lines.append(f"{'requests':24}{done}, {rates[0]:.2f} a second")
        lines.append(f"{'output':24}{part['output_tokens']:,} tokens, {rates[1]:.1f} a second")
        if part["cached_share"] is None:
            cached = "not reported by the server"
        else:
            share = f"{100 * part['cached_share']:.1f} %"
            cached = f"{part['cached_tokens']:,} of {part['prompt_tokens']:,} prompt tokens, {share}"
        lines.append(f"{'cached':24}{cached}")
    for kind, entry in report["errors"].items():
        lines.append(f"{'error':24}{kind}, {entry['count']} times: {entry['example']}")
    return "\n".join(lines)


def plot(records: Sequence[Record], report: dict[str, Any], path: str) -> None:
    """Draw TTFT over time and the distributions of TTFT and inter-token latency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    begun = min((record.sent for record in records), default=0.0)
    for kind in KINDS:
        good = [r for r in records if r.kind == kind and r.error is None and r.arrivals]
        if not good:
            continue
        ttft = [1e3 * (r.arrivals[0] - r.sent) for r in good]
        gaps = [1e3 * (b - a) for r in good for a, b in zip(r.arrivals, r.arrivals[1:], strict=False)]
        left.scatter([r.sent - begun for r in good], ttft, s=9, label=kind)
        middle.ecdf(ttft, label=kind)
        if gaps:
            right.ecdf(gaps, label=kind)
    left.set(title="TTFT over time", xlabel="sent at, s", ylabel="ms", ylim=(0, None))
    middle.set(title="TTFT", xlabel="ms", ylabel="share of requests")
    right.set(title="inter-token latency", xlabel="ms", ylabel="share of gaps")
    if left.get_legend_handles_labels()[0]:
        left.legend()
    figure.suptitle(f"{report['workload']}: {report['model']}, {report['succeeded']} requests")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
