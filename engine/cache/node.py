"""One node of the prefix tree, and comparing token runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import NamedTuple

Tokens = tuple[int, ...]


class Node:
    """A run of tokens and the pages that hold their KV.

    A *full* node has len(tokens) == len(pages) * page_size. A *tail* is a leaf of one page that holds
    fewer tokens; only the first len(tokens) rows of that page are named by the tree, and while
    `writer` is set one running sequence goes on filling the rows after them.

    `pins` counts the pins on this node and below it, so a node with no pins has none below either.
    `keys` holds the first page's tokens of each child, sorted, beside `children`. A root has no parent,
    no pages, and the namespace it stands for as `name`.
    """

    __slots__ = (
        "attached",
        "children",
        "keys",
        "last_used",
        "name",
        "pages",
        "parent",
        "pins",
        "tail",
        "tokens",
        "writer",
    )

    def __init__(self, parent: Node | None, tokens: Tokens, pages: list[int], *, tail: bool = False) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.tail = tail
        self.children: list[Node] = []
        self.keys: list[Tokens] = []
        self.pins = 0
        self.last_used = 0
        self.writer: object | None = None
        self.attached = True
        self.name: Hashable = None

    def add_child(self, child: Node, page_size: int) -> None:
        key = child.tokens[:page_size]
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.children.insert(at, child)

    def remove_child(self, child: Node, page_size: int) -> None:
        at = bisect_left(self.keys, child.tokens[:page_size])
        del self.keys[at]
        del self.children[at]

    def replace_child(self, old: Node, new: Node, page_size: int) -> None:
        """Put `new` in the place of `old`; both have the same first page."""
        self.children[bisect_left(self.keys, old.tokens[:page_size])] = new

    def closest(self, query: Tokens) -> tuple[Node | None, int]:
        """The child whose first page shares most leading tokens with `query`, and how many.

        Keys are sorted, so the longest common prefix stands right beside where `query` belongs.
        """
        at = bisect_left(self.keys, query)
        best, shared = None, 0
        for i in (at, at - 1):
            if 0 <= i < len(self.keys):
                n = common_prefix(self.keys[i], query)
                if n > shared:
                    best, shared = self.children[i], n
        return best, shared


class Match(NamedTuple):
    """A view of the longest cached prefix: nothing is changed by looking.

    The prefix ends `pages_in_node` pages into `node`. `pages` are its full pages, root first. Where the
    tokens go on matching inside one more page, `partial` is the node that holds that page, `partial_page`
    the page and `partial_rows` how many of its rows match.
    """

    node: Node
    pages_in_node: int
    pages: list[int]
    partial: Node | None
    partial_page: int
    partial_rows: int
    length: int


def common_prefix(a: Sequence[int], b: Sequence[int], start_b: int = 0, limit: int | None = None) -> int:
    """Leading tokens that `a` and `b[start_b:start_b + limit]` share.

    Slices are compared at C speed, by halving where they differ.
    """
    high = min(len(a), len(b) - start_b)
    if limit is not None:
        high = min(high, limit)
    if high <= 0:
        return 0
    if tuple(a[:high]) == tuple(b[start_b : start_b + high]):
        return high
    low = 0  # a[:low] is known to be shared, a[:high] is known not to be
    while high - low > 1:
        middle = (low + high) // 2
        if tuple(a[low:middle]) == tuple(b[start_b + low : start_b + middle]):
            low = middle
        else:
            high = middle
    return low


__all__ = ["Match", "Node", "Tokens", "common_prefix"]
