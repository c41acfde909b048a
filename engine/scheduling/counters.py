"""What the scheduler has done since the start. Counters never fall."""

from __future__ import annotations

from collections import Counter

from engine.plan import StepPlan
from engine.types import CacheReceipt


class Counters:
    """Plain numbers; each is raised in exactly one place."""

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.computed_rows = 0
        self.recomputed_rows = 0
        self.copied_rows = 0
        self.steps = 0
        self.failed_steps = 0
        self.preemptions = 0
        self.cascade_steps = 0
        self.cascade_groups = 0
        self.cascade_rows = 0
        self.finished: Counter[str] = Counter()

    def admitted(self, receipt: CacheReceipt) -> None:
        """A request was admitted for the first time: look-ups count once, however often it had to wait."""
        self.requests += 1
        self.prompt_tokens += receipt.prompt_tokens
        self.cached_tokens += receipt.cached_tokens

    def ran(self, plan: StepPlan) -> None:
        """A step has run."""
        self.computed_rows += plan.rows
        if plan.attention.groups:
            self.cascade_steps += 1
            self.cascade_groups += plan.attention.groups
            self.cascade_rows += plan.attention.grouped_rows
