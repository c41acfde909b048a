"""Decode steps in fixed shapes, so that a CUDA graph captured once serves all that fit it. Numpy only.

A graph freezes the number of rows and, for each level, the number of segments. So a step is padded: rows to
the next bucket, segments with empty ones. A padding row belongs to no sequence: in every level it lies in a
segment without pages, and its KV go to a scratch page that no table ever holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.attention.base import KvShape
from engine.attention.flashinfer_plan import KernelPlan, partial_bytes, query_tile
from engine.plan import CascadeLevel, Int32

_MOST_PROCESSORS = 192
# Rows of captured decode steps: few enough to capture quickly, close enough to pad little.
_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class GraphKey(NamedTuple):
    """What a captured graph is for: rows, padded, and levels, the private one counted."""

    rows: int
    levels: int


class GraphLimits(NamedTuple):
    """The largest decode step that is captured, in rows, and page indices that one level may have."""

    rows: int
    indices: int

    def buckets(self) -> tuple[int, ...]:
        """The row counts that are captured, ascending; none where rows is 0."""
        return tuple(b for b in _BUCKETS if b < self.rows) + ((self.rows,) if self.rows else ())

    def bucket(self, rows: int) -> int | None:
        """The smallest captured row count that holds so many rows."""
        return next((b for b in self.buckets() if rows <= b), None)

    def workspace(self, shape: KvShape) -> int:
        """Bytes of partial results that the largest captured step may need: a graph keeps room for every
        query tile that its rows and segments could make, and for KV split over the whole chip."""
        group = shape.num_heads // shape.num_kv_heads
        most = 0
        for rows in self.buckets():
            for segments in (rows, shared_segments(rows)):
                tile = query_tile((rows - segments + 1) * group)
                items = max(-(-rows * group // tile) + segments - 1, split_items(shape))
                most = max(most, partial_bytes(items, tile, shape))
        return most

    def key(self, plan: KernelPlan) -> GraphKey | None:
        """The graph that can run this step, or None: not a decode step, or too large for any."""
        rows = self.bucket(plan.rows)
        if rows is None or not np.array_equal(plan.private.qo_indptr, np.arange(plan.rows + 1)):
            return None
        levels = (plan.private, *plan.shared)
        if any(len(level.kv_indices) > self.indices for level in levels):
            return None
        if any(_segments(level, plan.rows < rows) > shared_segments(rows) for level in plan.shared):
            return None
        return GraphKey(rows, len(levels))


def split_items(shape: KvShape) -> int:
    """Work items into which the kernel may split KV: two blocks for every processor of the largest chip."""
    return -(-2 * _MOST_PROCESSORS // shape.num_kv_heads)


def shared_segments(rows: int) -> int:
    """Segments of a shared level in a graph of so many rows: room for pairs, and one empty segment.

    Not more: the kernel sizes its query tile for rows - segments + 1 rows in one segment, and a tile that
    is too small reads the shared KV again for each part of a group.
    """
    return rows // 2 + 1


def padded(plan: KernelPlan, key: GraphKey, scratch_page: int) -> KernelPlan:
    """The plan in the shapes of `key`, which must be `GraphLimits.key(plan)`. Rows [plan.rows, key.rows) are
    padding, and write to the scratch page."""
    extra = key.rows - plan.rows
    return KernelPlan(
        key.rows,
        _pad_private(plan.private, extra),
        tuple(_pad_shared(level, extra, shared_segments(key.rows)) for level in plan.shared),
        _extend(plan.write_pages, extra, scratch_page),
        _extend(plan.write_offsets, extra, 0),
        plan.reads,
    )


def _segments(level: CascadeLevel, padding: bool) -> int:
    """Segments that a shared level has once padding rows have joined an empty one."""
    last_is_empty = level.last_page_len[-1] == 0
    return len(level.last_page_len) + int(padding and not last_is_empty)


def _pad_private(level: CascadeLevel, extra: int) -> CascadeLevel:
    """One more segment, of one row and no pages, for each padding row."""
    rows = level.qo_indptr[-1]
    return CascadeLevel(
        np.concatenate((level.qo_indptr, rows + 1 + np.arange(extra, dtype=np.int32))),
        _extend(level.kv_indptr, extra, level.kv_indptr[-1]),
        level.kv_indices,
        _extend(level.last_page_len, extra, 0),
    )


def _pad_shared(level: CascadeLevel, extra: int, segments: int) -> CascadeLevel:
    """Padding rows join the last empty segment, or one of their own; segments without rows fill the rest."""
    qo = level.qo_indptr.copy()
    if extra and level.last_page_len[-1] == 0:
        qo[-1] += extra
    elif extra:
        qo = _extend(qo, 1, qo[-1] + extra)
    missing = segments + 1 - len(qo)
    return CascadeLevel(
        _extend(qo, missing, qo[-1]),
        _extend(level.kv_indptr, segments + 1 - len(level.kv_indptr), level.kv_indptr[-1]),
        level.kv_indices,
        _extend(level.last_page_len, segments - len(level.last_page_len), 0),
    )


def _extend(array: Int32, count: int, value: int) -> Int32:
    return np.concatenate((array, np.full(count, value, np.int32)))
