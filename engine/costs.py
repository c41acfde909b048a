"""Measure what a step costs on this machine, for the scheduler's prediction."""

from __future__ import annotations

import time

from engine.pipeline import Pipeline
from engine.plan import StepCosts
from engine.scratch import Chunk, flat_plan

# Seconds after which nothing more is repeated.
_BUDGET = 1.0
_ROWS = 256
_CONTEXT = 1024
# A 16-row step slower than this, in seconds, means a large model: it is measured with fewer rows.
_SLOW = 0.1


def measure(pipeline: Pipeline, context: int) -> StepCosts:
    """Run a few steps on pages from 1 on, which hold nothing yet, and wipe them.

    `context` is the number of tokens that those pages hold. Fits base + rows * row + pairs * pair to three
    steps: one row, many rows, and many rows under a long context.
    """
    started = time.perf_counter()
    rows = max(1, min(16, context))
    _seconds(pipeline, rows, 0)  # the first call pays for what later ones find ready
    quick = _seconds(pipeline, rows, 0) < _SLOW
    rows = max(1, min(_ROWS if quick else 32, context // 2))
    far = max(0, min(_CONTEXT if quick else 256, context - rows))
    shapes = ((1, 0), (rows, 0), (rows, far))
    best = [float("inf")] * len(shapes)
    for _ in range(5):
        for i, (count, start) in enumerate(shapes):
            best[i] = min(best[i], _seconds(pipeline, count, start))
        if time.perf_counter() - started > _BUDGET:
            break
    size = pipeline.attention.page_size
    pipeline.attention.wipe(range(1, 1 + -(-(far + rows) // size)))
    return _fit(rows, far, *(1000.0 * seconds for seconds in best))


def _fit(rows: int, far: int, one_ms: float, many_ms: float, far_ms: float) -> StepCosts:
    pair_ms = max(0.0, (far_ms - many_ms) / (rows * far)) if far else 0.0
    own_pairs = rows * (rows + 1) / 2 - 1
    row_ms = max(0.0, (many_ms - one_ms - own_pairs * pair_ms) / (rows - 1)) if rows > 1 else 0.0
    return StepCosts(max(0.0, one_ms - row_ms - pair_ms), row_ms, pair_ms)


def _seconds(pipeline: Pipeline, rows: int, start: int) -> float:
    attention = pipeline.attention
    plan = flat_plan([Chunk(1, start, [0] * rows)], attention.page_size, attention.align)
    at = time.perf_counter()
    pipeline.logits(pipeline.hidden(plan), [rows - 1])
    return time.perf_counter() - at
