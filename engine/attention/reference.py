"""Attention written to be obviously right: flat, one row at a time, in double precision.

It ignores how the plan groups rows, except to put each sequence's page list together. One row at a
time also means that a row's bits can't depend on its neighbours. It is the oracle of every test.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import KvReads, KvShape
from engine.attention.checks import CheckedPlan, check_plan
from engine.attention.memory import KvMemory
from engine.plan import RowCopy, StepPlan


class ReferenceAttention:
    """The oracle; see AttentionBackend. KV are kept in fp32, whatever the model's dtype."""

    name = "reference"

    def __init__(self, shape: KvShape, align: int = 256, scale: float | None = None) -> None:
        self.page_size = shape.page_size
        self.num_pages = shape.num_pages
        self.align = align
        self.row_multiple = 1
        self.kv_tokens_read = KvReads()
        self._shape = shape
        self._scale = shape.head_dim**-0.5 if scale is None else scale
        self.memory = KvMemory(shape, torch.float32)
        self._plan: CheckedPlan | None = None
        self._tables: list[Tensor] = []

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        self.memory.copy_rows(copies)

    def wipe(self, pages: Sequence[int]) -> None:
        self.memory.wipe(pages)

    def read_rows(self, layer: int, slots: Tensor) -> Tensor:
        return self.memory.read_rows(layer, slots)

    def write_rows(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        self.memory.write_rows(layer, slots, kv)

    def begin(self, plan: StepPlan) -> None:
        self._plan = None
        checked = check_plan(plan, self.page_size, self.num_pages)
        self._tables = _page_tables(checked)
        private = sum(len(t) * int(n) for t, n in zip(self._tables, checked.private.rows, strict=True))
        self.kv_tokens_read = KvReads(0, private * self.page_size)
        self._plan = checked

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = self._plan
        if plan is None:
            raise RuntimeError("attend() without a successful begin()")
        rows = len(plan.positions)
        self.memory.write(layer, torch.from_numpy(plan.write_slots), k[:rows], v[:rows])
        out = q.new_zeros(q.shape)
        private = plan.private
        for table, first, count in zip(self._tables, private.first, private.rows, strict=True):
            kv = (
                self.memory.pages[layer].index_select(0, table).view(-1, *self.memory.layers[layer].shape[1:])
            )
            for row in range(first, first + count):
                out[row] = self._attend_row(q[row], kv[: plan.positions[row] + 1])
        return out.view(q.shape[0], -1)

    def _attend_row(self, q: Tensor, kv: Tensor) -> Tensor:
        """One row q [q_heads, head_dim] over its whole context kv [tokens, 2, kv_heads, head_dim]."""
        grouped = q.double().view(self._shape.num_kv_heads, -1, self._shape.head_dim)
        keys, values = kv.double().unbind(1)
        scores = torch.einsum("hgd,thd->hgt", grouped, keys) * self._scale
        return torch.einsum("hgt,thd->hgd", torch.softmax(scores, -1), values).reshape(q.shape).to(q.dtype)


def _page_tables(plan: CheckedPlan) -> list[Tensor]:
    """Each sequence's pages in order, from the segments that its rows lie in: int64 [pages]."""
    tables = []
    for sequence, first in enumerate(plan.private.first):
        parts = []
        for level in plan.shared:
            segment = int(np.searchsorted(level.first + level.rows, first, side="right"))
            if segment < len(level.first):
                parts.append(level.pages[level.page_indptr[segment] : level.page_indptr[segment + 1]])
        private = plan.private
        parts.append(private.pages[private.page_indptr[sequence] : private.page_indptr[sequence + 1]])
        tables.append(torch.from_numpy(np.concatenate(parts)))
    return tables
