"""Check cascades while serving: a sample of steps is computed a second time, flat, and compared."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from engine.pipeline import Pipeline
from engine.plan import StepPlan, flatten

logger = logging.getLogger(__name__)

TOLERANCE = {torch.bfloat16: 2**-4, torch.float16: 2**-7, torch.float32: 2**-10}
"""Difference, against the largest number of the row, up to which rows count as equal where an executor does
not promise equal bits."""

_GOLDEN = 0x9E3779B97F4A7C15


class Verifier:
    """Decides which steps are verified, and compares them. Belongs to the compute thread."""

    def __init__(self, share: float, *, bit_identical: bool) -> None:
        """Verify `share` of the steps that have shared levels, 0 to 1: to the bit, or within tolerance."""
        self._share = share
        self._bit_identical = bit_identical

    def wants(self, plan: StepPlan) -> bool:
        """Whether this step is verified: decided by its number, spread evenly over all steps."""
        if len(plan.attention.levels) < 2:
            return False
        return (plan.step * _GOLDEN % 2**64) < self._share * 2**64

    def differing_rows(self, pipeline: Pipeline, plan: StepPlan, hidden: Tensor) -> int:
        """Compute a step that has just run again, flat, and count the rows of `hidden` that differ.

        The rows write their KV a second time: the same numbers, if nothing differs.
        """
        first = hidden.clone()  # an executor may give out the same memory again
        reads = pipeline.attention.kv_tokens_read
        flat = plan._replace(attention=flatten(plan.attention), wipe=(), copies=())
        same = self._same(first, pipeline.hidden(flat))
        pipeline.attention.kv_tokens_read = reads
        differing = len(same) - int(same.sum())
        if differing:
            logger.warning(
                "step %d: %d of %d rows differ between cascade and flat attention",
                plan.step,
                differing,
                plan.rows,
            )
        return differing

    def _same(self, one: Tensor, other: Tensor) -> Tensor:
        """Which rows are the same; what is not a number in both counts as the same."""
        both_nan = one.isnan() & other.isnan()
        if self._bit_identical:
            return ((one == other) | both_nan).all(1)
        limit = TOLERANCE[one.dtype] * other.abs().amax(1, keepdim=True).nan_to_num()
        return (((one - other).abs() <= limit) | both_nan).all(1)
