"""Plans go on from the step before: the rig holds each against one made from nothing (CheckedPlanner)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import GateCosts
from engine.scheduling.cascade import CascadePlanner, Rules
from tests.engine.scheduling.rig import Rig

TREE = [(0,) * 8 + (1,) * 8 + (2,), (0,) * 8 + (1,) * 8 + (3,), (0,) * 8 + (2,) * 8 + (4,)]


def grow(rig: Rig, steps: int) -> None:
    for _ in range(steps):
        assert rig.step()


def rig_of(prompts: list[tuple[int, ...]], max_tokens: int = 40, **limits: object) -> Rig:
    """Prompts under way, all of them generating."""
    rig = Rig(pages=400, context=200, **limits)
    rig.submit(prompts[0], max_tokens)
    for prompt in prompts[1:]:
        rig.step()
        rig.submit(prompt, max_tokens)
    while rig.plan().rows != len(prompts):  # type: ignore[union-attr]
        rig.commit()
    rig.commit()
    return rig


def test_growth_and_page_turns_reuse_the_shared_levels() -> None:
    rig = rig_of(TREE)
    before = rig.planner.reused
    grow(rig, 20)
    assert rig.planner.reused == before + 20
    rig.drain()


def test_joins_leaves_and_preemption_are_planned_anew() -> None:
    rig = rig_of(TREE)
    grow(rig, 3)
    late = rig.submit((0,) * 8 + (2,) * 8 + (5,), 30)
    grow(rig, 6)
    rig.stop(late)
    grow(rig, 3)
    rig.preempt(1)
    grow(rig, 9)
    rig.drain()


def test_sequences_that_come_to_share_what_they_generate_are_grouped() -> None:
    """The same prompt and seed twice: each full page of the second collapses into the first's, and a tile
    that both have completed is shared from then on."""
    rig = rig_of([(0, 1, 2, 0, 1), (0, 1, 2, 0, 1)])
    grow(rig, 1)
    tokens = []
    for _ in range(12):
        plan = rig.plan()
        assert plan is not None
        tokens.append(plan.attention.kv_start.tolist())
        rig.commit()
    assert tokens[0] == [4, 4]
    assert tokens[-1] == [16, 16]
    assert rig.scheduler.tables.collapsed_pages >= 3
    rig.drain()


def test_a_first_tile_that_another_has_long_completed_is_shared() -> None:
    """The second request comes when the first has generated more than a tile, and says the same."""
    rig = rig_of([(0, 1, 2, 0, 1)], max_tokens=60, align=12)
    grow(rig, 12)
    rig.submit((0, 1, 2, 0, 1), 60)
    rig.step()
    reused = []
    for _ in range(9):
        plan = rig.plan()
        assert plan is not None
        reused.append(plan.attention.kv_start.tolist())
        rig.commit()
    assert reused[0] == [0, 0]
    assert reused[-1] == [12, 12]
    rig.drain()


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 24), st.integers(1, 30), st.integers(0, 1)),
        min_size=2,
        max_size=10,
    ),
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from(("abort", "stop", "none"))), max_size=8),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((2, 3, 5)),
)
@settings(deadline=None, max_examples=60)
def test_any_sequence_of_steps_gives_the_plans_of_a_planner_without_memory(
    arrivals: list[tuple[int, int, int, int]], events: list[tuple[int, str]], tile_pages: int, levels: int
) -> None:
    rig = Rig(pages=300, page_size=4, align=4 * tile_pages, context=100, cascade_levels=levels)
    waiting = list(arrivals)
    for steps, event in [*events, (4, "none")]:
        for template, keep, max_tokens, seed in waiting[:3]:
            rig.submit([*TREE[template][:keep], 1], max_tokens, seed=seed)
        del waiting[:3]
        for _ in range(steps):
            rig.step()
        running = [id for id, stream in rig.streams.items() if stream.finish is None]
        if event != "none" and running:
            rig.stop(running[len(running) // 2], event)  # type: ignore[arg-type]
    rig.drain()


def test_a_table_that_begins_anew_is_another_sequence() -> None:
    """Equal pages in another list: what the first list became later says nothing about the second."""
    planner = CascadePlanner(Rules(4, 4, "force"))
    tables = [[1, 2, 3], [1, 2, 4]]
    first = planner.plan(list(tables), [8, 8], [1, 1]).attention
    again = planner.plan([list(t) for t in tables], [9, 9], [1, 1]).attention
    assert again.levels[0].kv_indices is not first.levels[0].kv_indices
    more = planner.plan([list(tables[0]), list(tables[1])], [10, 10], [1, 1]).attention
    assert more.positions.tolist() == [10, 10]


@pytest.mark.parametrize("mode", ["off", "auto", "force"])
def test_counters_tell_what_was_read_and_saved(mode: str) -> None:
    """KV of 3 layers and 8 bytes a token: what attention reads and what it saves add up to flat."""
    rig = rig_of(TREE, cascade=mode, layers=3, token_bytes=8, gate=GateCosts(segment_ns=1.0, byte_ns=1.0))
    counters = rig.scheduler.counters
    flat = saved = levels = 0
    start = (counters.kv_bytes_read, counters.kv_bytes_saved, counters.cascade_levels)
    for _ in range(5):
        plan = rig.plan()
        assert plan is not None
        flat += int(plan.attention.positions.sum()) + plan.rows
        saved += plan.attention.saved_tokens
        levels += len(plan.attention.levels) - 1
        rig.commit()
    assert counters.kv_bytes_saved - start[1] == 24 * saved
    assert counters.kv_bytes_read - start[0] == 24 * (flat - saved)
    assert counters.cascade_levels - start[2] == levels
    assert (saved > 0, levels) == ((False, 0) if mode == "off" else (True, 10))
    rig.drain()
