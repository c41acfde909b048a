"""The prefix tree: token sequences to KV pages, a root for each namespace.

Rules that hold after every call (`check` proves them):

* a page stands in at most one node; edges compare tokens, never hashes;
* siblings may share their first rows, but none is a prefix of another;
* a node with no pins has none below it; eviction takes only such nodes, from the leaves' ends;
* `evictable_pages` + `pinned_pages` is every page the tree holds.

The idea of a radix tree over KV pages is known from RadixAttention (Zheng et al., SGLang, 2023); token-exact
tails, writers and collapsing are Headwater's own, see "Pages, tree, namespaces" in docs/cache.md.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from engine.cache.node import Match, Node, Tokens, common_prefix
from engine.cache.pool import PagePool


class Extended(NamedTuple):
    """What `extend` did: the node at the new end, the pages that stand in the tree now for those tokens
    (the caller patches its table), and how many of the caller's own pages were duplicates and freed."""

    node: Node
    pages: list[int]
    collapsed: int


class PrefixTree:
    """Owns every page that stands in a node; gives pages back to the pool when it drops them."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.evictable_pages = 0
        self.pinned_pages = 0
        self.evicted_pages = 0
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._heap_serial = 0

    # -- looking ---------------------------------------------------------------------------------

    def root(self, namespace: Hashable) -> Node:
        """The root of a namespace: one that holds nothing is only kept while it is pinned."""
        node = self._roots.get(namespace)
        if node is None:
            node = Node(None, (), [])
            node.name = namespace
        return node

    def match(self, namespace: Hashable, tokens: Sequence[int], limit: int) -> Match:
        """Longest cached prefix of tokens[:limit]. Changes nothing."""
        size = self.page_size
        limit = min(limit, len(tokens))
        node, at, pages = self.root(namespace), 0, list[int]()
        while True:
            query = tuple(tokens[at : min(at + size, limit)])
            child, shared = node.closest(query) if query else (None, 0)
            if child is None:
                return Match(node, len(node.pages), pages, None, 0, 0, at)
            if shared < size:
                return Match(node, len(node.pages), pages, child, child.pages[0], shared, at + shared)
            run = common_prefix(child.tokens, tokens, at, limit - at)
            full, rows = divmod(run, size)
            pages += child.pages[:full]
            at += full * size
            if full == len(child.pages):
                node = child
                continue
            partial = child if rows else None
            return Match(child, full, pages, partial, child.pages[full], rows, at + rows)

    # -- pins ------------------------------------------------------------------------------------

    def pin(self, match: Match) -> Node:
        """Pin the full pages of a match, splitting the node where they end. Returns the pinned node."""
        node = match.node
        if node.parent is None:
            node = self._roots.setdefault(node.name, node)
        elif match.pages_in_node < len(node.pages):
            node = self._split(node, match.pages_in_node)
        self.pin_node(node)
        return node

    def pin_node(self, node: Node) -> None:
        """Pin a node and so all above it: none of their pages is evicted until unpinned."""
        self._clock += 1
        at: Node | None = node
        while at is not None:
            if at.pins == 0:
                self.evictable_pages -= len(at.pages)
                self.pinned_pages += len(at.pages)
            at.pins += 1
            at.last_used = self._clock
            at = at.parent

    def pin_partial(self, match: Match) -> Node:
        """Pin the page in which a match ends, after `pin` of the same match. Returns the pinned node.

        What follows that page stays evictable: a long neighbour is not held for a few rows.
        """
        node = match.partial
        if node is None:
            raise ValueError("the match ends at a page's edge")
        if node.pins == 0 and len(node.pages) > 1:
            node = self._split(node, 1)
        self.pin_node(node)
        return node

    def pin_cost(self, match: Match) -> int:
        """Pages that are evictable now and would not be while the match and its partial page are pinned."""
        cost = 1 if match.partial is not None and match.partial.pins == 0 else 0
        at: Node | None = match.node
        pages = match.pages_in_node
        while at is not None:
            if at.pins == 0:
                cost += pages
            at = at.parent
            pages = len(at.pages) if at is not None else 0
        return cost

    def unpin(self, node: Node) -> None:
        """Take back one pin. A tail that has left the tree meanwhile is freed with its last pin."""
        self._clock += 1
        at: Node | None = node
        while at is not None:
            at.pins -= 1
            at.last_used = self._clock
            if at.pins == 0:
                self.pinned_pages -= len(at.pages)
                if at.attached:
                    self.evictable_pages += len(at.pages)
                    self._offer(at)
                else:
                    self.pool.give(at.pages)
            at = at.parent

    # -- publishing ------------------------------------------------------------------------------

    def extend(self, node: Node, tokens: Sequence[int], pages: Sequence[int]) -> Extended:
        """Publish full pages below `node`, which the caller has pinned; the pin moves to the new end.

        Pages whose tokens stand there already are duplicates: the tree's own take their place and the
        caller's are freed.
        """
        size = self.page_size
        if len(tokens) != len(pages) * size:
            raise ValueError("only full pages can be published")
        at, done, table, collapsed = node, 0, list[int](), 0
        while done < len(pages):
            key = tuple(tokens[done * size : (done + 1) * size])
            child, shared = at.closest(key)
            if child is None or shared < size:
                at = self._append(at, tuple(tokens[done * size :]), list(pages[done:]), own_pin=at is node)
                table += pages[done:]
                break
            same = common_prefix(child.tokens, tokens, done * size) // size
            if same < len(child.pages):
                child = self._split(child, same)
            self.pool.give(pages[done : done + same])
            collapsed += same
            table += child.pages
            done += same
            at = child
        if at is not node:
            self.pin_node(at)
            self.unpin(node)
        return Extended(at, table, collapsed)

    def add_tail(self, node: Node, tokens: Sequence[int], page: int, writer: object | None) -> Node | None:
        """Name the first rows of a page that is not full as a leaf below `node`, and pin it.

        Returns None, and takes nothing, where a sibling covers these rows already. A leaf without a
        writer is frozen.
        """
        rows = tuple(tokens)
        if not 0 < len(rows) < self.page_size:
            raise ValueError(f"a tail holds 1 to {self.page_size - 1} tokens, not {len(rows)}")
        at = bisect_left(node.keys, rows)
        if at < len(node.keys) and node.keys[at][: len(rows)] == rows:
            return None
        leaf = Node(node, rows, [page], tail=True)
        leaf.writer = writer
        self._insert(node, leaf)
        self.pin_node(leaf)
        return leaf

    def take_tail(self, leaf: Node) -> None:
        """Undo `add_tail`: the page is the writer's alone again (to be refilled, published, or freed).

        Only the writer's pin is on it or this is an error: whoever copies from it has committed.
        """
        if leaf.attached:
            if leaf.pins != 1:
                raise ValueError("a tail is still being read")
            self._detach(leaf)
        elif leaf.pins != 1:
            raise ValueError("a tail is still being read")
        leaf.writer = None
        pages, leaf.pages = leaf.pages, []
        self.pinned_pages -= len(pages)
        self.unpin(leaf)

    # -- eviction --------------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Free at least `count` pages if that many are evictable, least recently used leaves first, page by
        page from a leaf's end. Returns how many were freed."""
        freed = 0
        while freed < count and self._heap:
            used, _, leaf = heapq.heappop(self._heap)
            if (
                not leaf.attached
                or leaf.pins
                or leaf.children
                or used != leaf.last_used
                or leaf.parent is None
            ):
                continue
            drop = min(count - freed, len(leaf.pages))
            keep = len(leaf.pages) - drop
            self.pool.give(leaf.pages[keep:])
            self.evictable_pages -= drop
            self.evicted_pages += drop
            freed += drop
            if keep:
                leaf.pages = leaf.pages[:keep]
                leaf.tokens = leaf.tokens[: keep * self.page_size]
                self._offer(leaf)
                continue
            parent = leaf.parent
            parent.remove_child(leaf, self.page_size)
            leaf.attached = False
            leaf.pages = []
            self._offer(parent)
            self._forget_if_empty(parent)
        return freed

    def clear(self) -> int:
        """Evict all that is not pinned. Returns how many pages were freed."""
        return self.evict(self.evictable_pages)

    # -- inside ----------------------------------------------------------------------------------

    def _split(self, node: Node, pages: int) -> Node:
        """Cut a full node after `pages` pages; the upper part is returned, `node` keeps the lower end."""
        parent = node.parent
        if parent is None or not 0 <= pages < len(node.pages):
            raise ValueError("nothing to split")
        if pages == 0:
            return parent
        cut = pages * self.page_size
        upper = Node(parent, node.tokens[:cut], node.pages[:pages])
        upper.pins, upper.last_used = node.pins, node.last_used
        parent.replace_child(node, upper, self.page_size)
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[pages:], upper
        upper.add_child(node, self.page_size)
        return upper

    def _append(self, node: Node, tokens: Tokens, pages: list[int], *, own_pin: bool) -> Node:
        """Add pages after `node`: to its own run where nobody else ends there, else as a new child."""
        lone = own_pin and node.pins == 1 and not node.children and node.parent is not None
        if lone:
            node.tokens += tokens
            node.pages = node.pages + pages
            self.pinned_pages += len(pages)
            return node
        child = Node(node, tokens, pages)
        child.last_used = self._clock
        self.evictable_pages += len(pages)
        self._insert(node, child)
        return child

    def _insert(self, node: Node, child: Node) -> None:
        """Add a child; a tail that the child's first page covers leaves the tree.

        No sibling is a prefix of another, so only the key right before the child's can be covered.
        """
        key = child.tokens[: self.page_size]
        at = bisect_left(node.keys, key) - 1
        if at >= 0 and node.keys[at] == key[: len(node.keys[at])]:
            self._drop_covered(node.children[at])
        node.add_child(child, self.page_size)
        if child.pins == 0 and not child.tail:
            self._offer(child)
        elif child.tail:
            self.evictable_pages += len(child.pages)

    def _drop_covered(self, leaf: Node) -> None:
        """A covered tail leaves the tree: freed now, or with its last pin (a reader's or its writer's)."""
        self._detach(leaf)
        if leaf.pins == 0:
            self.evictable_pages -= len(leaf.pages)
            self.pool.give(leaf.pages)
            leaf.pages = []

    def _detach(self, leaf: Node) -> None:
        parent = leaf.parent
        if parent is None or leaf.children:
            raise ValueError("only a leaf can leave the tree")
        parent.remove_child(leaf, self.page_size)
        leaf.attached = False

    def _offer(self, node: Node) -> None:
        """Note an unpinned leaf as the next to go in its turn. Stale entries are skipped when popped."""
        if node.parent is not None and node.attached and not node.children and node.pins == 0:
            self._heap_serial += 1
            heapq.heappush(self._heap, (node.last_used, self._heap_serial, node))
            if len(self._heap) > 64 + 4 * self.pool.capacity:
                self._rebuild_heap()
        elif node.parent is None:
            self._forget_if_empty(node)

    def _rebuild_heap(self) -> None:
        live = [n for n in self.nodes() if n.parent and not n.children and n.pins == 0]
        self._heap = [(n.last_used, i, n) for i, n in enumerate(live)]
        self._heap_serial = len(live)
        heapq.heapify(self._heap)

    def _forget_if_empty(self, node: Node) -> None:
        """Drop the root of a namespace that holds nothing, so that names cost no memory for ever."""
        if node.parent is None and not node.children and node.pins == 0:
            self._roots.pop(node.name, None)

    def nodes(self) -> Iterator[Node]:
        """Every node of every namespace, roots left out."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            if node.parent is not None:
                yield node

    def check(self, private: Iterable[int] = ()) -> None:
        """Raise AssertionError where a rule is broken. `private` are the pages that tables hold alone.

        For tests and for the check at idle; walks the whole tree.
        """
        check_tree(self, self._roots, private)


def check_tree(tree: PrefixTree, roots: dict[Hashable, Node], private: Iterable[int]) -> None:
    """The rules of PrefixTree, as assertions with a reason."""
    size, seen, pinned, evictable = tree.page_size, set[int](), 0, 0
    stack = list(roots.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        below = sum(c.pins for c in node.children)
        assert node.attached, "a node in the tree says it has left"
        assert node.pins >= below >= 0, "a node has fewer pins than its children"
        assert node.keys == [c.tokens[:size] for c in node.children], "keys and children differ"
        assert node.keys == sorted(node.keys), "children are not in order"
        for a, b in zip(node.keys, node.keys[1:], strict=False):
            assert b[: len(a)] != a, "a sibling is a prefix of another"
        if node.parent is None:
            assert not node.tokens
            assert not node.pages
            continue
        if node.tail:
            assert len(node.pages) == 1, "a tail has one page"
            assert 0 < len(node.tokens) < size, "a tail is full or empty"
            assert not node.children, "a tail has children"
        else:
            assert len(node.tokens) == len(node.pages) * size > 0, "a full node's pages are not full"
        for page in node.pages:
            assert page not in seen, f"page {page} stands in two nodes"
            assert page > 0
            seen.add(page)
        pinned += len(node.pages) if node.pins else 0
        evictable += 0 if node.pins else len(node.pages)
    assert evictable == tree.evictable_pages >= 0, (evictable, tree.evictable_pages)
    private = list(private)
    assert len(private) == len(set(private)), "a page is private to two tables"
    assert not seen & set(private), "a private page stands in the tree"
    free = tree.pool.free_set()
    assert not free & seen, "a free page stands in the tree"
    assert not free & set(private), "a free page stands in a table"
    assert len(free) + len(seen) + len(private) == tree.pool.capacity, (
        f"pages lost: {len(free)} free, {len(seen)} in tree, {len(private)} private of {tree.pool.capacity}"
    )
    assert pinned == tree.pinned_pages, (pinned, tree.pinned_pages)
