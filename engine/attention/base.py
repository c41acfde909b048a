"""The protocol between the decoder and an attention executor, which owns the KV memory and its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engine.plan import RowCopy, StepPlan

if TYPE_CHECKING:
    from torch import Tensor


class AttentionBackend(Protocol):
    """Paged KV memory plus attention over it. Used by the compute thread only.

    `align` is the number of tokens to which shared spans must be cut so that grouping changes no bit.
    `row_multiple` is the least multiple of rows the executor's own calls are padded to.
    """

    name: str
    page_size: int
    num_pages: int
    align: int

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        """Copy KV rows [0, rows) from page to page, in every layer."""

    def wipe(self, pages: Sequence[int]) -> None:
        """Zero whole pages in every layer (after a non-finite result: masked slots must be finite)."""

    def begin(self, plan: StepPlan) -> None:
        """Prepare index arrays for one step, once for all layers."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the rows' KV, then attend.

        q [rows, q_heads, head_dim], k and v [rows, kv_heads, head_dim], RoPE applied, in the model's
        dtype, where rows may exceed the plan's (padding rows at the end: they write nothing and get
        zeros). Returns [rows, q_heads * head_dim] in the model's dtype.
        """
