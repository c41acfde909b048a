"""From the batch of one step to a CascadePlan: who shares which whole tiles of KV.

Hydragen (Juravsky et al., 2024) and ChunkAttention (Ye et al., 2024) describe attention over a shared prefix
read once for many queries; here any number of groups, and sequences that share nothing, stand in one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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
    grouped, groups = list[int](), list[Group]()
    for members, tiles in _best_groups([keys[i] for i in order]):
        groups.append(Group(len(grouped), len(grouped) + len(members), tiles))
        grouped += [order[m] for m in members]
    inside = set(grouped)
    return grouped + [i for i in range(len(spans)) if i not in inside], groups


class Branch(NamedTuple):
    """Sequences that share their first `tiles` tiles and part after them; a single one has no branches."""

    member: int
    tiles: int
    branches: tuple[int, ...]


def _best_groups(keys: list[tuple[int, ...]]) -> list[tuple[list[int], int]]:
    """The groups, as (members, tiles), that save most tile reads among sorted sequences.

    A group of k members over t tiles saves (k - 1) * t: opening it costs t, and each member then gains t.
    Going down the tree, each branch either leaves its sequences to the group opened above it or opens one
    of its own. That is exact, as what a sequence gains depends only on the group it ends up in.
    """
    tree: list[Branch] = []
    root = _branch(tree, keys, 0, len(keys))

    @cache
    def best(at: int, above: int) -> tuple[int, bool]:
        """Tile reads saved below while a group over `above` tiles is open, and whether to open another."""
        _, tiles, branches = tree[at]
        if not branches:
            return above, False
        joined = sum(best(b, above)[0] for b in branches)
        opened = sum(best(b, tiles)[0] for b in branches) - tiles if tiles > above else 0
        return max(joined, opened), opened > joined

    groups: list[tuple[list[int], int]] = []

    def collect(at: int, above: int, members: list[int]) -> None:
        member, tiles, branches = tree[at]
        if not branches and above:
            members.append(member)
        elif branches and best(at, above)[1]:
            above, members = tiles, []
            groups.append((members, tiles))
        for branch in branches:
            collect(branch, above, members)

    collect(root, 0, [])
    return groups


def _branch(tree: list[Branch], keys: list[tuple[int, ...]], first: int, end: int) -> int:
    """Append the tree of sorted sequences [first, end) to `tree`; returns the index of its top."""
    branches, tiles = list[int](), common_prefix(keys[first], keys[end - 1])
    at = first if end - first > 1 else end
    while at < end:
        stop = at + 1
        if len(keys[at]) > tiles:
            while stop < end and keys[stop][tiles] == keys[at][tiles]:
                stop += 1
        branches.append(_branch(tree, keys, at, stop))
        at = stop
    tree.append(Branch(first, tiles, tuple(branches)))
    return len(tree) - 1


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
