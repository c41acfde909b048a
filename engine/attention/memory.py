"""Paged KV memory: one slot-major tensor a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.base import KvShape
from engine.kernels.library import huge_zeros
from engine.plan import RowCopy


class KvMemory:
    """Keys and values of every page, zeroed at start. Page 0 is the zero page that pads short tiles.

    `layers[l]` is [num_pages * page_size, 2, kv_heads, head_dim]: the key, then the value of a token,
    so that a page is one contiguous run and gathers as one.
    """

    def __init__(self, shape: KvShape, dtype: torch.dtype) -> None:
        self.shape = shape
        size = (shape.num_pages * shape.page_size, 2, shape.num_kv_heads, shape.head_dim)
        count = math.prod(size) * dtype.itemsize
        self.layers = [huge_zeros(count).view(dtype).view(size) for _ in range(shape.num_layers)]
        self.pages = [layer.view(shape.num_pages, -1) for layer in self.layers]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write rows: slots int64 [rows], k and v [rows, kv_heads, head_dim]."""
        self.layers[layer].index_copy_(0, slots, torch.stack((k, v), 1).to(self.layers[layer].dtype))

    def read_rows(self, layer: int, slots: Tensor) -> Tensor:
        """Rows at slots int64 [n]: [n, 2, kv_heads, head_dim]."""
        return self.layers[layer].index_select(0, slots)

    def write_rows(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """The inverse of read_rows."""
        self.layers[layer].index_copy_(0, slots, kv.to(self.layers[layer].dtype))

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        """Copy rows [0, rows) of a page to another, in every layer. ValueError if out of range."""
        size = self.shape.page_size
        for copy in copies:
            self._check(copy.source)
            self._check(copy.target)
            if not 0 <= copy.rows <= size or copy.source == copy.target:
                raise ValueError(f"impossible copy {copy} of pages of {size} tokens")
            source, target = copy.source * size, copy.target * size
            for layer in self.layers:
                layer[target : target + copy.rows] = layer[source : source + copy.rows]

    def wipe(self, pages: Sequence[int]) -> None:
        """Zero whole pages in every layer."""
        if not pages:
            return
        for page in pages:
            self._check(page)
        index = torch.tensor(pages, dtype=torch.int64)
        for layer in self.pages:
            layer.index_fill_(0, index, 0)

    def _check(self, page: int) -> None:
        if not 0 < page < self.shape.num_pages:
            raise ValueError(f"page {page} is not one of 1..{self.shape.num_pages - 1}")
