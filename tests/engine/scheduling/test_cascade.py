"""Two-level plans give each row its own context, and save what can be saved."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import CascadeLevel
from engine.scheduling.cascade import Span, plan_cascade
from tests.engine.scheduling.batches import Pages, batches, most_saved
from tests.engine.scheduling.fake_runner import check_level, level_pages, tokens_in


@given(batches(), st.sampled_from(("off", "auto", "force")))
@settings(deadline=None, max_examples=300, derandomize=True)
def test_every_row_attends_to_exactly_its_own_context(batch: tuple[list[Span], int, int], mode: str) -> None:
    spans, size, align = batch
    order, plan = plan_cascade(spans, size, align, mode, 2)  # type: ignore[arg-type]
    assert sorted(order) == list(range(len(spans)))
    rows = sum(s.rows for s in spans)
    for level in plan.levels:
        check_level(level, rows, size)
    *shared, last = plan.levels
    assert len(shared) <= (0 if mode == "off" else 1)
    row = 0
    for index, span in enumerate(spans[i] for i in order):
        end = span.start + span.rows
        for position in range(span.start, end):
            above = [p for level in shared for p in level_pages(level, row)]
            assert plan.positions[row] == position
            assert plan.kv_start[index] == len(above) * size <= span.start
            assert plan.kv_start[index] % align == 0
            assert above + level_pages(last, row) == span.table[: -(-end // size)]
            assert plan.kv_start[index] + tokens_in(last, index, size) == end
            row += 1
    assert row == rows


@given(batches())
@settings(deadline=None, max_examples=200, derandomize=True)
def test_groups_come_first_and_loners_stand_in_one_empty_segment(batch: tuple[list[Span], int, int]) -> None:
    spans, size, align = batch
    order, plan = plan_cascade(spans, size, align, "auto", 2)
    grouped = [i for i, start in enumerate(plan.kv_start.tolist()) if start]
    assert grouped == list(range(len(grouped))), "a loner stands before a grouped sequence"
    assert plan.grouped_rows == sum(spans[order[i]].rows for i in grouped)
    if not grouped:
        assert (len(plan.levels), plan.groups) == (1, 0)
        return
    level = plan.levels[0]
    loners = len(grouped) < len(spans)
    assert len(level.last_page_len) == plan.groups + loners
    assert (level.last_page_len[: plan.groups] == size).all()
    if loners:
        assert level.last_page_len[-1] == 0
        assert level.qo_indptr[-2] == plan.grouped_rows
    starts = set(level.qo_indptr.tolist())
    members = [
        sum(level.qo_indptr[g] <= r < level.qo_indptr[g + 1] for r in first_rows(spans, order))
        for g in range(plan.groups)
    ]
    assert min(members) >= 2, "a group of one"
    assert starts <= {*first_rows(spans, order), sum(s.rows for s in spans)}, (
        "a group begins inside a sequence"
    )


def first_rows(spans: list[Span], order: list[int]) -> list[int]:
    at, rows = 0, []
    for i in order:
        rows.append(at)
        at += spans[i].rows
    return rows


@given(batches(most=6))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_no_other_grouping_reads_fewer_tiles(batch: tuple[list[Span], int, int]) -> None:
    spans, size, align = batch
    _, plan = plan_cascade(spans, size, align, "auto", 2)
    saved = 0
    if plan.groups:
        tiles = [len(p) * size // align for p in segments(plan.levels[0])]
        saved = sum(plan.kv_start.tolist()) // align - sum(tiles)
    assert saved == most_saved(spans, size, align, 1)
    assert plan.saved_tokens == saved * align


def segments(level: CascadeLevel) -> list[list[int]]:
    kv = level.kv_indptr.tolist()
    return [level.kv_indices[a:b].tolist() for a, b in pairwise(kv)]


def test_a_deep_group_does_not_keep_the_others_from_sharing_the_root() -> None:
    """Two of five share only the root; the three that share more are better off on their own."""
    pages = Pages()
    paths = [(0, 0, 1), (0, 0, 2, 2, 2, 2), (0, 0, 2, 2, 2, 2), (0, 0, 2, 2, 2, 2), (0, 0, 3)]
    spans = [Span(pages.table(p, 1), len(p) * 4, 1) for p in paths]
    order, plan = plan_cascade(spans, 4, 4, "auto", 2)
    assert plan.groups == 2
    assert plan.grouped_rows == 5
    starts = dict(zip(order, plan.kv_start.tolist(), strict=True))
    assert starts == {0: 8, 4: 8, 1: 24, 2: 24, 3: 24}


@pytest.mark.parametrize(("start", "groups"), [(7, 0), (8, 1), (9, 1)])
def test_a_sequence_shares_only_what_ends_before_its_first_row(start: int, groups: int) -> None:
    spans = [Span([1, 2, 3, 4], start, 3), Span([1, 2, 5, 6], 12, 1)]
    _, plan = plan_cascade(spans, 4, 8, "auto")
    assert plan.groups == groups


def test_off_groups_nothing() -> None:
    spans = [Span([1, 2, 3], 9, 1), Span([1, 2, 4], 9, 1)]
    order, plan = plan_cascade(spans, 4, 4, "off")
    assert order == [0, 1]
    assert (len(plan.levels), plan.groups, plan.kv_start.tolist()) == (1, 0, [0, 0])
