"""What bounds the scheduler."""

from __future__ import annotations

from typing import NamedTuple

from engine.plan import GateCosts
from engine.scheduling.cascade import CascadeMode, Rules


class Limits(NamedTuple):
    """What bounds the scheduler, and how it cuts batches. `context` is prompt plus generated tokens of one
    sequence, `token_bytes` the KV of a token in one of `layers` layers; cascade_levels count the private one.
    """

    context: int
    max_running: int = 64
    max_step_tokens: int = 512
    step_ms: float = 100.0
    align: int = 256
    cascade: CascadeMode = "auto"
    cascade_levels: int = 4
    gate: GateCosts = GateCosts()
    token_bytes: int = 1
    layers: int = 1

    def rules(self, page_size: int) -> Rules:
        """What the cascade's planner goes by."""
        return Rules(page_size, self.align, self.cascade, self.cascade_levels, self.gate, self.token_bytes)
