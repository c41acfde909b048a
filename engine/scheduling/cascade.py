"""From the batch of one step to a CascadePlan: who shares which whole tiles of KV.

Hydragen (Juravsky et al., 2024) and ChunkAttention (Ye et al., 2024) describe attention over a shared prefix
read once for many queries; here any number of groups, and sequences that share nothing, stand in one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from engine.cache.node import common_prefix
from engine.plan import CascadeLevel, CascadePlan, Int32

CascadeMode = Literal["off", "auto", "force"]


class Span(NamedTuple):
    """The rows of one sequence in a step: tokens [start, start + rows), over the pages of `table`."""

    table: Sequence[int]
    start: int
    rows: int


class Group(NamedTuple):
    """Members (positions in the sorted list) [first, end) share their first `tiles` tiles."""

    first: int
    end: int
    tiles: int


def plan_cascade(
    spans: Sequence[Span], page_size: int, align: int, mode: CascadeMode
) -> tuple[list[int], CascadePlan]:
    """Order the sequences and cut their KV into a shared and a private level.

    Returns the order (indices into `spans`: rows of the step follow it) and the plan. Groups come first, in
    depth-first order of the batch's tree, then the sequences that share nothing, in one empty segment. A
    sequence shares only tiles that end at or before its first row.
    """
    groups: list[Group] = []
    order = list(range(len(spans)))
    if mode != "off" and len(spans) > 1:
        order, groups = _group(spans, page_size, align)
    kv_start = np.zeros(len(spans), np.int32)
    for group in groups:
        kv_start[group.first : group.end] = group.tiles * align
    ordered = [spans[i] for i in order]
    rows = _indptr([s.rows for s in ordered])
    last = _private_level(ordered, rows, kv_start, page_size)
    levels = (_shared_level(ordered, groups, rows, page_size, align), last) if groups else (last,)
    positions = np.concatenate([np.arange(s.start, s.start + s.rows, dtype=np.int32) for s in ordered])
    grouped = sum(int(rows[g.end] - rows[g.first]) for g in groups)
    return order, CascadePlan(align, levels, kv_start, positions, len(groups), grouped)


def _group(spans: Sequence[Span], page_size: int, align: int) -> tuple[list[int], list[Group]]:
    """Sort by shared tiles and choose the groups that save most tile reads.

    A page stands under exactly one prefix, so the last page of a tile names the tile and all before it.
    """
    step = align // page_size
    keys = [tuple(s.table[step - 1 : s.start // align * step : step]) for s in spans]
    order = sorted(range(len(spans)), key=lambda i: (keys[i], i))
    chosen = _best_groups([keys[i] for i in order], 0, len(order))[1]
    grouped = [order[i] for g in chosen for i in range(g.first, g.end)]
    inside = set(grouped)
    groups, at = [], 0
    for group in chosen:
        size = group.end - group.first
        groups.append(Group(at, at + size, group.tiles))
        at += size
    return grouped + [i for i in range(len(spans)) if i not in inside], groups


def _best_groups(keys: list[tuple[int, ...]], first: int, end: int) -> tuple[int, list[Group]]:
    """Tile reads saved, and the groups that save them, among sorted sequences [first, end).

    Either the whole range is one group over what all of it shares, or its branches are better alone.
    """
    if end - first < 2:
        return 0, []
    shared = common_prefix(keys[first], keys[end - 1])
    saved, groups = 0, list[Group]()
    at = first
    while at < end:
        stop = at + 1
        if len(keys[at]) > shared:
            while stop < end and len(keys[stop]) > shared and keys[stop][shared] == keys[at][shared]:
                stop += 1
        if stop - at < end - first:
            branch = _best_groups(keys, at, stop)
            saved += branch[0]
            groups += branch[1]
        at = stop
    whole = (end - first - 1) * shared
    if whole and whole >= saved:
        return whole, [Group(first, end, shared)]
    return saved, groups


def _shared_level(
    spans: list[Span], groups: list[Group], rows: Int32, page_size: int, align: int
) -> CascadeLevel:
    pages = [spans[g.first].table[: g.tiles * align // page_size] for g in groups]
    qo = [int(rows[g.first]) for g in groups] + [int(rows[groups[-1].end])]
    last = [page_size] * len(groups)
    if groups[-1].end < len(spans):
        pages.append([])
        qo.append(int(rows[-1]))
        last.append(0)
    return CascadeLevel(np.array(qo, np.int32), _indptr([len(p) for p in pages]), _flat(pages), _int32(last))


def _private_level(spans: list[Span], rows: Int32, kv_start: Int32, page_size: int) -> CascadeLevel:
    pages, last = [], []
    for span, start in zip(spans, kv_start.tolist(), strict=True):
        end = span.start + span.rows
        pages.append(span.table[start // page_size : -(-end // page_size)])
        last.append((end - start - 1) % page_size + 1 if end > start else 0)
    return CascadeLevel(rows, _indptr([len(p) for p in pages]), _flat(pages), _int32(last))


def _indptr(counts: Sequence[int]) -> Int32:
    out = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=out[1:])
    return out


def _flat(pages: Sequence[Sequence[int]]) -> Int32:
    return np.array([p for run in pages for p in run], np.int32)


def _int32(values: Sequence[int]) -> Int32:
    return np.array(values, np.int32)
