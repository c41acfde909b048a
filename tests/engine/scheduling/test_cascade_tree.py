"""Plans of several levels: what they save, how they are laid out, and that deep trees are folded exactly."""

from __future__ import annotations

import random

import numpy as np
import pytest
from bench_batches import step_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.checks import check_plan
from engine.plan import CascadeLevel, CascadePlan, GateCosts, flatten
from engine.scheduling.cascade import Span, plan_cascade
from tests.engine.attention.trees import Tree, trees
from tests.engine.scheduling.batches import Pages, batches, most_saved


def arrays(level: CascadeLevel) -> list[list[int]]:
    return [array.tolist() for array in level]


def pages_read(attention: CascadePlan) -> int:
    return sum(len(level.kv_indices) for level in attention.levels)


def contexts(attention: CascadePlan) -> list[list[int]]:
    """Each row's pages, level after level."""
    rows = int(attention.levels[-1].qo_indptr[-1])
    found: list[list[int]] = [[] for _ in range(rows)]
    for level in attention.levels:
        qo, kv, pages, _ = arrays(level)
        for segment in range(len(qo) - 1):
            for row in range(qo[segment], qo[segment + 1]):
                found[row] += pages[kv[segment] : kv[segment + 1]]
    return found


# -- the worked example --------------------------------------------------------------------------


def example() -> list[Span]:
    """Ten decoding requests, page and tile 4: A = r0..r3, B = r4..r6, C = r7, r8, and r9 alone. A and B share
    a root R of 2 pages and have 3 and 1 more of their own; C has 2."""
    root, a, b, c = [1, 2], [3, 4, 5], [6], [7, 8]
    tables = [root + a + [10 + i] for i in range(4)] + [root + b + [20 + i] for i in range(3)]
    tables += [[*c, 30 + i] for i in range(2)] + [[40, 41, 42, 43]]
    return [Span(t, len(t) * 4 - 2, 1) for t in tables]


PRIVATE = [
    list(range(11)),
    [*range(10), 13],
    [10, 11, 12, 13, 20, 21, 22, 30, 31, 40, 41, 42, 43],
    [3] * 10,
]


def test_worked_example_flat() -> None:
    order, plan = plan_cascade(example(), 4, 4, "auto", 1)
    assert order == list(range(10))
    assert len(plan.levels) == 1
    assert pages_read(plan) == 46


def test_worked_example_in_two_levels() -> None:
    """R is folded into A's and B's lists."""
    order, plan = plan_cascade(example(), 4, 4, "auto", 2)
    assert order == list(range(10))
    shared, private = plan.levels
    assert arrays(shared) == [
        [0, 4, 7, 9, 10],
        [0, 5, 8, 10, 10],
        [1, 2, 3, 4, 5, 1, 2, 6, 7, 8],
        [4, 4, 4, 0],
    ]
    assert arrays(private) == PRIVATE
    assert plan.kv_start.tolist() == [20] * 4 + [12] * 3 + [8] * 2 + [0]
    assert (plan.groups, plan.grouped_rows) == (3, 9)
    assert pages_read(plan) == 23


@pytest.mark.parametrize("levels", [3, 4, 8])
def test_worked_example_as_a_tree(levels: int) -> None:
    """46 page reads become 21. In level 0, C and r9 are neighbours with nothing: one empty segment."""
    order, plan = plan_cascade(example(), 4, 4, "auto", levels)
    assert order == list(range(10))
    root, groups, private = plan.levels
    assert arrays(root) == [[0, 7, 10], [0, 2, 2], [1, 2], [4, 0]]
    assert arrays(groups) == [[0, 4, 7, 9, 10], [0, 3, 4, 6, 6], [3, 4, 5, 6, 7, 8], [4, 4, 4, 0]]
    assert arrays(private) == PRIVATE
    assert plan.kv_start.tolist() == [20] * 4 + [12] * 3 + [8] * 2 + [0]
    assert (plan.groups, plan.grouped_rows) == (4, 9)
    assert pages_read(plan) == 21
    assert plan.saved_tokens == (46 - 21) * 4


# -- any batch -----------------------------------------------------------------------------------


@given(trees((8, 16)), st.integers(1, 8))
@settings(deadline=None, max_examples=150)
def test_every_row_attends_to_exactly_its_own_context_in_order(tree: Tree, levels: int) -> None:
    order, attention = plan_cascade(tree.spans, tree.page_size, tree.tile, "force", levels)
    spans = [tree.spans[i] for i in order]
    assert sorted(order) == list(range(len(spans)))
    assert len(attention.levels) <= levels
    plan = step_plan(spans, attention, tree.page_size)
    check_plan(plan, tree.page_size, tree.pages + 1)
    expected = [s.table[: -(-(s.start + s.rows) // tree.page_size)] for s in spans for _ in range(s.rows)]
    assert contexts(attention) == expected

    flat = flatten(attention)
    assert len(flat.levels) == 1
    assert contexts(flat) == expected
    check_plan(plan._replace(attention=flat), tree.page_size, tree.pages + 1)
    unshared = sum(s.start + s.rows for s in spans)
    assert tokens_read(flat, tree.page_size) == unshared
    assert tokens_read(attention, tree.page_size) == unshared - attention.saved_tokens


def tokens_read(attention: CascadePlan, page_size: int) -> int:
    total = 0
    for level in attention.levels:
        counts = np.diff(level.kv_indptr)
        total += int(((counts - 1) * page_size + level.last_page_len)[counts > 0].sum())
    return total


@given(trees((16,)), st.integers(2, 8))
@settings(deadline=None, max_examples=100)
def test_empty_segments_are_as_few_as_can_be_and_no_group_has_one_member(tree: Tree, levels: int) -> None:
    order, attention = plan_cascade(tree.spans, tree.page_size, tree.tile, "force", levels)
    rows = np.cumsum([0, *(tree.spans[i].rows for i in order)])
    reached = np.zeros(rows[-1], int)
    groups = 0
    for level in attention.levels[:-1]:
        qo, kv, _, last = arrays(level)
        empty_before = None
        for s in range(len(last)):
            start = int(reached[qo[s]])
            if kv[s] == kv[s + 1]:
                assert last[s] == 0
                assert empty_before != start, "two empty segments could be one"
                empty_before = start
                continue
            assert last[s] == tree.page_size
            members = int(np.searchsorted(rows, qo[s + 1]) - np.searchsorted(rows, qo[s]))
            assert members >= 2, "a group of one"
            groups, empty_before = groups + 1, None
            reached[qo[s] : qo[s + 1]] += (kv[s + 1] - kv[s]) * tree.page_size
        assert any(last), "a level without a group"
    assert attention.groups == groups
    grouped = attention.kv_start > 0
    assert not np.any(grouped[1:] > grouped[:-1]), "a sequence that shares nothing stands between groups"


@given(batches(most=6), st.integers(1, 5))
@settings(deadline=None, max_examples=250)
def test_no_other_plan_saves_more(batch: tuple[list[Span], int, int], levels: int) -> None:
    """For every number of levels, also where the tree is deeper: against all ways to group."""
    spans, size, align = batch
    _, plan = plan_cascade(spans, size, align, "force", levels)
    assert plan.saved_tokens == align * most_saved(spans, size, align, levels - 1)


@given(batches(most=6), st.integers(2, 5), st.integers(0, 6), st.sampled_from((0, 0, 1, 3, 8)))
@settings(deadline=None, max_examples=150)
def test_no_other_plan_gains_more_where_segments_and_levels_cost(
    batch: tuple[list[Span], int, int], levels: int, segment: int, level: int
) -> None:
    """Each costs as much as so many tiles."""
    spans, size, align = batch
    costs = GateCosts(byte_ns=1.0, segment_ns=segment * align, level_ns=level * align)
    _, plan = plan_cascade(spans, size, align, "auto", levels, costs)
    gained = plan.saved_tokens // align - segment * plan.groups - level * (len(plan.levels) - 1)
    assert gained == max(most_saved(spans, size, align, n, segment) - n * level for n in range(levels))


def test_a_tree_is_folded_where_that_costs_least() -> None:
    """Two levels, prefixes nested three deep: which is opened depends on how many share how much."""
    pages = Pages()
    paths = [(0,) * 8 + (i,) for i in range(2)] + [(0,) * 2 + (3, i) for i in range(9)]
    spans = [Span(pages.table(p, 1), len(p) * 4, 1) for p in paths]
    _, plan = plan_cascade(spans, 4, 4, "force", 2)
    assert sorted(np.diff(plan.levels[0].kv_indptr).tolist()) == [3, 8]
    _, plan = plan_cascade(spans, 4, 4, "force", 3)
    assert [sorted(np.diff(level.kv_indptr).tolist()) for level in plan.levels[:-1]] == [[2], [1, 6]]


def test_a_thousand_nested_prefixes_are_planned() -> None:
    """Each sequence goes one tile further than the one before: no recursion, no explosion, valid plans, and
    more levels never save less."""
    spine = list(range(1, 1001))
    spans = [Span([*spine[:i], 2000 + i], i * 4 + 1, 1) for i in range(1, 1001)]
    random.Random(3).shuffle(spans)
    before = 0
    for levels in (2, 3, 4, 8):
        order, attention = plan_cascade(spans, 4, 4, "force", levels)
        check_plan(step_plan([spans[i] for i in order], attention, 4), 4, 4000)
        assert 2 <= len(attention.levels) <= levels
        assert attention.saved_tokens >= before
        before = attention.saved_tokens
    assert before > 0.9 * sum(s.start for s in spans)


def test_longest_chains_come_first_so_that_what_lacks_a_level_stands_together() -> None:
    """The worked example in reverse: C and r9 arrived before A and B, and still stand behind them."""
    spans = example()[::-1]
    order, plan = plan_cascade(spans, 4, 4, "force", 3)
    assert order == [3, 4, 5, 6, 7, 8, 9, 1, 2, 0]
    assert arrays(plan.levels[0]) == [[0, 7, 10], [0, 2, 2], [1, 2], [4, 0]]
    assert arrays(plan.levels[1])[0] == [0, 3, 7, 9, 10]
