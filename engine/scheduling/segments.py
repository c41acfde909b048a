"""From chosen prefixes to the arrays of a CascadePlan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.plan import CascadeLevel, Int32, Int64
from engine.scheduling.folding import FROM_START, NOT_OPENED
from engine.scheduling.sharing import Sharing, flatten


class Forest(NamedTuple):
    """The shared segments, and the order of the sequences that makes each of them one run.

    Segment s spans tiles [begin[s], end[s]) of sequences [first[s], stop[s]) of `order`, in level[s]; it
    stands for node[s] of the tree. The first `members` sequences stand in one at least, and `reach[i]` is
    how many tiles of sequence order[i] are shared; `tiles` is the length of all segments together.
    """

    order: list[int]
    members: int
    reach: Int64
    node: Int64
    level: Int64
    first: Int64
    stop: Int64
    begin: Int64
    end: Int64
    tiles: int


def arrange(tree: Sharing, chosen: Int64) -> Forest:
    """Put the opened nodes into levels and the sequences into depth-first order.

    A segment stands as many levels above the private one as there are segments in the longest chain from
    it down, and the longest chains come first, so that those without one in a level are neighbours.
    """
    opened = np.flatnonzero(chosen != NOT_OPENED).tolist()
    above = chosen.tolist()
    at = _attached(tree, above)
    members: dict[int, list[int]] = {v: [] for v in opened}
    members[FROM_START] = []
    for i, v in enumerate(at):
        members[v].append(i)
    children: dict[int, list[int]] = {v: [] for v in members}
    height, earliest = dict.fromkeys(members, 1), {v: m[0] if m else len(at) for v, m in members.items()}
    for v in reversed(opened):  # nodes below come first
        up = above[v]
        children[up].append(v)
        height[up] = max(height[up], height[v] + 1)
        earliest[up] = min(earliest[up], earliest[v])
    order, first, stop = _walk(members, children, height, earliest)
    levels = height[FROM_START] - 1
    node = np.array(opened)
    begins = np.array([above[v] for v in opened])
    begin = np.where(begins >= 0, tree.tiles[begins], 0)
    end = tree.tiles[node]
    owner = np.array(at)[order]
    return Forest(
        order,
        members=len(at) - len(members[FROM_START]),
        reach=np.where(owner >= 0, tree.tiles[owner], 0),
        node=node,
        level=np.array([levels - height[v] for v in opened]),
        first=np.array([first[v] for v in opened]),
        stop=np.array([stop[v] for v in opened]),
        begin=begin,
        end=end,
        tiles=int((end - begin).sum()),
    )


def _attached(tree: Sharing, above: list[int]) -> list[int]:
    """The deepest opened node over each sequence, FROM_START for none."""
    deepest = list[int]()
    for v, up in enumerate(tree.parent.tolist()):
        opened = above[v] != NOT_OPENED
        deepest.append(v if opened else deepest[up] if up >= 0 else FROM_START)
    return [deepest[v] if v >= 0 else FROM_START for v in tree.node.tolist()]


def _walk(
    members: dict[int, list[int]],
    children: dict[int, list[int]],
    height: dict[int, int],
    earliest: dict[int, int],
) -> tuple[list[int], dict[int, int], dict[int, int]]:
    """Sequences in depth-first order, and where each node's begin and stop. Without recursion: prefixes may
    be nested as deep as there are sequences."""
    order, first, stop = list[int](), dict[int, int](), dict[int, int]()
    stack = [FROM_START]
    while stack:
        v = stack.pop()
        if v in first:
            order += members[v]
            stop[v] = len(order)
            continue
        first[v] = len(order)
        stack.append(v)
        stack += sorted(children[v], key=lambda c: (height[c], -earliest[c]))
    return order, first, stop


def shared_levels(
    forest: Forest, tables: Sequence[Sequence[int]], row_indptr: Int32, page_size: int, align: int
) -> tuple[CascadeLevel, ...]:
    """The shared levels over sequences in order, whose rows are row_indptr.

    Neighbours that have no segment in a level stand in one empty one, as far as they have come equally far.
    """
    reached = np.zeros(len(tables), np.int64)
    levels = []
    for level in range(int(forest.level.max()) + 1):
        here = np.flatnonzero(forest.level == level)
        here = here[np.argsort(forest.first[here])]
        owner = np.full(len(tables), -1)
        for s in here.tolist():
            owner[forest.first[s] : forest.stop[s]] = s
        new = np.ones(len(tables), np.bool_)
        new[1:] = (owner[1:] != owner[:-1]) | ((owner[1:] < 0) & (reached[1:] != reached[:-1]))
        at = np.flatnonzero(new)
        levels.append(_shared_level(forest, owner[at], at, tables, row_indptr, page_size, align))
        inside = owner >= 0
        reached[inside] = forest.end[owner[inside]]
    return tuple(levels)


def _shared_level(
    forest: Forest,
    segments: Int64,
    at: Int64,
    tables: Sequence[Sequence[int]],
    row_indptr: Int32,
    page_size: int,
    align: int,
) -> CascadeLevel:
    """One level: segments[j] (-1: an empty one) begins at sequence at[j]."""
    step = align // page_size
    pages = [
        tables[i][forest.begin[s] * step : forest.end[s] * step] if s >= 0 else ()
        for s, i in zip(segments.tolist(), at.tolist(), strict=True)
    ]
    qo_indptr = np.append(row_indptr[at], row_indptr[-1])
    last_page_len = np.where(segments >= 0, page_size, 0).astype(np.int32)
    return CascadeLevel(qo_indptr, *_ragged(pages), last_page_len)


def private_level(
    tables: Sequence[Sequence[int]], ends: Int64, kv_start: Int32, row_indptr: Int32, page_size: int
) -> CascadeLevel:
    """Each sequence's tokens [kv_start, ends)."""
    last = ((ends - kv_start - 1) % page_size + 1).astype(np.int32)
    bounds = zip(tables, (kv_start // page_size).tolist(), (-(-ends // page_size)).tolist(), strict=True)
    return CascadeLevel(row_indptr, *_ragged([table[a:b] for table, a, b in bounds]), last)


def _ragged(runs: Sequence[Sequence[int]]) -> tuple[Int32, Int32]:
    """Runs one after another: (index pointer, values)."""
    indptr = np.zeros(len(runs) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, runs), np.int32, len(runs)), out=indptr[1:])
    return indptr, flatten(runs)
