"""Which whole tiles of KV the sequences of a batch share: the batch's own prefix tree.

Only pages are compared. A page stands under exactly one prefix, so the last page of a tile names that tile
and all before it, and two sequences that hold the same page there share everything up to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from engine.plan import Int64


class Sharing(NamedTuple):
    """The tree of what is shared by two sequences or more.

    Node v stands for the first `tiles[v]` tiles of all sequences at or below it; `parent[v]` is the node
    above (-1: none), `rank[v]` how many are above. Nodes are sorted by rank. `node[i]` is the deepest node
    of sequence i, -1 where it shares nothing, `direct[v]` counts the sequences whose deepest node is v.
    """

    parent: Int64
    tiles: Int64
    rank: Int64
    direct: Int64
    node: Int64

    @property
    def height(self) -> int:
        """Nodes on the longest way down."""
        return int(self.rank[-1]) + 1 if len(self.rank) else 0

    def below(self) -> Int64:
        """Sequences at or below each node."""
        counts = self.direct.copy()
        for v in range(len(counts) - 1, -1, -1):
            if self.parent[v] >= 0:
                counts[self.parent[v]] += counts[v]
        return counts


class Keys(NamedTuple):
    """Last pages of tiles. `runs[i]` are those of sequence i, empty where nobody shares its first tile;
    `known` holds every page that a tile of another sequence would have to end in to be shared."""

    runs: list[Sequence[int]]
    known: set[int]


def tile_keys(tables: Sequence[Sequence[int]], starts: Sequence[int], page_size: int, align: int) -> Keys:
    """The tiles that each sequence may share: those that end at or before its first row."""
    step = align // page_size
    ends = [start // align * step for start in starts]
    firsts = [table[step - 1] if end else 0 for table, end in zip(tables, ends, strict=True)]
    holders = Counter(firsts)
    holders[0] = 0  # page 0 is nobody's: it stands for sequences without a whole tile
    runs = [
        table[step - 1 : end : step] if holders[first] > 1 else ()
        for table, end, first in zip(tables, ends, firsts, strict=True)
    ]
    known = set(firsts)
    known.update(*runs)
    known.discard(0)
    return Keys(runs, known)


def share(runs: Sequence[Sequence[int]]) -> Sharing:
    """Build the tree from each sequence's tile keys.

    Down a sequence's tiles the number of sequences that hold the tile can only fall, and the same number
    means the same sequences; so a node ends where the number changes.
    """
    lengths = np.fromiter(map(len, runs), np.int64, len(runs))
    total = int(lengths.sum())
    keys = np.fromiter(chain.from_iterable(runs), np.int64, total)
    holders = np.bincount(keys)[keys] if total else keys
    owner = np.repeat(np.arange(len(runs)), lengths)
    ends = np.ones(total, np.bool_)
    ends[:-1] = (owner[1:] != owner[:-1]) | (holders[1:] != holders[:-1])
    at = np.flatnonzero(ends & (holders > 1))
    page, who = keys[at], owner[at]
    tiles = at - (np.cumsum(lengths) - lengths)[who] + 1
    begins = np.ones(len(at), np.bool_)
    begins[1:] = who[1:] != who[:-1]
    count = np.arange(len(at))
    rank = count - np.maximum.accumulate(np.where(begins, count, 0))

    first = np.empty(int(page.max()) + 1 if len(page) else 0, np.int64)
    first[page[::-1]] = count[::-1]
    chosen = np.flatnonzero(first[page] == count)
    chosen = chosen[np.argsort(rank[chosen], kind="stable")]
    number = np.empty(len(at), np.int64)
    number[chosen] = np.arange(len(chosen))
    number = number[first[page]]

    parent = np.where(rank[chosen] > 0, number[chosen - 1], -1) if len(at) else np.empty(0, np.int64)
    node = np.full(len(runs), -1, np.int64)
    node[who] = number  # a sequence's deepest node comes last
    direct = np.bincount(node[node >= 0], minlength=len(chosen)).astype(np.int64)
    return Sharing(parent, tiles[chosen], rank[chosen], direct, node)
