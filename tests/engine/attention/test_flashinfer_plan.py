"""The arrays that go to FlashInfer's kernels: types, ranges, and the fixed shapes of CUDA graphs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.attention.base import KvReads, KvShape
from engine.attention.flashinfer_graph import GraphKey, GraphLimits, padded, shared_segments
from engine.attention.flashinfer_plan import KernelPlan, kernel_plan, split_bytes
from engine.plan import CascadeLevel, StepPlan
from tests.engine.attention.flashinfer_trees import PAGE, random_members
from tests.engine.attention.plans import Member, step_plan

POOL = 200
SHAPE = KvShape(1, POOL, PAGE, 8, 2, 64)
LIMITS = GraphLimits(rows=16, indices=500)


def plan_of(*members: Member) -> StepPlan:
    return step_plan(members, PAGE, PAGE)


def decode(*members: Member) -> KernelPlan:
    return kernel_plan(plan_of(*members), PAGE, POOL)


A, B = (1, 2), (3,)
PAIR = (Member((A,), (10,), 9, 1), Member((A,), (11,), 10, 1))
LONER = Member((), (12, 13), 5, 1)


@pytest.mark.parametrize("field", CascadeLevel._fields)
@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.float32])
def test_an_array_of_another_type_is_refused_by_name(field: str, dtype: type) -> None:
    plan = plan_of(*PAIR)
    broken = plan.attention.levels[0]._replace(
        **{field: getattr(plan.attention.levels[0], field).astype(dtype)}
    )
    attention = plan.attention._replace(levels=(broken, *plan.attention.levels[1:]))
    with pytest.raises(ValueError, match=f"level 0's {field} is {np.dtype(dtype)}"):
        kernel_plan(plan._replace(attention=attention), PAGE, POOL)


def test_an_array_with_gaps_is_refused() -> None:
    plan = plan_of(*PAIR)
    gaps = np.repeat(plan.attention.positions, 2)[::2]
    with pytest.raises(ValueError, match="positions"):
        kernel_plan(plan._replace(attention=plan.attention._replace(positions=gaps)), PAGE, POOL)


@pytest.mark.parametrize("page", [0, POOL, -1])
def test_a_page_outside_the_pool_and_the_zero_page_are_refused(page: int) -> None:
    plan = plan_of(*PAIR)
    level = plan.attention.levels[0]
    pages = level.kv_indices.copy()
    pages[1] = page
    attention = plan.attention._replace(levels=(level._replace(kv_indices=pages), *plan.attention.levels[1:]))
    with pytest.raises(ValueError, match="pages are 1 to"):
        kernel_plan(plan._replace(attention=attention), PAGE, POOL)


def test_every_row_writes_to_its_own_slot_and_reads_are_counted() -> None:
    step = decode(*PAIR, LONER)
    assert list(zip(step.write_pages.tolist(), step.write_offsets.tolist(), strict=True)) == [
        (10, 1),
        (11, 2),
        (13, 1),
    ]
    assert step.reads == KvReads(shared=8, private=2 + 3 + 6)


def test_a_level_that_is_empty_for_all_rows_is_left_out() -> None:
    level = CascadeLevel(*(np.array(x, np.int32) for x in ([0, 2, 3], [0, 0, 0], [], [0, 0])))
    plan = plan_of(*PAIR, LONER)
    attention = plan.attention._replace(levels=(level, *plan.attention.levels))
    step = kernel_plan(plan._replace(attention=attention), PAGE, POOL)
    assert len(step.shared) == 1


def test_neighbouring_empty_segments_become_one() -> None:
    loners = [Member((), (20 + i,), 1, 1) for i in range(5)]
    plan = plan_of(*PAIR, *loners)
    level = CascadeLevel(
        *(
            np.array(x, np.int32)
            for x in ([0, 2, 3, 4, 5, 6, 7], [0, 2, 2, 2, 2, 2, 2], [1, 2], [4, 0, 0, 0, 0, 0])
        )
    )
    attention = plan.attention._replace(levels=(level, plan.attention.levels[-1]))
    (shared,) = kernel_plan(plan._replace(attention=attention), PAGE, POOL).shared
    assert [a.tolist() for a in shared] == [[0, 2, 7], [0, 2, 2], [1, 2], [4, 0]]


def test_alone_each_row_ends_with_itself() -> None:
    step = kernel_plan(plan_of(Member((), (5, 6, 7), 3, 4)), PAGE, POOL, rows_alone=True)
    assert [a.tolist() for a in step.private] == [
        [0, 1, 2, 3, 4],
        [0, 1, 3, 5, 7],
        [5, 5, 6, 5, 6, 5, 6],
        [4, 1, 2, 3],
    ]
    assert step.reads == KvReads(0, 4 + 5 + 6 + 7)


def test_the_workspace_of_fixed_splits_grows_with_the_splits() -> None:
    short = kernel_plan(plan_of(*PAIR), PAGE, POOL).private
    long = kernel_plan(plan_of(Member((), tuple(range(1, 101)), 399, 1)), PAGE, POOL).private
    assert split_bytes(short, 10, SHAPE) == 2 * 16 * 8 * 65 * 4
    uneven = kernel_plan(
        plan_of(*[Member((), (20 + i,), 0, 1 + i // 2) for i in range(3)]), PAGE, POOL
    ).private
    assert split_bytes(uneven, 10, KvShape(1, POOL, PAGE, 8, 1, 64)) == 3 * 16 * 8 * 65 * 4
    wider = kernel_plan(
        plan_of(*[Member((), (20 + i,), 0, 2 + i // 2) for i in range(3)]), PAGE, POOL
    ).private
    assert split_bytes(wider, 10, KvShape(1, POOL, PAGE, 8, 1, 64)) == 3 * 64 * 8 * 65 * 4, "18 in the mean"
    assert split_bytes(long, 10, SHAPE) == 10 * 16 * 8 * 65 * 4


def test_the_workspace_of_graphs_holds_every_tile_that_rows_and_segments_could_make() -> None:
    """Groups of 128 of 256 rows, 4 query heads for a KV head: 128 heads a tile, one tile begun a segment."""
    items = 256 * 4 // 128 + shared_segments(256) - 1
    assert GraphLimits(256, 1).workspace(KvShape(1, 9, 16, 32, 8, 128)) == items * 128 * 32 * 129 * 4
    few = GraphLimits(1, 1).workspace(KvShape(1, 9, 16, 8, 1, 128))
    assert few == 2 * 192 * 16 * 8 * 129 * 4


def test_buckets_hold_every_decode_step_up_to_the_limit() -> None:
    assert GraphLimits(rows=20, indices=1).buckets() == (1, 2, 4, 8, 12, 16, 20)
    assert [GraphLimits(20, 1).bucket(n) for n in (1, 3, 20, 21)] == [1, 4, 20, None]
    assert GraphLimits(0, 0).buckets() == ()


def test_only_decode_steps_that_fit_have_a_graph() -> None:
    assert LIMITS.key(decode(*PAIR, LONER)) == GraphKey(4, 2)
    assert LIMITS.key(decode(LONER)) == GraphKey(1, 1)
    assert LIMITS.key(decode(Member((), (12, 13), 4, 2))) is None
    assert LIMITS.key(decode(*[Member((), (20 + i,), 1, 1) for i in range(17)])) is None
    assert GraphLimits(16, 2).key(decode(*PAIR, LONER)) is None


def test_padding_adds_rows_that_see_nothing_and_write_to_the_scratch_page() -> None:
    step = decode(*PAIR, LONER)
    wide = padded(step, GraphKey(8, 2), scratch_page=POOL)
    assert wide.rows == 8
    assert wide.write_pages.tolist() == [10, 11, 13] + [POOL] * 5
    assert [a.tolist() for a in wide.private] == [
        list(range(9)),
        [0, 1, 2, 4, 4, 4, 4, 4, 4],
        [10, 11, 12, 13],
        [2, 3, 2, 0, 0, 0, 0, 0],
    ]
    (shared,) = wide.shared
    assert [a.tolist() for a in shared] == [[0, 2, 8, 8, 8, 8], [0, 2, 2, 2, 2, 2], [1, 2], [4, 0, 0, 0, 0]]


def test_padding_opens_an_empty_segment_where_there_is_none() -> None:
    (shared,) = padded(decode(*PAIR, *PAIR[:1]), GraphKey(4, 2), POOL).shared
    assert [a.tolist() for a in shared] == [[0, 3, 4, 4], [0, 2, 2, 2], [1, 2], [4, 0, 0]]


def test_random_decode_steps_keep_one_shape_a_key_and_lose_nothing() -> None:
    rng = random.Random(4)
    keys = set()
    for _ in range(300):
        members = random_members(rng, rows=1, pages=POOL)[:16]
        step = kernel_plan(plan_of(*members), PAGE, POOL)
        key = LIMITS.key(step)
        if key is None:
            continue
        keys.add(key)
        wide = padded(step, key, POOL)
        assert len(wide.write_pages) == len(wide.write_offsets) == key.rows == wide.rows
        assert [len(wide.private.last_page_len), *(len(s.last_page_len) for s in wide.shared)] == [
            key.rows,
            *[shared_segments(key.rows)] * (key.levels - 1),
        ]
        for before, after in zip((step.private, *step.shared), (wide.private, *wide.shared), strict=True):
            assert after.qo_indptr[-1] == key.rows
            assert len(after.qo_indptr) == len(after.kv_indptr) == len(after.last_page_len) + 1
            assert {a.dtype for a in after} == {np.dtype(np.int32)}
            assert spans(before) == spans(after)[: step.rows]
            assert spans(after)[step.rows :] == [()] * (key.rows - step.rows)
    assert len(keys) > 8


def spans(level: CascadeLevel) -> list[tuple[int, ...]]:
    """What each row sees: its segment's pages, and how much of the last one."""
    seen = []
    for s in range(len(level.last_page_len)):
        pages = level.kv_indices[level.kv_indptr[s] : level.kv_indptr[s + 1]].tolist()
        row = (*pages, int(level.last_page_len[s])) if pages else ()
        seen += [row] * int(level.qo_indptr[s + 1] - level.qo_indptr[s])
    return seen
