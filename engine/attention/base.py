"""The protocol between the decoder and an attention executor, which owns the KV memory and its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.plan import RowCopy, StepPlan

if TYPE_CHECKING:
    from torch import Tensor


class KvShape(NamedTuple):
    """The sizes an executor is built for. Query heads are a multiple of the KV heads."""

    num_layers: int
    num_pages: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def page_bytes(self, element_size: int) -> int:
        """Bytes of one page in all layers, keys and values."""
        return self.num_layers * self.page_size * 2 * self.num_kv_heads * self.head_dim * element_size


class KvReads(NamedTuple):
    """KV tokens that one layer of a step read: by shared segments, and by private tails."""

    shared: int = 0
    private: int = 0


class AttentionBackend(Protocol):
    """Paged KV memory plus attention over it. Used by the compute thread only.

    `align` is the number of tokens to which shared spans must be cut so that grouping changes no bit.
    `row_multiple` is the multiple of query rows that the executor pads its own calls to; the start-up
    probe may raise it. `kv_tokens_read` tells what the last step read, so that a test can see a cascade.
    """

    name: str
    page_size: int
    num_pages: int
    align: int
    row_multiple: int
    kv_tokens_read: KvReads

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        """Copy KV rows [0, rows) from page to page, in every layer, in order."""

    def wipe(self, pages: Sequence[int]) -> None:
        """Zero whole pages in every layer (after a non-finite result: masked slots must be finite)."""

    def read_rows(self, layer: int, slots: Tensor) -> Tensor:
        """Copy KV out of the executor's layout: [n, 2, kv_heads, head_dim], the key, then the value.

        slots int64 [n], each page * page_size + offset.
        """

    def write_rows(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """The inverse of read_rows."""

    def begin(self, plan: StepPlan) -> None:
        """Prepare index arrays for one step, once for all layers. ValueError on an impossible plan."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the rows' KV, then attend.

        q [rows, q_heads, head_dim], k and v [rows, kv_heads, head_dim], RoPE applied, in the model's
        dtype, may be strided views whose last dimension is dense. Their rows may exceed the plan's
        (padding rows at the end: they write nothing and get zeros). Returns [rows, q_heads * head_dim]
        in the model's dtype.
        """
