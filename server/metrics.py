"""Prometheus metrics: gauges and counters read from the engine at scrape time, histograms of requests.

No label holds anything that a client sent, so the number of series does not grow with users.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from server.backend import Backend

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_COUNTERS = {
    "requests": "Requests that the engine took",
    "prompt_tokens": "Tokens of prompts, cached ones included",
    "cached_tokens": "Tokens of prompts whose KV came from the cache",
    "generated_tokens": "Tokens generated",
    "computed_rows": "Rows that steps really ran",
    "recomputed_rows": "Rows run again after a preemption",
    "steps": "Steps run",
    "failed_steps": "Steps that raised or gave a non-finite number",
    "preemptions": "Sequences preempted to free pages",
    "evicted_pages": "Pages evicted from the prefix tree",
    "collapsed_pages": "Pages freed because another held the same tokens",
    "copied_rows": "KV rows copied for matches that end inside a page",
    "cascade_steps": "Steps in which sequences read a shared prefix once",
    "cascade_groups": "Groups of sequences that shared a prefix, over all steps",
    "cascade_rows": "Rows that were in such groups, over all steps",
    "cascade_levels": "Levels that were shared, over all steps",
    "cascade_refused": "Shared prefixes that did not pay for a group, over all steps",
    "kv_bytes_read": "Bytes of KV that attention read, in all layers",
    "kv_bytes_saved": "Bytes of KV that it did not read again because a group shared them",
    "verified_steps": "Steps that were computed again with flat attention",
    "differing_steps": "Steps whose results were not the same then",
}


class Metrics:
    """The registry behind /metrics, private to one application."""

    def __init__(self, backend: Backend) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(backend))
        self._ttft = Histogram(
            "headwater_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self._itl = Histogram(
            "headwater_inter_token_latency_seconds",
            "Between two tokens of one choice",
            buckets=_ITL_BUCKETS,
            registry=self._registry,
        )

    def first_token(self, seconds: float) -> None:
        """Record a request's time to first token."""
        self._ttft.observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """Record that `count` more tokens of a choice came, `seconds` after the ones before."""
        for _ in range(count):
            self._itl.observe(seconds / count)

    def render(self) -> bytes:
        """Write all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Asks the engine when Prometheus asks us, so that no gauge is ever stale."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("headwater_ready", "1 when requests are taken", self._backend.ready)
        yield GaugeMetricFamily("headwater_http_requests_open", "Requests being answered", self._backend.open)
        engine = self._backend.engine
        if engine is None:
            return
        info, stats = engine.info, engine.stats()
        model = InfoMetricFamily("headwater_model", "What is served")
        model.add_metric((), {"model": info.model, "dtype": info.dtype, "executor": info.executor})
        yield model
        yield GaugeMetricFamily("headwater_requests_running", "Sequences in the batch", stats.running)
        yield GaugeMetricFamily("headwater_requests_waiting", "Requests not yet admitted", stats.waiting)
        pages = GaugeMetricFamily("headwater_kv_pages", "KV pages by state", labels=("state",))
        for state in ("free", "evictable", "pinned"):
            pages.add_metric((state,), getattr(stats, state + "_pages"))
        yield pages
        total = stats.free_pages + stats.evictable_pages + stats.pinned_pages
        usage = stats.pinned_pages / total if total else 0.0
        yield GaugeMetricFamily(
            "headwater_kv_cache_usage_ratio", "Share of pages that live requests hold", usage
        )
        for field, text in _COUNTERS.items():
            yield CounterMetricFamily(f"headwater_{field}", text, getattr(stats, field))
        finished = CounterMetricFamily(
            "headwater_requests_finished", "Requests by how they ended", labels=("reason",)
        )
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric((reason,), count)
        yield finished
