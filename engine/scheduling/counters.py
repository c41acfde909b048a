"""What the scheduler has done since the start. Counters never fall."""

from __future__ import annotations

from collections import Counter

from engine.plan import StepPlan, StepResult
from engine.types import CacheReceipt


class Counters:
    """Plain numbers; each is raised in exactly one place. `token_bytes` is a token's KV in all layers."""

    def __init__(self, token_bytes: int = 1) -> None:
        self.token_bytes = token_bytes
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
        self.cascade_levels = 0
        self.cascade_refused = 0
        self.kv_bytes_read = 0
        self.kv_bytes_saved = 0
        self.verified_steps = 0
        self.differing_steps = 0
        self.finished: Counter[str] = Counter()

    def admitted(self, receipt: CacheReceipt) -> None:
        """A request was admitted for the first time: look-ups count once, however often it had to wait."""
        self.requests += 1
        self.prompt_tokens += receipt.prompt_tokens
        self.cached_tokens += receipt.cached_tokens

    def ran(self, plan: StepPlan, result: StepResult) -> None:
        """A step has run. What attention read follows from the plan: whole contexts, less what was shared."""
        attention = plan.attention
        contexts = int(attention.positions[plan.row_indptr[1:] - 1].sum()) + len(plan.sequence_ids)
        self.computed_rows += plan.rows
        self.kv_bytes_read += (contexts - attention.saved_tokens) * self.token_bytes
        self.kv_bytes_saved += attention.saved_tokens * self.token_bytes
        self.cascade_refused += attention.refused
        if attention.groups:
            self.cascade_steps += 1
            self.cascade_groups += attention.groups
            self.cascade_rows += attention.grouped_rows
            self.cascade_levels += len(attention.levels) - 1
        if result.verified:
            self.verified_steps += 1
            self.differing_steps += result.differing_rows > 0
