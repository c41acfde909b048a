"""Attention by the compiled kernel: its KV layout, and one call a layer that walks the paged pool.

Promise: a row's result does not depend, to the bit, on what runs beside it, how its sequence was chunked,
which tiles it shares, or the number of threads. The kernel gives it by reducing every (row, head, tile) in
one fixed order, and by folding tiles in ascending order; see kernels/attention.h.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import KvReads, KvShape
from engine.attention.checks import CheckedPlan, Ints, Segments, check_plan
from engine.kernels.library import Library, Pool, SegmentArrays, byref, huge_zeros
from engine.plan import RowCopy, StepPlan


class CompiledAttention:
    """The compiled executor; see AttentionBackend. Pages hold keys and values as the kernel reads them.

    `tile` tokens are reduced at a time, cut at absolute multiples. `scale` defaults to 1 / sqrt(head_dim).
    Raises ValueError for what the kernel has no code for.
    """

    name = "compiled"

    def __init__(
        self,
        library: Library,
        shape: KvShape,
        dtype: torch.dtype,
        tile: int = 256,
        threads: int = 0,
        scale: float | None = None,
    ) -> None:
        """`threads` 0 takes torch's number."""
        problem = paging_refusal(library, shape.page_size, tile, dtype) or heads_refusal(
            shape.num_heads, shape.num_kv_heads, shape.head_dim
        )
        if problem:
            raise ValueError(problem)
        self.page_size = shape.page_size
        self.num_pages = shape.num_pages
        self.align = tile
        self.row_multiple = 1
        self.kv_tokens_read = KvReads()
        self.library = library
        self.threads = threads or torch.get_num_threads()
        self.element_size = dtype.itemsize
        self._shape = shape
        self._dtype = dtype
        page_bytes = shape.page_bytes(dtype.itemsize) // shape.num_layers
        self._layers = [huge_zeros(shape.num_pages * page_bytes) for _ in range(shape.num_layers)]
        self._pages = [layer.view(shape.num_pages, page_bytes) for layer in self._layers]
        self._addresses = (ctypes.c_void_p * shape.num_layers)(*(layer.data_ptr() for layer in self._layers))
        self._pool = Pool(
            ctypes.addressof(self._addresses),
            *(shape.page_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, tile),
            shape.head_dim**-0.5 if scale is None else scale,
        )
        self.step: int = library.step_new(byref(self._pool), self.threads)
        self._free = weakref.finalize(self, library.step_free, self.step)
        self._plan: CheckedPlan | None = None
        self._arrays: tuple[object, ...] = ()

    @property
    def positions(self) -> Ints:
        """int64 [rows]: absolute positions of the step that has begun; RuntimeError if there is none."""
        if self._plan is None:
            raise RuntimeError("attend() without a successful begin()")
        return self._plan.positions

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        """Copy KV rows from page to page, in every layer. ValueError if out of range."""
        for copy in copies:
            self._check(copy.source)
            self._check(copy.target)
            if not 0 <= copy.rows <= self.page_size or copy.source == copy.target:
                raise ValueError(f"impossible copy {copy} of pages of {self.page_size} tokens")
        if copies:
            columns = np.array(copies, np.int32).T.copy()  # sources, targets, rows
            self.library.copy_rows(
                byref(self._pool),
                self.element_size,
                self._shape.num_layers,
                len(copies),
                *(column.ctypes.data for column in columns),
            )

    def wipe(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._check(page)
        if pages:
            index = torch.tensor(pages, dtype=torch.int64)
            for layer in self._pages:
                layer.index_fill_(0, index, 0)

    def read_rows(self, layer: int, slots: Tensor) -> Tensor:
        shape = self._shape
        rows = torch.empty(len(slots), 2, shape.num_kv_heads, shape.head_dim, dtype=self._dtype)
        self._move(self.library.read_rows, layer, slots, rows)
        return rows

    def write_rows(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        self._move(self.library.write_rows, layer, slots, kv.to(self._dtype).contiguous())

    def begin(self, plan: StepPlan) -> None:
        self._plan = None
        if plan.attention.align != self.align:
            raise ValueError(f"impossible plan: align {plan.attention.align}, the tile is {self.align}")
        checked = check_plan(plan, self.page_size, self.num_pages)
        levels = (*checked.shared, checked.private)
        segments = (SegmentArrays * len(levels))(*(_segments(level) for level in levels))
        positions = checked.positions.astype(np.int32)
        # The kernel reads these until the step is over.
        self._arrays = (segments, positions, checked)
        self.library.step_begin(
            self.step,
            self.element_size,
            len(positions),
            positions.ctypes.data,
            checked.write_slots.ctypes.data,
            segments,
            len(levels),
        )
        self.kv_tokens_read = _reads(checked, self.align, self.page_size)
        self._plan = checked

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = len(self.positions)
        if {q.dtype, k.dtype, v.dtype} != {self._dtype} or min(len(q), len(k), len(v)) < rows:
            raise ValueError(f"{len(q)} rows of {q.dtype} for a step of {rows} of {self._dtype}")
        out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        q, k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k, v))
        self.library.attend(
            self.step,
            self.element_size,
            layer,
            *(q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            out.data_ptr(),
        )
        return out

    def _move(self, function: ctypes._NamedFuncPointer, layer: int, slots: Tensor, rows: Tensor) -> None:
        slots = slots.to(torch.int64).contiguous()
        if not 0 <= layer < len(self._layers) or len(slots) != len(rows):
            raise ValueError(f"{len(slots)} slots and {len(rows)} rows of layer {layer}")
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self.num_pages * self.page_size:
            raise ValueError("a slot is out of the pool")
        function(byref(self._pool), self.element_size, layer, len(slots), slots.data_ptr(), rows.data_ptr())

    def _check(self, page: int) -> None:
        if not 0 < page < self.num_pages:
            raise ValueError(f"page {page} is not one of 1..{self.num_pages - 1}")


def paging_refusal(library: Library, page_size: int, tile: int, dtype: torch.dtype) -> str:
    """Why the kernel can't serve a dtype in pages and tiles of these sizes, in words; empty if it can."""
    if not library.supports(dtype):
        return f"{str(dtype).removeprefix('torch.')} is not native to this CPU"
    if page_size % 16:
        return f"pages of {page_size} tokens are not a multiple of 16"
    if tile % page_size:
        return f"tile {tile} is not a multiple of the page size {page_size}"
    return ""


def heads_refusal(heads: int, kv_heads: int, head_dim: int) -> str:
    """Why the kernel can't serve heads of this shape, in words; empty if it can."""
    if head_dim % 16 or head_dim > 256:
        return f"head_dim {head_dim} is not a multiple of 16 up to 256"
    if heads > 48 * kv_heads:
        return f"{heads // kv_heads} query heads share a KV head, and it takes up to 48"
    return ""


def _segments(level: Segments) -> SegmentArrays:
    return SegmentArrays(len(level.first), *(array.ctypes.data for array in level))


def _reads(plan: CheckedPlan, tile: int, page_size: int) -> KvReads:
    """KV tokens that a layer reads, in whole pages: a shared span once, a private one up to its last row."""
    shared = sum(int(level.tokens[level.rows > 0].sum()) for level in plan.shared)
    level = plan.private
    used = level.rows > 0
    end = plan.positions[(level.first + level.rows - 1)[used]] + 1
    return KvReads(shared, int((-(-(end - level.start[used]) // page_size) * page_size).sum()))
