"""Which prefixes of a batch's tree get a segment of their own, for the levels that there are.

Each sequence reads a chain of shared segments, one a level at most, and then its private tail. A segment
at node v begins where one at a node above ends, or at token 0. Where the tree is deeper than there are
levels, it is folded: a node's tiles are then read by each segment below, or each sequence, that has no other
to begin from.

The choice is a dynamic program over the tree. Going down, what matters of the choices above is, for each
level, the deepest node opened so far at that level or a lower one: that is the *state*, a rising tuple of
ranks (0 is the beginning, r + 1 a node with r others above). Opening a node at level l lets it begin where
the state's level l - 1 stands; what is below sees it at level l and all that follow. Where levels do not
bind, the deepest opened node is all there is to know. All nodes of a rank are worked on at once.

All values are integers, so equal inputs give equal plans.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np

from engine.plan import Int64
from engine.scheduling.sharing import Sharing

_MOST_VALUES = 150_000
_MOST_STATES = 2_000
"""Values (nodes times states) and states of a node that a choice may look at, which is enough for 20 prefixes
nested in each other and three shared levels. A tree that needs more is thinned first: the choice is then
exact for the nodes that are left."""

NOT_OPENED = -2
FROM_START = -1


class Prices(NamedTuple):
    """What a choice is worth, as integers of one unit: gained for each tile that a sequence does not read
    again, and paid for each segment and each level."""

    tile: int
    segment: int = 0
    level: int = 0


class _Moves(NamedTuple):
    """What can be done with a node of one rank, by state: `keep[s]` is the state below if it is not opened;
    opening it as option o begins at rank `base[o, s]` and leads to state `opened[o, s]`. `deepest[t]` is the
    deepest opened rank of a state t below."""

    keep: Int64
    base: Int64
    opened: Int64
    deepest: Int64


def fold(tree: Sharing, levels: int, prices: Prices) -> Int64:
    """Choose the nodes to open under `levels` shared levels so that the value is greatest.

    Returns for each node where its segment begins: the node whose end that is, FROM_START, or NOT_OPENED.
    """
    best, chosen = 1, np.full(len(tree.parent), NOT_OPENED)
    most = min(levels, tree.height)
    # Fewer levels can be better: where each costs, and where they leave room to look at more nodes.
    whole = most == 0 or _fits(tree, most)
    for width in range(most, 0, -1):
        kept = None if whole else _thin(tree, width)
        program = _Program(tree if kept is None else _only(tree, kept)[0], width, prices)
        value = program.value - width * prices.level
        if value >= best:
            best, above = value, program.choose()
            chosen = above if kept is None else np.full(len(tree.parent), NOT_OPENED)
            if kept is not None:
                chosen[kept] = np.where(above >= 0, kept[above], above)
        if whole and (not prices.level or program.value - prices.level < best):
            break  # fewer levels gain no more before they are paid for
    return chosen


class _Program:
    """One run of the dynamic program: values from the leaves up, then choices from the top down."""

    def __init__(self, tree: Sharing, width: int, prices: Prices) -> None:
        self._tree = tree
        height = tree.height
        self._moves = [_moves(rank, width, height > width) for rank in range(height)]
        self._bounds = np.searchsorted(tree.rank, np.arange(height + 1)).tolist()
        self._ends, self._nodes = self._ancestors()
        self._options: list[Int64] = [np.empty(0, np.int64)] * height
        self.value = self._rise(prices)

    def _ancestors(self) -> tuple[list[Int64], list[Int64]]:
        """By rank: tiles [nodes, rank + 2] and numbers of the nodes on the way down, FROM_START first."""
        tree, ends, nodes = self._tree, list[Int64](), list[Int64]()
        for rank, (low, high) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            own_tiles, own = tree.tiles[low:high, None], np.arange(low, high)[:, None]
            if rank:
                up = tree.parent[low:high] - self._bounds[rank - 1]
                ends.append(np.hstack((ends[-1][up], own_tiles)))
                nodes.append(np.hstack((nodes[-1][up], own)))
            else:
                ends.append(np.hstack((np.zeros_like(own_tiles), own_tiles)))
                nodes.append(np.hstack((np.full_like(own, FROM_START), own)))
        return ends, nodes

    def _rise(self, prices: Prices) -> int:
        tree, best = self._tree, np.empty((0, 0), np.int64)
        for rank in range(tree.height - 1, -1, -1):
            low, high = self._bounds[rank], self._bounds[rank + 1]
            ends, moves = self._ends[rank], self._moves[rank]
            below = (tree.direct[low:high] * prices.tile)[:, None] * ends[:, moves.deepest]
            if len(best):
                up = tree.parent[high : high + len(best)] - low
                below += _sums(best, up, high - low)
            best = below[:, moves.keep]
            option = np.zeros(best.shape, np.int64)
            for o in range(len(moves.base)):
                length = ends[:, -1:] - ends[:, moves.base[o]]
                opened = below[:, moves.opened[o]] - length * prices.tile - prices.segment
                better = opened > best
                best = np.where(better, opened, best)
                option[better] = o + 1
            self._options[rank] = option
        return int(best.sum())

    def choose(self) -> Int64:
        """Where each node's segment begins, as `fold` returns it."""
        tree, above = self._tree, np.full(len(self._tree.parent), NOT_OPENED)
        after = np.empty(0, np.int64)
        for rank in range(tree.height):
            low, high = self._bounds[rank], self._bounds[rank + 1]
            moves, rows = self._moves[rank], np.arange(high - low)
            state = after[tree.parent[low:high] - self._bounds[rank - 1]] if rank else np.zeros_like(rows)
            option = self._options[rank][rows, state]
            opened = np.maximum(option - 1, 0)
            after = np.where(option > 0, moves.opened[opened, state], moves.keep[state])
            begins = self._nodes[rank][rows, moves.base[opened, state]]
            above[low:high] = np.where(option > 0, begins, NOT_OPENED)
        return above


def _sums(values: Int64, owner: Int64, owners: int) -> Int64:
    """Add up the rows of `values` that each owner has: [owners, values.shape[1]]."""
    running = np.zeros((len(values) + 1, values.shape[1]), np.int64)
    np.cumsum(values[np.argsort(owner, kind="stable")], axis=0, out=running[1:])
    ends = np.zeros(owners + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=owners), out=ends[1:])
    sums: Int64 = np.diff(running[ends], axis=0)
    return sums


@lru_cache(maxsize=64)
def _moves(rank: int, width: int, binding: bool) -> _Moves:
    """The moves of nodes with `rank` others above. States are rising tuples of `width` ranks, or of one where
    the levels do not bind."""
    size = width if binding else 1
    here = list(combinations_with_replacement(range(rank + 1), size))
    below = list(combinations_with_replacement(range(rank + 2), size))
    number = {state: i for i, state in enumerate(below)}
    own = rank + 1
    keep = [number[state] for state in here]
    if binding:
        base = [[state[level - 1] if level else 0 for state in here] for level in range(size)]
        opened = [
            [number[state[:level] + (own,) * (size - level)] for state in here] for level in range(size)
        ]
    else:
        base = [[state[0] for state in here]]
        opened = [[number[(own,)] for _ in here]]
    return _Moves(np.array(keep), np.array(base), np.array(opened), np.array([s[-1] for s in below]))


def _thin(tree: Sharing, levels: int) -> Int64 | None:
    """The nodes to look at, None for all: where there would be too many states, nodes on the longest ways
    down are left out that hardly matter, an eighth at a time and never two neighbours at once."""
    if _fits(tree, levels):
        return None
    part, kept, odd = tree, np.arange(len(tree.parent)), 0
    while not _fits(part, levels):
        way = part.rank + _heights(part)
        worst = np.flatnonzero((way > int(way.max()) * 3 // 4) & (part.rank % 2 == odd))
        drop = worst[np.argsort(_losses(part)[worst], kind="stable")[: -(-len(worst) // 4)]]
        part, kept = _only(tree, np.delete(kept, drop))
        odd = 1 - odd
    return kept


def _losses(tree: Sharing) -> Int64:
    """Tile reads that are lost without each node, with all others opened: its own sequences go without the
    tiles that it adds, and each node right below reads them for itself."""
    up = tree.parent
    below = np.bincount(up[up >= 0], minlength=len(up))
    added = tree.tiles - np.where(up >= 0, tree.tiles[up], 0)
    losses: Int64 = (tree.direct + below - 1) * added
    return losses


def _fits(tree: Sharing, levels: int) -> bool:
    """Whether a choice is quick; there are C(rank + 1 + width, width) rising tuples below a rank."""
    width = min(levels, tree.height) if tree.height > levels else 1
    values, states = 0, 1
    for rank, nodes in enumerate(np.bincount(tree.rank).tolist()):
        states = states * (rank + 1 + width) // (rank + 1)
        values += nodes * states
    return values <= _MOST_VALUES and (width == 1 or states <= _MOST_STATES)


def _heights(tree: Sharing) -> Int64:
    """Nodes on the longest way down from each node, itself counted."""
    heights = np.ones(len(tree.parent), np.int64)
    for v in range(len(heights) - 1, -1, -1):
        up = tree.parent[v]
        if up >= 0:
            heights[up] = max(heights[up], heights[v] + 1)
    return heights


def _only(tree: Sharing, kept: Int64) -> tuple[Sharing, Int64]:
    """The tree of some nodes, which take over what stood below the others; and those nodes in its order."""
    count = len(tree.parent)
    keeps = np.zeros(count, np.bool_)
    keeps[kept] = True
    nearest, rank = [-1] * (count + 1), [-1] * (count + 1)  # the last entry answers for the parent -1
    for v, up in enumerate(tree.parent.tolist()):
        nearest[v] = v if keeps[v] else nearest[up]
        rank[v] = rank[up] + 1 if keeps[v] else rank[up]
    ranks, home = np.array(rank), np.array(nearest)
    order = kept[np.argsort(ranks[kept], kind="stable")]
    number = np.full(count + 1, -1)
    number[order] = np.arange(len(order))
    node = number[home[tree.node]]
    direct = np.bincount(node[node >= 0], minlength=len(order)).astype(np.int64)
    return Sharing(number[home[tree.parent[order]]], tree.tiles[order], ranks[order], direct, node), order
