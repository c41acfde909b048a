"""What one step may take: rows always, predicted time while streams run."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import StepCosts
from engine.scheduling.policy import StepBudget

COSTS = StepCosts(base_ms=2.0, row_ms=1.0, pair_ms=0.01)


def test_rows_bind_without_streams() -> None:
    budget = StepBudget(100, 1.0, COSTS)
    assert budget.chunk(0, 1000) == 100
    budget.add_chunk(0, 60)
    assert budget.chunk(0, 1000) == 40
    assert budget.chunk(0, 7) == 7
    budget.add_chunk(0, 40)
    assert budget.chunk(0, 1000) == 0


def test_time_binds_beside_streams() -> None:
    budget = StepBudget(1000, 100.0, COSTS)
    budget.add_decode(500)
    rows = budget.chunk(0, 1000)
    assert COSTS.predict(1 + rows, 500 + rows * (rows + 1) // 2) <= 100.0
    assert COSTS.predict(2 + rows, 500 + (rows + 1) * (rows + 2) // 2) > 100.0


def test_rows_far_into_a_context_cost_more() -> None:
    budget = StepBudget(1000, 100.0, COSTS)
    budget.add_decode(1)
    assert 16 < budget.chunk(200, 1000) < budget.chunk(0, 1000)


def test_a_prompt_always_gets_on_but_only_one_minimum_a_step() -> None:
    budget = StepBudget(1000, 1.0, COSTS)
    budget.add_decode(1)
    assert budget.chunk(4000, 1000) == 16
    budget.add_chunk(4000, 10)
    assert budget.chunk(0, 1000) == 6
    budget.add_chunk(0, 6)
    assert budget.chunk(0, 1000) == 0


@given(
    st.integers(1, 300),
    st.floats(1.0, 200.0),
    st.lists(st.integers(1, 3000), max_size=20),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 400)), max_size=8),
)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_chunks_fit_rows_and_time(
    max_rows: int, step_ms: float, decodes: list[int], prompts: list[tuple[int, int]]
) -> None:
    budget = StepBudget(max_rows, step_ms, COSTS)
    decodes = decodes[:max_rows]
    rows = pairs = chunked = 0
    for context in decodes:
        budget.add_decode(context)
        rows, pairs = rows + 1, pairs + context
    streams = COSTS.predict(rows, pairs)
    for start, remaining in prompts:
        chunk = budget.chunk(start, remaining)
        assert 0 <= chunk <= remaining
        budget.add_chunk(start, chunk)
        rows, chunked = rows + chunk, chunked + chunk
        pairs += sum(range(start + 1, start + chunk + 1))
        assert rows <= max_rows
        if decodes and chunk:
            limit = max(step_ms, StepBudget.STRETCH * streams)
            assert COSTS.predict(rows, pairs) <= limit or chunked <= StepBudget.MIN_CHUNK
    if prompts and rows - chunked < max_rows:
        assert chunked > 0, "no prompt got on"


def test_streams_that_use_the_time_up_leave_prompts_as_much_again() -> None:
    """On a slow machine a decode step alone may take longer than the budget: prompts still get on."""
    slow = COSTS.scaled(50.0)
    budget = StepBudget(1000, 100.0, slow)
    for _ in range(4):
        budget.add_decode(100)
    streams = slow.predict(4, 400)
    assert streams > 100.0
    rows = budget.chunk(0, 1000)
    assert slow.predict(4 + rows, 400 + rows * (rows + 1) // 2) <= 2 * streams or rows == 16
