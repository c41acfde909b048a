"""Attention in torch on the CPU: flash attention over absolute tiles, partial states merged in order.

Promise: a row's result does not depend, to the bit, on what runs beside it, on how its sequence was
chunked, or on which tiles it shares. Three rules give that. A pair (row, tile) always takes the same
path (see tiles.py). Query rows are padded to a multiple at which flash attention's rows do not depend
on each other. The merge adds in ascending tile order, by a multiplication and an addition that are
each rounded: a fused multiply-add would round differently in vector bodies and tails.

The merge of partial states by their log-sum-exps is the one of Milakov and Gimelshein, "Online
normalizer calculation for softmax" (2018), over tiles instead of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.base import KvReads, KvShape
from engine.attention.checks import check_plan
from engine.attention.memory import KvMemory
from engine.attention.tiles import Geometry, MergeBlock, TileCall, cut
from engine.plan import RowCopy, StepPlan

# Bytes that one call gathers and gives: large enough for few calls, small enough for the L2 caches.
_CALL_BYTES = 2 << 20
# Partial states (of all heads of a row) that one merge holds in fp32.
_MERGE_STATES = 1024


class _Call(NamedTuple):
    """A TileCall as tensors; mask is additive, [items, 1, width, tile]."""

    items: int
    width: int
    kv_pages: Tensor
    queries: Tensor
    mask: Tensor | None


class _Block(NamedTuple):
    """A MergeBlock as tensors."""

    first: int
    rows: int
    padded_tiles: int
    tile_rows: tuple[int, ...]
    states: Tensor
    lse: Tensor
    weights: Tensor


class _Step(NamedTuple):
    rows: int
    slots: Tensor
    calls: tuple[_Call, ...]
    blocks: tuple[_Block, ...]
    unrank: Tensor


class CpuAttention:
    """The torch executor; see AttentionBackend.

    `tile` tokens are reduced at a time, cut at absolute multiples; a multiple of the page size.
    `row_multiple` may be raised between steps. `scale` defaults to 1 / sqrt(head_dim).
    """

    name = "torch"

    def __init__(
        self,
        shape: KvShape,
        dtype: torch.dtype,
        tile: int = 256,
        row_multiple: int = 4,
        scale: float | None = None,
    ) -> None:
        if tile % shape.page_size:
            raise ValueError(f"tile {tile} is not a multiple of the page size {shape.page_size}")
        self.page_size = shape.page_size
        self.num_pages = shape.num_pages
        self.align = tile
        self.row_multiple = row_multiple
        self.kv_tokens_read = KvReads()
        self._shape = shape
        self._dtype = dtype
        self._group = shape.num_heads // shape.num_kv_heads
        self._scale = shape.head_dim**-0.5 if scale is None else scale
        self.memory = KvMemory(shape, dtype)
        # Row p hides what lies behind slot p of a tile.
        self._masks = torch.full((tile, tile), float("-inf"), dtype=dtype).triu_(1)
        self._absent = torch.full((1, shape.num_kv_heads), float("-inf"))
        self._step: _Step | None = None

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        self.memory.copy_rows(copies)

    def wipe(self, pages: Sequence[int]) -> None:
        self.memory.wipe(pages)

    def read_rows(self, layer: int, slots: Tensor) -> Tensor:
        return self.memory.read_rows(layer, slots)

    def write_rows(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        self.memory.write_rows(layer, slots, kv)

    def begin(self, plan: StepPlan) -> None:
        self._step = None
        if plan.attention.align != self.align:
            raise ValueError(f"impossible plan: align {plan.attention.align}, the tile is {self.align}")
        checked = check_plan(plan, self.page_size, self.num_pages)
        work = cut(checked, self._geometry())
        self.kv_tokens_read = work.reads
        self._step = _Step(
            work.rows,
            torch.from_numpy(checked.write_slots),
            tuple(self._call(call) for call in work.calls),
            tuple(_block(block) for block in work.blocks),
            torch.from_numpy(work.unrank),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step, shape, group = self._step, self._shape, self._group
        if step is None:
            raise RuntimeError("attend() without a successful begin()")
        rows = step.rows
        self.memory.write(layer, step.slots, k[:rows], v[:rows])
        by_group = q[:rows].view(rows, shape.num_kv_heads, group, shape.head_dim).transpose(1, 2)
        packed = by_group.reshape(rows * group, -1)
        states, lses = zip(*(self._attend_tiles(layer, call, packed) for call in step.calls), strict=True)
        merged = _merge(step, torch.cat(states), torch.cat((*lses, self._absent)), group)
        out = q.new_zeros(q.shape)
        by_row = merged.index_select(0, step.unrank).view(rows, group, shape.num_kv_heads, -1)
        out[:rows].view(rows, shape.num_kv_heads, group, -1).copy_(by_row.transpose(1, 2))
        return out.view(q.shape[0], -1)

    def _attend_tiles(self, layer: int, call: _Call, packed: Tensor) -> tuple[Tensor, Tensor]:
        """One call: (outputs [items * width, kv_heads * head_dim], natural-log LSE [.., kv_heads])."""
        shape = self._shape
        kv = self.memory.pages[layer].index_select(0, call.kv_pages)
        kv = kv.view(call.items, self.align, 2, shape.num_kv_heads, shape.head_dim)
        q = packed.index_select(0, call.queries).view(-1, call.width, shape.num_kv_heads, shape.head_dim)
        out, natural_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.expand(call.items, -1, -1, -1).transpose(1, 2),
            kv[:, :, 0].transpose(1, 2),
            kv[:, :, 1].transpose(1, 2),
            0.0,
            False,
            attn_mask=call.mask,
            scale=self._scale,
        )
        out = out.transpose(1, 2).reshape(-1, packed.shape[1])
        return out, natural_lse.transpose(1, 2).reshape(-1, shape.num_kv_heads)

    def _geometry(self) -> Geometry:
        shape = self._shape
        return Geometry(
            tile=self.align,
            page_size=shape.page_size,
            group=self._group,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            element_size=self._dtype.itemsize,
            row_multiple=self.row_multiple,
            call_bytes=_CALL_BYTES,
            merge_states=_MERGE_STATES,
        )

    def _call(self, call: TileCall) -> _Call:
        mask = None
        if call.mask_rows is not None:
            mask = self._masks.index_select(0, torch.from_numpy(call.mask_rows))
            mask = mask.view(call.items, 1, call.width, self.align)
        return _Call(
            call.items, call.width, torch.from_numpy(call.kv_pages), torch.from_numpy(call.queries), mask
        )


def _block(block: MergeBlock) -> _Block:
    return _Block(*block[:4], *(torch.from_numpy(array) for array in block[4:]))


def _merge(step: _Step, states: Tensor, lses: Tensor, group: int) -> Tensor:
    """Merge partial states into rows, in rank order: [rows, group * kv_heads * head_dim].

    states [n, kv_heads * head_dim] in the model's dtype, lses fp32 [n + 1, kv_heads], the last one that
    of an empty state. fp32, or the model's dtype where every row has a single tile.
    """
    merged = [_merge_block(block, states, lses, group) for block in step.blocks]
    return merged[0] if len(merged) == 1 else torch.cat(merged)


def _merge_block(block: _Block, states: Tensor, lses: Tensor, group: int) -> Tensor:
    parts = states.index_select(0, block.states).view(len(block.weights), group * lses.shape[1], -1)
    if len(block.tile_rows) == 1:
        return parts.view(block.rows, -1)  # a single state has weight one, exactly
    lse = lses.index_select(0, block.lse).view(block.rows, block.padded_tiles, -1)
    weights = merge_weights(lse.transpose(1, 2))
    by_tile = weights.permute(2, 0, 1).reshape(block.padded_tiles * block.rows, -1)
    weighted = parts * by_tile.index_select(0, block.weights).unsqueeze(-1)
    merged = weighted[: block.rows]
    at = block.rows
    for rows in block.tile_rows[1:]:
        merged[:rows] += weighted[at : at + rows]
        at += rows
    return merged.view(block.rows, -1)


def merge_weights(natural_lse: Tensor) -> Tensor:
    """What each partial state counts for: a softmax over the last dimension, its tiles.

    natural_lse fp32 [..., tiles], the number of tiles a multiple of 16 so that bits don't depend on it;
    -inf is an empty state. States that are all empty merge to an empty one: their weights are zero.
    """
    natural_lse = natural_lse.contiguous()
    weights = torch.softmax(natural_lse, -1)
    return weights.masked_fill_(natural_lse == float("-inf"), 0.0)
