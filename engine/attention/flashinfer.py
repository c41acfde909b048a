"""Attention on NVIDIA GPUs by FlashInfer: paged KV, one prefill wrapper a level, merged by log-sum-exp.

Flat and grouped results are equal within a tolerance. `deterministic` runs every row as a decode row, with
KV cut at fixed places: then a flat plan gives a row the same bits whatever runs beside it and however its
sequence was chunked (a cascade on top of it is again only equal within the tolerance).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import KvReads, KvShape
from engine.attention.flashinfer_graph import GraphKey, GraphLimits, padded
from engine.attention.flashinfer_levels import GraphBuffers, Kernel, Kernels, Levels
from engine.attention.flashinfer_library import load_flashinfer
from engine.attention.flashinfer_plan import kernel_plan
from engine.errors import ConfigError
from engine.plan import RowCopy, StepPlan

# Merging launches head_dim / 8 threads for each head in one block.
_BLOCK_THREADS = 1024
_HEAD_DIMS = (64, 128, 256)
# KV tokens between fixed cuts: enough parallel work in a long context, few partial results in a short one.
_SPLIT_TOKENS = 4096


class FlashInferAttention:
    """The CUDA executor; see AttentionBackend.

    `dtype` is float16 or bfloat16. Steps that `graphs` allows are planned in the fixed shapes of a graph:
    `graph_key` then says which. Raises ConfigError for a shape that the kernels can't run, or without the
    package.
    """

    name = "flashinfer"

    def __init__(
        self,
        shape: KvShape,
        dtype: torch.dtype,
        *,
        device: torch.device | str = "cuda",
        deterministic: bool = False,
        graphs: GraphLimits | None = None,
        tile: int = 256,
        kernel: Kernel = "fa2",
        scale: float | None = None,
    ) -> None:
        """`tile` tokens, a multiple of the page size, divide the fixed cuts of `deterministic`, which
        excludes graphs. fa2, not fa3: that one neither splits a long shared span over the chip nor packs
        the query heads of a KV head."""
        _check_shape(shape, dtype)
        if tile % shape.page_size:
            raise ValueError(f"tile {tile} is not a multiple of the page size {shape.page_size}")
        self.page_size = self.align = shape.page_size
        self.num_pages = shape.num_pages
        self.row_multiple = 1
        self.kv_tokens_read = KvReads()
        self.graph_key: GraphKey | None = None
        self._shape, self._dtype, self._deterministic = shape, dtype, deterministic
        split = -(-_SPLIT_TOKENS // tile) * tile // shape.page_size if deterministic else None
        scale = shape.head_dim**-0.5 if scale is None else scale
        device = torch.device(device)
        self._kernels = Kernels(load_flashinfer(), shape, dtype, device, scale, kernel, split)
        # One page more than the pool knows of: the scratch page of a graph's padding rows.
        self._scratch_page = shape.num_pages
        size = (shape.num_layers, shape.num_pages + 1, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self._memory = torch.zeros(size, dtype=dtype, device=device)
        self._eager = Levels(self._kernels)
        self._limits = graphs if graphs and not deterministic else GraphLimits(0, 0)
        self._buffers: GraphBuffers | None = None
        self._graphs: dict[GraphKey, Levels] = {}
        self._current: Levels | None = None
        self._rows = self._own_rows = 0

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        for copy in copies:
            self._check_page(copy.source)
            self._check_page(copy.target)
            if not 0 <= copy.rows <= self.page_size or copy.source == copy.target:
                raise ValueError(f"impossible copy {copy} of pages of {self.page_size} tokens")
            self._memory[:, copy.target, :, : copy.rows] = self._memory[:, copy.source, :, : copy.rows]

    def wipe(self, pages: Sequence[int]) -> None:
        if not pages:
            return
        for page in pages:
            self._check_page(page)
        self._memory.index_fill_(1, torch.tensor(pages, dtype=torch.int64, device=self._memory.device), 0)

    def read_rows(self, layer: int, slots: Tensor) -> Tensor:
        """See AttentionBackend; the result lies on the device."""
        pages, offsets = self._places(slots)
        return self._memory[layer][pages, :, offsets]

    def write_rows(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        pages, offsets = self._places(slots)
        self._memory[layer][pages, :, offsets] = kv.to(self._memory)

    def begin(self, plan: StepPlan) -> None:
        self._current, self.graph_key = None, None
        step = kernel_plan(plan, self.page_size, self.num_pages, rows_alone=self._deterministic)
        key = self._limits.key(step)
        levels = self._eager if key is None else self._graph(key)
        if key is not None:
            step = padded(step, key, self._scratch_page)
        levels.plan(step)
        self.kv_tokens_read = step.reads
        self._current, self.graph_key = levels, key
        self._rows, self._own_rows = step.rows, plan.rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        levels, rows = self._current, self._rows
        if levels is None:
            raise RuntimeError("attend() without a successful begin()")
        self._check_rows(q, k, v)
        given = q.shape[0]
        if given < rows:  # a step in a graph's shapes that is run without one
            q, k, v = (functional.pad(x, (0, 0, 0, 0, 0, rows - given)) for x in (q, k, v))
        cache = self._memory[layer]
        levels.write(cache, k[:rows], v[:rows])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out[rows:] = 0
        levels.run(q[:rows], cache, out[:rows])
        return out[:given].view(given, -1)

    def _graph(self, key: GraphKey) -> Levels:
        if key not in self._graphs:
            if self._buffers is None:
                self._buffers = GraphBuffers(self._kernels, self._limits)
            self._graphs[key] = Levels(self._kernels, key, self._buffers)
        return self._graphs[key]

    def _check_rows(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The append kernel reads keys as the cache's type, whatever they are."""
        shape = self._shape
        for name, x, heads in (
            ("q", q, shape.num_heads),
            ("k", k, shape.num_kv_heads),
            ("v", v, shape.num_kv_heads),
        ):
            if x.dtype != self._dtype or x.shape != (q.shape[0], heads, shape.head_dim):
                raise ValueError(
                    f"{name} is {x.dtype} {tuple(x.shape)}, not {self._dtype}"
                    f" {(q.shape[0], heads, shape.head_dim)}"
                )
        if q.shape[0] < self._own_rows:
            raise ValueError(f"{q.shape[0]} rows were given, and the step has {self._own_rows}")

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        slots = slots.to(self._memory.device)
        return slots // self.page_size, slots % self.page_size

    def _check_page(self, page: int) -> None:
        if not 0 < page < self.num_pages:
            raise ValueError(f"page {page} is not one of 1..{self.num_pages - 1}")


def _check_shape(shape: KvShape, dtype: torch.dtype) -> None:
    if dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(f"the flashinfer executor runs float16 and bfloat16, not {dtype}")
    if shape.head_dim not in _HEAD_DIMS:
        raise ConfigError(f"the flashinfer executor runs head_dim {_HEAD_DIMS}, not {shape.head_dim}")
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(f"{shape.num_heads} query heads are no multiple of {shape.num_kv_heads} KV heads")
    most = _BLOCK_THREADS // (shape.head_dim // 8)
    if shape.num_heads > most:
        raise ConfigError(
            f"the flashinfer executor merges at most {most} heads of head_dim {shape.head_dim}, and the"
            f" model has {shape.num_heads}"
        )
