"""Which whole tiles of KV the sequences of a batch share: the batch's own prefix tree.

Only pages are compared. A page stands under exactly one prefix, so the last page of a tile names that tile
and all before it, and two sequences that hold the same page there share everything up to it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.plan import Int32, Int64


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


class Keys(NamedTuple):
    """Last pages of tiles that may be shared. `pages` are those of all sequences one after another,
    lengths[i] of sequence i, none where nobody else holds its first tile; firsts[i] is the first, or 0."""

    pages: Int32
    lengths: Int64
    firsts: list[int]

    def hold(self, page: int) -> bool:
        """Whether a sequence that completed a tile with this page would share it with another."""
        return page in self.firsts or bool((self.pages == page).any())


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
    return Keys(flatten(runs), np.fromiter(map(len, runs), np.int64, len(runs)), firsts)


def share(keys: Keys) -> Sharing:
    """Build the tree.

    Down a sequence's tiles the number of sequences that hold the tile can only fall, and the same number
    means the same sequences; so a node ends where the number changes.
    """
    pages, lengths = keys.pages, keys.lengths
    total = len(pages)
    holders = np.bincount(pages)[pages] if total else pages
    owner = np.repeat(np.arange(len(lengths)), lengths)
    ends = np.ones(total, np.bool_)
    ends[:-1] = (owner[1:] != owner[:-1]) | (holders[1:] != holders[:-1])
    at = np.flatnonzero(ends & (holders > 1))
    page, who = pages[at], owner[at]
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
    node = np.full(len(lengths), -1, np.int64)
    node[who] = number  # a sequence's deepest node comes last
    direct = np.bincount(node[node >= 0], minlength=len(chosen)).astype(np.int64)
    return Sharing(parent, tiles[chosen], rank[chosen], direct, node)


def flatten(runs: Sequence[Sequence[int]]) -> Int32:
    """Runs of pages one after another; those that are arrays already are copied as memory."""
    flat = array("i")
    for run in runs:
        flat.extend(run)
    return np.frombuffer(flat, np.int32) if len(flat) else np.empty(0, np.int32)
