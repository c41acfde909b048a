"""Batches become cascade plans that give each row its own context, and save what can be saved."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import CascadeLevel
from engine.scheduling.cascade import Span, plan_cascade
from tests.engine.scheduling.fake_runner import check_level, level_pages, tokens_in

Paths = list[tuple[int, ...]]


class Pages:
    """Hands out pages by token path, as the tree does: one path, one page; and private ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}

    def table(self, path: tuple[int, ...], private: int) -> list[int]:
        shared = [self._known.setdefault(path[: i + 1], 1000 - len(self._known)) for i in range(len(path))]
        return shared + [
            self._known.setdefault((-1, len(self._known)), 1000 - len(self._known)) for _ in range(private)
        ]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Span], int, int]:
    """Spans over tables that share pages from the front, page size and tile."""
    size = draw(st.sampled_from((1, 2, 4)))
    align = size * draw(st.integers(1, 3))
    pages, spans = Pages(), []
    for path in draw(st.lists(st.lists(st.integers(0, 1), max_size=7), min_size=1, max_size=8)):
        rows = draw(st.integers(1, 5))
        start = len(path) * size + draw(st.integers(0, size - 1))
        if draw(st.booleans()):  # stands before the end of what it shares, like a chunk that is run again
            start = draw(st.integers(0, start))
        private = max(0, -(-(start + rows) // size) - len(path))
        spans.append(Span(pages.table(tuple(path), private), start, rows))
    return spans, size, align


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


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for i in range(len(smaller)):
            yield [*smaller[:i], [first, *smaller[i]], *smaller[i + 1 :]]


def tiles_shared(spans: list[Span], size: int, align: int) -> int:
    """Whole tiles that all spans share and that end at or before the first row of each."""
    most = min(s.start // align for s in spans)
    step = align // size
    same = 0
    while same < most and len({tuple(s.table[: (same + 1) * step]) for s in spans}) == 1:
        same += 1
    return same


@given(batches())
@settings(deadline=None, max_examples=400, derandomize=True)
def test_no_other_grouping_reads_fewer_tiles(batch: tuple[list[Span], int, int]) -> None:
    spans, size, align = batch
    spans = spans[:6]
    _, plan = plan_cascade(spans, size, align, "auto", 2)
    saved = 0
    if plan.groups:
        tiles = [len(p) * size // align for p in segments(plan.levels[0])]
        saved = sum(plan.kv_start.tolist()) // align - sum(tiles)
    best = max(
        sum((len(g) - 1) * tiles_shared([spans[i] for i in g], size, align) for g in groups)
        for groups in partitions(list(range(len(spans))))
    )
    assert saved == best


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


def test_worked_example() -> None:
    """Ten decoding requests, page and tile 4: A = r0..r3, B = r4..r6, C = r7, r8, and r9 alone. A and B share
    a root R of 2 pages and have 3 and 1 more of their own; C has 2. R is folded into A's and B's lists."""
    root, a, b, c = [1, 2], [3, 4, 5], [6], [7, 8]
    tables = [root + a + [10 + i] for i in range(4)] + [root + b + [20 + i] for i in range(3)]
    tables += [[*c, 30 + i] for i in range(2)] + [[40, 41, 42]]
    spans = [Span(t, len(t) * 4 - 2, 1) for t in tables]
    order, plan = plan_cascade(spans, 4, 4, "auto", 2)
    assert order == list(range(10))
    shared, private = plan.levels
    assert shared.qo_indptr.tolist() == [0, 4, 7, 9, 10]
    assert shared.kv_indptr.tolist() == [0, 5, 8, 10, 10]
    assert shared.kv_indices.tolist() == [*root, *a, *root, *b, *c]
    assert shared.last_page_len.tolist() == [4, 4, 4, 0]
    assert private.qo_indptr.tolist() == list(range(11))
    assert private.kv_indptr.tolist() == [*range(10), 12]
    assert private.kv_indices.tolist() == [10, 11, 12, 13, 20, 21, 22, 30, 31, 40, 41, 42]
    assert private.last_page_len.tolist() == [3] * 10
    assert plan.kv_start.tolist() == [20] * 4 + [12] * 3 + [8] * 2 + [0]
    assert (plan.groups, plan.grouped_rows) == (3, 9)


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
