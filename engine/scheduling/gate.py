"""The gate: whether a shared segment pays, as prices that folding.py adds up."""

from __future__ import annotations

from engine.plan import GateCosts
from engine.scheduling.folding import Prices

_PER_NS = 1000
"""Prices are whole picoseconds: integers, so that sums do not depend on their order."""
_MOST = 1 << 50
"""A price in ps, 19 minutes, at which nothing ever pays; sums of thousands of them still fit 64 bits."""


def prices(costs: GateCosts, tile_bytes: int) -> Prices:
    """Prices in ps a layer, for KV tiles of `tile_bytes` a layer."""
    return Prices(_ps(costs.byte_ns * tile_bytes), _ps(costs.segment_ns), _ps(costs.level_ns))


def _ps(ns: float) -> int:
    return round(min(max(ns, 0.0) * _PER_NS, _MOST))
