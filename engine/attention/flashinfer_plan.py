"""From a StepPlan to the index arrays that FlashInfer's kernels read. Numpy only, once a step.

The kernels take raw pointers and check neither type nor range: int64 would be read as garbage, a page out
of range as another's memory. So whatever can be wrong is refused here, before it gets there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.attention.base import KvReads, KvShape
from engine.attention.checks import CheckedPlan, Ints, Segments, check_plan, ragged
from engine.plan import CascadeLevel, CascadePlan, Int32, StepPlan


class KernelPlan(NamedTuple):
    """What the kernels run: `shared` levels that have pages, outermost first, then the causal `private` one.

    Row r's own KV go to offset write_offsets[r] of page write_pages[r]. All arrays int32 and contiguous;
    every level covers `rows` rows. `reads` counts KV tokens.
    """

    rows: int
    private: CascadeLevel
    shared: tuple[CascadeLevel, ...]
    write_pages: Int32
    write_offsets: Int32
    reads: KvReads


def kernel_plan(plan: StepPlan, page_size: int, num_pages: int, *, rows_alone: bool = False) -> KernelPlan:
    """Check a step's plan and turn it into kernel arrays.

    `rows_alone` gives each row a private segment of its own, which ends with the row itself: then a row's
    work does not depend on how its sequence was cut into chunks. Raises ValueError for what can't be.
    """
    _check_types(plan.attention)
    checked = check_plan(plan, page_size, num_pages)
    private = plan.attention.levels[-1]
    if rows_alone:
        private = _one_segment_a_row(checked, page_size)
    pages, offsets = np.divmod(checked.write_slots, page_size)
    return KernelPlan(
        plan.rows,
        private,
        tuple(_joined(level) for level in plan.attention.levels[:-1] if len(level.kv_indices)),
        pages.astype(np.int32),
        offsets.astype(np.int32),
        KvReads(
            sum(_tokens(level) for level in checked.shared),
            _private_tokens(checked, rows_alone),
        ),
    )


def query_tile(packed: int) -> int:
    """Query heads of one KV head, of all rows of a segment, that the kernel works on at a time; `packed` is
    how many of them there are in the mean segment."""
    return 16 if packed <= 16 else 64 if packed <= 64 else 128


def partial_bytes(items: int, tile: int, shape: KvShape) -> int:
    """Workspace of so many work items: fp32 partial results and their log-sum-exps, for whole query tiles."""
    return items * tile * shape.num_heads * (shape.head_dim + 1) * 4


def split_bytes(level: CascadeLevel, split_pages: int, shape: KvShape) -> int:
    """Workspace that a level takes when its KV are cut every `split_pages` pages."""
    rows = np.diff(level.qo_indptr).astype(np.int64)
    group = shape.num_heads // shape.num_kv_heads
    tile = query_tile(int(rows.sum()) * group // len(rows))
    splits = np.maximum(1, -(-np.diff(level.kv_indptr).astype(np.int64) // split_pages))
    return partial_bytes(int((-(-rows * group // tile) * splits).sum()), tile, shape)


def _private_tokens(checked: CheckedPlan, rows_alone: bool) -> int:
    """KV tokens that the private level reads: each sequence's tail once, or once for every row of it."""
    if not rows_alone:
        return _tokens(checked.private)
    owner, _ = ragged(checked.private.rows)
    return int((checked.positions - checked.private.start[owner] + 1).sum())


def _tokens(segments: Segments) -> int:
    return int(segments.tokens[segments.rows > 0].sum())


def _check_types(attention: CascadePlan) -> None:
    """Each array of the plan is a flat, contiguous array of 32-bit integers."""
    named = {"kv_start": attention.kv_start, "positions": attention.positions}
    for index, level in enumerate(attention.levels):
        named |= {f"level {index}'s {name}": array for name, array in level._asdict().items()}
    for name, array in named.items():
        if array.dtype != np.int32 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(
                f"impossible plan: {name} is {array.dtype} with {array.ndim} dimensions,"
                " not one contiguous run of int32"
            )


def _joined(level: CascadeLevel) -> CascadeLevel:
    """The level with neighbouring empty segments made one: the kernel chooses its query tile by the mean
    of rows over segments, which many empty ones would pull down."""
    empty = np.diff(level.kv_indptr) == 0
    ends = np.ones(len(empty), np.bool_)
    ends[:-1] = ~(empty[:-1] & empty[1:])
    return CascadeLevel(
        np.concatenate((level.qo_indptr[:1], level.qo_indptr[1:][ends])),
        np.concatenate((level.kv_indptr[:1], level.kv_indptr[1:][ends])),
        level.kv_indices,
        level.last_page_len[ends],
    )


def _one_segment_a_row(checked: CheckedPlan, page_size: int) -> CascadeLevel:
    private = checked.private
    owner, _ = ragged(private.rows)
    tokens: Ints = checked.positions - private.start[owner] + 1
    counts = -(-tokens // page_size)
    row, nth = ragged(counts)
    indices = private.pages[private.page_indptr[owner[row]] + nth]
    return CascadeLevel(
        np.arange(len(owner) + 1, dtype=np.int32),
        np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        indices.astype(np.int32),
        ((tokens - 1) % page_size + 1).astype(np.int32),
    )
