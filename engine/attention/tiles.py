"""From a checked plan to calls over tiles, and to the merge of their partial states. Numpy only.

Every pair (row, tile) takes exactly one path, whatever runs beside it: a tile wholly before the row's
own is read unmasked, the row's own tile is always masked. A tile is cut at absolute multiples of its
size and a short one is padded with the zero page. So grouping, batching and chunking change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.attention.base import KvReads
from engine.attention.checks import CheckedPlan, Ints, ragged

# Waste, in products of query row x key x head_dim, that is worth one more call a layer.
_CALL_COST = 1_000_000
# A softmax over a multiple of this many tiles adds exact zeros lane by lane.
_LANES = 16


class Geometry(NamedTuple):
    """What the cutting depends on. `group` is the number of query heads that share a KV head."""

    tile: int
    page_size: int
    group: int
    kv_heads: int
    head_dim: int
    element_size: int
    row_multiple: int
    call_bytes: int
    merge_states: int


class Items(NamedTuple):
    """Pieces of work: item i lets rows [first[i], first[i] + rows[i]) attend to absolute tile `tile[i]`,
    whose KV are page_count[i] pages of `pages`, from page_first[i]. All int64."""

    first: Ints
    rows: Ints
    tile: Ints
    page_first: Ints
    page_count: Ints


class TileCall(NamedTuple):
    """One attention call over `items` tiles of `width` packed query rows each.

    kv_pages [items * pages_per_tile], padded with page 0. queries [items * width] index the packed query
    rows (row * group + head within the group); padding repeats the item's last one; [width] where all
    items have the same rows. mask_rows [items * width] is the last visible slot of the tile, or None for
    an unmasked call.
    """

    items: int
    width: int
    kv_pages: Ints
    queries: Ints
    mask_rows: Ints | None


class MergeBlock(NamedTuple):
    """Rows whose partial states are merged together; ranks [first, first + rows) of the merge order.

    `states` [pairs * group] are positions in the calls' concatenated outputs, tile by tile in ascending
    order, within a tile by rank. `tile_rows[j]` is how many rows have tile j: the first ones of the
    block. `lse` [rows * padded_tiles * group] are positions of log-sum-exps, an absent tile being one
    position past the end. `weights` [pairs] index [padded_tiles * rows].
    """

    first: int
    rows: int
    padded_tiles: int
    tile_rows: tuple[int, ...]
    states: Ints
    lse: Ints
    weights: Ints


class Work(NamedTuple):
    """A step's calls and merges; `unrank[r]` is row r's place in the merge order."""

    rows: int
    calls: tuple[TileCall, ...]
    blocks: tuple[MergeBlock, ...]
    unrank: Ints
    reads: KvReads


def cut(plan: CheckedPlan, geometry: Geometry) -> Work:
    """Cut a step into calls and merges."""
    pages = np.concatenate([level.pages for level in (*plan.shared, plan.private)])
    before, diagonal, shared_pages = _items(plan, geometry)
    calls: list[TileCall] = []
    base_slot = 0
    per_row = plan.positions // geometry.tile + 1
    order = np.argsort(-per_row, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    table = np.full((len(order), int(per_row.max(initial=0))), -1, np.int64)
    for items, masked in ((before, False), (diagonal, True)):
        for chosen, width in _buckets(items, geometry):
            calls.append(_call(chosen, width, pages, plan.positions if masked else None, geometry))
            owner, offset = ragged(chosen.rows)
            table[rank[chosen.first[owner] + offset], chosen.tile[owner]] = (
                base_slot + owner * width + offset * geometry.group
            )
            base_slot += len(chosen.rows) * width
    blocks = tuple(_merge_blocks(table, per_row[order], base_slot, geometry))
    all_pages = int(before.page_count.sum() + diagonal.page_count.sum())
    reads = KvReads(shared_pages * geometry.page_size, (all_pages - shared_pages) * geometry.page_size)
    return Work(len(order), tuple(calls), blocks, rank, reads)


def _items(plan: CheckedPlan, geometry: Geometry) -> tuple[Items, Items, int]:
    """(items before the row's own tile, items of the row's own tile, pages read by shared segments)."""
    tile, per_tile = geometry.tile, geometry.tile // geometry.page_size
    before = []
    page_base = 0
    for level in plan.shared:
        owner, k = ragged(np.where(level.rows > 0, level.tokens // tile, 0))
        before.append(
            Items(
                level.first[owner],
                level.rows[owner],
                level.start[owner] // tile + k,
                page_base + level.page_indptr[owner] + k * per_tile,
                np.full(len(owner), per_tile, np.int64),
            )
        )
        page_base += len(level.pages)
    shared_pages = per_tile * sum(len(items.rows) for items in before)

    level = plan.private
    used = level.rows > 0
    at = np.zeros_like(level.first)
    at[used] = plan.positions[level.first[used]]
    first_tile = level.start // tile
    owner, k = ragged(np.where(used, (at + level.rows - 1) // tile - first_tile + 1, 0))
    number = first_tile[owner] + k
    page_first = level.page_indptr[owner] + k * per_tile
    page_count = np.minimum(per_tile, level.page_indptr[owner + 1] - page_first)
    # Of the sequence's rows, [own, later) stand in this tile and [later, rows) behind it.
    own = np.clip(number * tile - at[owner], 0, level.rows[owner])
    later = np.clip((number + 1) * tile - at[owner], 0, level.rows[owner])
    every = Items(
        level.first[owner] + later, level.rows[owner] - later, number, page_base + page_first, page_count
    )
    before.append(_select(every, every.rows > 0))
    every = every._replace(first=level.first[owner] + own, rows=later - own)
    diagonal = _select(every, every.rows > 0)
    return Items(*(np.concatenate(parts) for parts in zip(*before, strict=True))), diagonal, shared_pages


def _select(items: Items, which: npt.NDArray[np.bool_] | Ints) -> Items:
    return Items(*(field[which] for field in items))


def _buckets(items: Items, geometry: Geometry) -> Iterator[tuple[Items, int]]:
    """Group items of like width into calls of bounded size: (items, packed query rows of each)."""
    multiple = geometry.row_multiple
    widths = -(-items.rows * geometry.group // multiple) * multiple
    product = geometry.kv_heads * geometry.tile * geometry.head_dim
    sizes, counts = np.unique(widths, return_counts=True)
    while len(sizes):
        width = int(sizes[-1])
        # Smaller items join while padding them up costs less than a call of their own.
        joined = (width - sizes) * counts * product < _CALL_COST
        keep = len(sizes) - int(np.argmin(np.append(joined[::-1], False)))
        chosen = np.flatnonzero((widths >= sizes[keep]) & (widths <= width))
        sizes, counts = sizes[:keep], counts[:keep]
        token = 2 * geometry.kv_heads * geometry.head_dim * geometry.element_size
        limit = max(1, geometry.call_bytes // ((geometry.tile + width) * token))
        for at in range(0, len(chosen), limit):
            # A call of one item and one head is not split over threads: its matrix products then are,
            # and round differently. So it is made twice as large.
            alone = geometry.kv_heads * len(chosen[at : at + limit]) == 1
            yield _select(items, chosen[at : at + limit].repeat(2 if alone else 1)), width


def _call(items: Items, width: int, pages: Ints, positions: Ints | None, geometry: Geometry) -> TileCall:
    per_tile = geometry.tile // geometry.page_size
    k = np.arange(per_tile)
    present = k < items.page_count[:, None]
    place = np.where(present, items.page_first[:, None] + k, 0)
    kv_pages = np.where(present, pages[place], 0)
    packed = np.minimum(np.arange(width), items.rows[:, None] * geometry.group - 1)
    queries = (items.first[:, None] * geometry.group + packed).ravel()
    mask_rows = None if positions is None else positions[queries // geometry.group] % geometry.tile
    if np.all(items.first == items.first[0]) and np.all(items.rows == items.rows[0]):
        queries = queries[:width]
    return TileCall(len(items.rows), width, kv_pages.ravel(), queries, mask_rows)


def _merge_blocks(table: Ints, tiles: Ints, absent: int, geometry: Geometry) -> Iterator[MergeBlock]:
    """Cut the ranked rows (most tiles first) into blocks of bounded size. `table` [rows, tiles] says in
    which packed query row of the calls' outputs the state of (rank, tile) begins; -1 where there is none."""
    heads = np.arange(geometry.group)
    first = 0
    while first < len(table):
        count = int(tiles[first])
        rows = min(len(table) - first, max(1, geometry.merge_states // count))
        part = table[first : first + rows, :count].T
        present = part >= 0
        tile_rows = present.sum(1)
        states = part[present][:, None] + heads
        padded = -(-count // _LANES) * _LANES
        lse = np.full((rows, padded, geometry.group), absent, np.int64)
        lse[:, :count][present.T] = part.T[present.T][:, None] + heads
        yield MergeBlock(
            first,
            rows,
            padded,
            tuple(tile_rows.tolist()),
            states.ravel(),
            lse.ravel(),
            np.flatnonzero(present),
        )
        first += rows
