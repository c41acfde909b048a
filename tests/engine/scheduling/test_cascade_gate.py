"""The gate opens what pays by the costs that it is given, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.plan import CascadePlan, GateCosts
from engine.scheduling.cascade import Span, plan_cascade
from tests.engine.attention.trees import Tree, trees
from tests.engine.scheduling.batches import batches
from tests.engine.scheduling.rig import Rig
from tests.engine.scheduling.test_cascade_tree import example

FREE = GateCosts(byte_ns=0.02)


def same(one: CascadePlan, other: CascadePlan) -> bool:
    return len(one.levels) == len(other.levels) and all(
        np.array_equal(a, b)
        for first, second in zip(one.levels, other.levels, strict=True)
        for a, b in zip(first, second, strict=True)
    )


@given(trees((16,)), st.integers(1, 6), st.integers(1, 10_000))
@settings(deadline=None, max_examples=80)
def test_no_cost_is_force_and_endless_cost_is_flat(tree: Tree, levels: int, token_bytes: int) -> None:
    def plan(mode: str, costs: GateCosts) -> tuple[list[int], CascadePlan]:
        return plan_cascade(tree.spans, tree.page_size, tree.tile, mode, levels, costs, token_bytes)  # type: ignore[arg-type]

    (free_order, free), (force_order, force) = plan("auto", FREE), plan("force", GateCosts(0.0, 1e9, 1e9))
    assert free_order == force_order
    assert same(free, force)
    assert (free.refused, force.refused) == (0, 0)
    for costs in (
        GateCosts(byte_ns=1.0, segment_ns=1e30),
        GateCosts(byte_ns=1.0, level_ns=float("inf")),
        GateCosts(byte_ns=0.0),
    ):
        order, flat = plan("auto", costs)
        assert same(flat, plan("off", FREE)[1])
        assert order == list(range(len(tree.spans)))
        assert flat.refused >= (1 if levels > 1 and free.groups else 0)


@given(batches(most=8), st.integers(2, 5), st.lists(st.integers(0, 40), min_size=2, max_size=2))
@settings(deadline=None, max_examples=150)
def test_what_costs_more_is_opened_less(
    batch: tuple[list[Span], int, int], levels: int, costs: list[int]
) -> None:
    """Dearer segments never save more bytes, and the predicted profit falls by no more than their price."""
    spans, size, align = batch
    plans = [
        plan_cascade(spans, size, align, "auto", levels, GateCosts(1.0, cost, 0.5), 1)[1]
        for cost in sorted(costs)
    ]
    assert plans[0].saved_tokens >= plans[1].saved_tokens
    assert plans[0].groups >= plans[1].groups
    for plan, cost in zip(plans, sorted(costs), strict=True):
        shared = len(plan.levels) - 1
        assert GateCosts(1.0, cost, 0.5).profit_ns(plan.saved_tokens, plan.groups, shared) >= 0


def test_each_edge_is_weighed_on_its_own() -> None:
    """In the worked example, tiles of 4 tokens and bytes: A saves 3 x 3 tiles, C 1 x 2, R 6 x 2, B 2 x 1.
    At 9 bytes a segment C, which saves 8, is left out, and one of R, A and B: two segments do for them."""
    costs = GateCosts(byte_ns=1.0, segment_ns=9.0)
    order, plan = plan_cascade(example(), 4, 4, "auto", 4, costs, token_bytes=1)
    shares = dict(zip(order, plan.kv_start.tolist(), strict=True))
    assert [shares[r] for r in (7, 8, 9)] == [0, 0, 0]
    assert min(shares[r] for r in range(7)) >= 8
    assert (plan.groups, plan.saved_tokens, plan.refused) == (2, (12 + 9) * 4, 2)


def test_a_level_must_pay_for_itself() -> None:
    """R as a level of its own saves two tiles more than A and B with R folded in."""
    for level_ns, levels, groups in ((7.0, 2, 4), (9.0, 1, 3), (93.0, 0, 0)):
        costs = GateCosts(byte_ns=1.0, level_ns=level_ns)
        _, plan = plan_cascade(example(), 4, 4, "auto", 4, costs, token_bytes=1)
        assert (len(plan.levels) - 1, plan.groups) == (levels, groups)


def test_bytes_decide_not_tokens() -> None:
    """The same sharing pays for a large model and not for a small one."""
    costs = GateCosts(byte_ns=0.02, segment_ns=1000.0)
    groups = [
        plan_cascade(example(), 4, 4, "auto", 4, costs, token_bytes)[1].groups for token_bytes in (768, 65536)
    ]
    assert groups == [0, 4]


def test_the_scheduler_weighs_with_what_it_is_given() -> None:
    prompts = [(0,) * 8 + (1, i % 3) for i in range(3)]
    groups = {}
    for segment_ns in (0.0, 1e9):
        rig = Rig(align=4, gate=GateCosts(byte_ns=1.0, segment_ns=segment_ns), token_bytes=8)
        for prompt in prompts:
            rig.submit(prompt, 12)
        rig.drain()
        counters = rig.scheduler.counters
        groups[segment_ns] = counters.cascade_groups > 0
        assert (counters.cascade_refused > 0) is (segment_ns > 0)
        assert (counters.kv_bytes_saved > 0) is (segment_ns == 0)
    assert groups == {0.0: True, 1e9: False}


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("byte_ns=0.5", GateCosts(byte_ns=0.5)),
        ("byte_ns=1e-3, segment_ns=20", GateCosts(byte_ns=0.001, segment_ns=20.0)),
        ("level_ns=3,segment_ns=2,byte_ns=1", GateCosts(1.0, 2.0, 3.0)),
    ],
)
def test_costs_can_be_pinned(text: str, costs: GateCosts) -> None:
    assert GateCosts.parse(text) == costs


@pytest.mark.parametrize(
    "text",
    ["", "byte_ns", "byte_ns=", "byte_ns=x", "bytes=1", "byte_ns=-1", "byte_ns=nan", "byte_ns=inf", "1,2"],
)
def test_costs_that_are_not_costs_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        GateCosts.parse(text)
    assert "HEADWATER_CASCADE_COSTS" in str(error.value)
    assert "byte_ns=..,segment_ns=..,level_ns=.." in str(error.value)
    assert "\n" not in str(error.value)
