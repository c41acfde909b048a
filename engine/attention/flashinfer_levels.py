"""FlashInfer's wrappers, one a level: planned once a step, run once a layer, their results merged.

Partial results are merged by their log-sum-exps, which FlashInfer keeps in base 2 and fp32 (the merge is the
one of Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, over levels instead of
elements). The private level comes first: it alone is never empty for a real row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import KvShape
from engine.attention.flashinfer_graph import GraphKey, GraphLimits, shared_segments, split_items
from engine.attention.flashinfer_plan import KernelPlan, partial_bytes, split_bytes
from engine.plan import CascadeLevel, Int32

Kernel = Literal["fa2", "fa3"]

# The largest query tile. With it, and KV split over the whole chip, partial results take the most room.
_LARGEST_TILE = 128
# Work lists of a captured decode step; a wrapper's own 8 MiB for each level of each graph would add up.
_GRAPH_INT_WORKSPACE = 1 << 20


class Kernels(NamedTuple):
    """What all wrappers of an executor have in common. `split_pages` fixes where KV are cut, or is None."""

    library: Any
    shape: KvShape
    dtype: torch.dtype
    device: torch.device
    scale: float
    kernel: Kernel
    split_pages: int | None


class _Writes(NamedTuple):
    """Where each row's KV go, as int32 device arrays for the append kernel: to it, every row is a sequence
    whose one page is the page that the row is written to."""

    sequence: Tensor
    offsets: Tensor
    pages: Tensor
    indptr: Tensor
    last_page_len: Tensor


class Levels:
    """Wrappers for eager steps of any shape, or for the steps of one captured graph."""

    def __init__(
        self, kernels: Kernels, key: GraphKey | None = None, graph: GraphBuffers | None = None
    ) -> None:
        self._kernels = kernels
        self._wrappers: list[Any] = []
        self._used = 0
        self._writes: _Writes | None = None
        if key is None or graph is None:
            items = split_items(kernels.shape)
            self._workspace = _bytes(kernels, partial_bytes(items, _LARGEST_TILE, kernels.shape))
            self._static: Tensor | None = None
        else:
            self._workspace = graph.workspace
            self._static = torch.zeros(3 * key.rows, dtype=torch.int32, device=kernels.device)
            self._wrappers = [graph.wrapper(key.rows, level) for level in range(key.levels)]

    def plan(self, step: KernelPlan) -> None:
        """Plan every level and lay out the writes. ValueError where FlashInfer refuses the arrays."""
        levels = (step.private, *step.shared)
        self._make_room(levels)
        writes, indices = self._upload(step, levels)
        self._writes = self._lay_out(writes)
        self._used = len(levels)
        shape, dtype = self._kernels.shape, self._kernels.dtype
        for wrapper, level, pages in zip(self._wrappers, levels, indices, strict=False):
            wrapper.plan(
                _host(level.qo_indptr),
                _host(level.kv_indptr),
                pages,
                _host(level.last_page_len),
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                shape.page_size,
                causal=level is step.private,
                sm_scale=self._kernels.scale,
                q_data_type=dtype,
                kv_data_type=dtype,
                fixed_split_size=self._kernels.split_pages,
            )

    def write(self, cache: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the planned rows' k and v [rows, kv_heads, head_dim] to cache, one layer's pages."""
        if self._writes is None:
            raise RuntimeError("write() without a successful plan()")
        to = self._writes
        self._kernels.library.append_paged_kv_cache(
            k, v, to.sequence, to.offsets, cache, to.pages, to.indptr, to.last_page_len, kv_layout="NHD"
        )

    def run(self, q: Tensor, cache: Tensor, out: Tensor) -> None:
        """Attend: q [rows, heads, head_dim] to out, of the same shape and contiguous."""
        private, *shared = self._wrappers[: self._used]
        if not shared:
            private.run(q, cache, out=out)
            return
        lse_log2 = q.new_empty(q.shape[:2], dtype=torch.float32)
        private.run(q, cache, out=out, lse=lse_log2, return_lse=True)
        part, part_lse_log2 = torch.empty_like(out), torch.empty_like(lse_log2)
        for wrapper in shared:
            wrapper.run(q, cache, out=part, lse=part_lse_log2, return_lse=True)
            self._kernels.library.merge_state_in_place(out, lse_log2, part, part_lse_log2)

    def _make_room(self, levels: Sequence[CascadeLevel]) -> None:
        """Have a wrapper for each level, and a workspace for fixed splits, whose number is not bounded."""
        kernels = self._kernels
        if kernels.split_pages is not None:
            needed = max(split_bytes(level, kernels.split_pages, kernels.shape) for level in levels)
            if needed > self._workspace.numel():
                self._wrappers.clear()
                self._workspace = _bytes(kernels, needed + needed // 4)
        while len(self._wrappers) < len(levels):
            self._wrappers.append(
                kernels.library.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspace, "NHD", backend=kernels.kernel
                )
            )

    def _upload(self, step: KernelPlan, levels: Sequence[CascadeLevel]) -> tuple[Tensor, list[Tensor]]:
        """One copy to the device: (write arrays [3 * rows], page indices of each level)."""
        writes = (step.write_pages, step.write_offsets, step.write_offsets + 1)
        arrays = (*writes, *(level.kv_indices for level in levels))
        on_device = _host(np.concatenate(arrays)).to(self._kernels.device)
        sizes = [3 * step.rows, *(len(level.kv_indices) for level in levels)]
        head, *indices = torch.split(on_device, sizes)
        return head, indices

    def _lay_out(self, writes: Tensor) -> _Writes:
        if self._static is not None:
            # A captured graph reads these addresses.
            writes = self._static.copy_(writes)
            if self._writes is not None:
                return self._writes
        pages, offsets, last = writes.chunk(3)
        indptr = torch.arange(len(pages) + 1, dtype=torch.int32, device=writes.device)
        return _Writes(indptr[:-1], offsets, pages, indptr, last)


class GraphBuffers:
    """What the graphs of one executor share. One step runs at a time, and each plans before it runs, so all
    graphs may use the same workspaces and index buffers."""

    def __init__(self, kernels: Kernels, limits: GraphLimits) -> None:
        self.workspace = _bytes(kernels, limits.workspace(kernels.shape))
        self._kernels = kernels
        self._indices = limits.indices
        self._levels: list[tuple[Tensor, Tensor]] = []

    def wrapper(self, rows: int, level: int) -> Any:
        """A wrapper for level `level` (0 the private one) of a step of so many rows."""
        while len(self._levels) <= level:
            self._levels.append((self._int32(self._indices), _bytes(self._kernels, _GRAPH_INT_WORKSPACE)))
        indices, int_workspace = self._levels[level]
        segments = shared_segments(rows) if level else rows
        wrapper = self._kernels.library.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=self._int32(segments + 1),
            paged_kv_indptr_buf=self._int32(segments + 1),
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=self._int32(segments),
            backend=self._kernels.kernel,
        )
        wrapper.reset_workspace_buffer(self.workspace, int_workspace)
        return wrapper

    def _int32(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._kernels.device)


def _bytes(kernels: Kernels, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=kernels.device)


def _host(array: Int32) -> Tensor:
    """A tensor of its own: plans are immutable, and torch warns of arrays that it may not write to."""
    return torch.from_numpy(array.copy())
