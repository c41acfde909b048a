"""From chosen prefixes to the arrays of a CascadePlan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.plan import CascadeLevel, Int32, Int64
from engine.scheduling.folding import NOT_OPENED
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
    node = np.flatnonzero(chosen != NOT_OPENED)
    opened, above, root = node.tolist(), chosen.tolist(), len(chosen)
    deepest = np.array([*_deepest(tree, above, root), root])  # the last entry answers for -1, "no node"
    at = deepest[tree.node]
    size, earliest, height = _gather(at, opened, above, root)
    finished = _walk(opened, above, root, height, earliest)
    order = np.argsort(finished[at], kind="stable")
    stop = np.searchsorted(finished[at[order]], finished[node], side="right")
    begins = chosen[node]
    begin = np.where(begins >= 0, tree.tiles[begins], 0)
    end = tree.tiles[node]
    owner = at[order]
    return Forest(
        order.tolist(),
        members=int((at != root).sum()),
        reach=np.append(tree.tiles, 0)[owner],
        node=node,
        level=np.array([height[root] - 1 - height[v] for v in opened]),
        first=stop - size[node],
        stop=stop,
        begin=begin,
        end=end,
        tiles=int((end - begin).sum()),
    )


def _deepest(tree: Sharing, above: list[int], root: int) -> list[int]:
    """For each node the deepest opened one on the way down to it, itself counted; `root` for none."""
    deepest = list[int]()
    for v, up in enumerate(tree.parent.tolist()):
        deepest.append(v if above[v] != NOT_OPENED else deepest[up] if up >= 0 else root)
    return deepest


def _gather(at: Int64, opened: list[int], above: list[int], root: int) -> tuple[Int64, list[int], list[int]]:
    """For each opened node and the root: sequences at or below it, the earliest of them, and the nodes on the
    longest way down, itself counted."""
    sizes = np.bincount(at, minlength=root + 1).tolist()
    firsts = np.full(root + 1, len(at))
    firsts[at[::-1]] = np.arange(len(at))[::-1]
    earliest, height = firsts.tolist(), [1] * (root + 1)
    for v in reversed(opened):  # nodes below come first
        up = above[v] if above[v] >= 0 else root
        sizes[up] += sizes[v]
        height[up] = max(height[up], height[v] + 1)
        earliest[up] = min(earliest[up], earliest[v])
    return np.array(sizes), earliest, height


def _walk(opened: list[int], above: list[int], root: int, height: list[int], earliest: list[int]) -> Int64:
    """When each opened node, and the root, is left for good on the way through the tree, depth first: its own
    sequences stand after those of all nodes below. Without recursion: prefixes may be nested as deep as
    there are sequences."""
    children: list[list[int]] = [[] for _ in range(root + 1)]
    for v in opened:
        children[above[v] if above[v] >= 0 else root].append(v)
    finished = np.empty(root + 1, np.int64)
    left: list[int] = []
    stack = [root]
    while stack:
        # Backwards: a node before those below it, the last of these first.
        v = stack.pop()
        left.append(v)
        stack += sorted(children[v], key=lambda c: (-height[c], earliest[c]))
    finished[left] = np.arange(len(left))[::-1]
    return finished


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
