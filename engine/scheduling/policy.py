"""How much of a prompt runs in one step."""

from __future__ import annotations

from engine.plan import StepCosts, StepPlan

LEARNING_RATE = 0.1
"""Weight of the last step in the estimate of the machine's pace."""


class Pace:
    """How long steps take lately, as a multiple of what was measured once, maybe beside other work."""

    def __init__(self, measured: StepCosts) -> None:
        self._measured = measured
        self._factor = 1.0

    @property
    def costs(self) -> StepCosts:
        """What a step is expected to cost now."""
        return self._measured.scaled(self._factor)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Take in how long a step took."""
        predicted = self._measured.predict(plan.rows, plan.rows + int(plan.attention.positions.sum()))
        if seconds > 0 and predicted > 0:
            ratio = min(max(1e3 * seconds / predicted, 0.1), 10.0)
            self._factor += LEARNING_RATE * (ratio - self._factor)


class StepBudget:
    """What one step may still take: rows, and predicted time while streams are running.

    Decode rows are charged first and always fit. The time budget binds only once decode rows are in the
    step. It is `step_ms`, or STRETCH times what the decode rows cost alone where that is more: on a slow
    machine, or with many streams, a budget that the streams use up themselves would leave prompts crawling,
    and everybody would wait longer. Prompts get MIN_CHUNK rows a step at least.
    """

    MIN_CHUNK = 16
    STRETCH = 2.0

    def __init__(self, max_rows: int, step_ms: float, costs: StepCosts) -> None:
        self.rows_left = max_rows
        self._ms = step_ms
        self._costs = costs
        self._rows = 0
        self._pairs = 0
        self._decoding = False
        self._chunks = 0

    def add_decode(self, context: int) -> None:
        """Charge one decode row that attends to `context` tokens."""
        self._decoding = True
        self._charge(1, context)
        self._ms = max(self._ms, self.STRETCH * self._costs.predict(self._rows, self._pairs))

    def add_chunk(self, start: int, rows: int) -> None:
        """Charge rows [start, start + rows) of a prompt."""
        self._chunks += rows
        self._charge(rows, _pairs(start, rows))

    def chunk(self, start: int, remaining: int) -> int:
        """Rows of a prompt, from token `start` on, that still fit; 0 if none do."""
        most = min(remaining, self.rows_left)
        if most <= 0 or not self._decoding or self._fits(start, most):
            return max(most, 0)
        low, high = 0, most  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(start, middle) else (low, middle)
        return max(low, min(most, self.MIN_CHUNK - self._chunks), 0)

    def _fits(self, start: int, rows: int) -> bool:
        pairs = self._pairs + _pairs(start, rows)
        return self._costs.predict(self._rows + rows, pairs) <= self._ms

    def _charge(self, rows: int, pairs: int) -> None:
        self.rows_left -= rows
        self._rows += rows
        self._pairs += pairs


def _pairs(start: int, rows: int) -> int:
    """Row-context pairs of a chunk: row i attends to start + i + 1 tokens."""
    return rows * start + rows * (rows + 1) // 2
