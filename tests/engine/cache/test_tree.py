"""The prefix tree: longest matches to the token, pins that hold, eviction that frees what was asked."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

from engine.cache.node import Node
from engine.cache.pool import PagePool
from engine.cache.tree import PrefixTree

SIZE = 4


class Shelf:
    """A tree with pages of 4 tokens, and a short way to put token runs into it. Checks after each."""

    def __init__(self, pages: int = 64) -> None:
        self.pool = PagePool(pages + 1, SIZE)
        self.tree = PrefixTree(self.pool)

    def put(self, tokens: Sequence[int], namespace: Hashable = "", *, keep: bool = False) -> Node:
        """Publish tokens as a sequence would at its end; returns the node (pinned if `keep`)."""
        tokens = tuple(tokens)
        match = self.tree.match(namespace, tokens, len(tokens))
        node = self.tree.pin(match)
        at = len(match.pages) * SIZE
        full = len(tokens) // SIZE
        pages = self.pool.take(full - len(match.pages))
        node = self.tree.extend(node, tokens[at : full * SIZE], pages).node
        if rows := tokens[full * SIZE :]:
            (page,) = self.pool.take(1)
            leaf = self.tree.add_tail(node, rows, page, writer=None)
            if leaf is None:
                self.pool.give([page])
            else:
                self.tree.unpin(leaf)
        if not keep:
            self.tree.unpin(node)
        self.tree.check()
        return node

    def length(self, tokens: Sequence[int], namespace: Hashable = "") -> int:
        return self.tree.match(namespace, tokens, len(tokens)).length

    @property
    def roots(self) -> int:
        return len(self.tree._roots)


def run(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))


# -- matching --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", range(1, 14))
def test_every_divergence_is_found_to_the_token(stored: int) -> None:
    shelf = Shelf()
    shelf.put(run(0, stored))
    for k in range(stored + 1):
        match = shelf.tree.match("", (*run(0, k), 999, 999), 99)
        assert match.length == k
        assert len(match.pages) == k // SIZE
        assert match.partial_rows == k % SIZE
        assert (match.partial is None) == (k % SIZE == 0)


@pytest.mark.parametrize("limit", range(14))
def test_a_limit_cuts_the_match(limit: int) -> None:
    shelf = Shelf()
    shelf.put(run(0, 13))
    match = shelf.tree.match("", run(0, 13), limit)
    assert (match.length, len(match.pages), match.partial_rows) == (limit, limit // SIZE, limit % SIZE)


def test_the_neighbour_with_the_longest_partial_match_is_found() -> None:
    """Keys before, between and after the query; the longest common prefix may stand on either side."""
    shelf = Shelf()
    for tokens in [(1, 1, 1, 1), (1, 2, 3, 3), (1, 2, 3, 5), (1, 2, 5, 0), (1, 3, 0, 0), (2, 0, 0, 0)]:
        shelf.put(tokens)
    for query, length in [
        ((1, 2, 3, 4), 3),
        ((1, 2, 4, 0), 2),
        ((1, 2, 9, 9), 2),
        ((1, 0, 0, 0), 1),
        ((0, 0, 0, 0), 0),
        ((3, 0, 0, 0), 0),
        ((1, 2, 3, 5), 4),
        ((1, 2, 3), 3),
        ((1,), 1),
        ((), 0),
    ]:
        assert shelf.length(query) == length, query


def test_looking_changes_nothing() -> None:
    shelf = Shelf()
    shelf.put(run(0, 13))
    before = [(n.tokens, list(n.pages), n.last_used, n.pins) for n in shelf.tree.nodes()]
    shelf.tree.match("", run(0, 6), 99)
    shelf.tree.match("never seen", run(0, 6), 99)
    assert [(n.tokens, list(n.pages), n.last_used, n.pins) for n in shelf.tree.nodes()] == before
    assert shelf.roots == 1


# -- namespaces ------------------------------------------------------------------------------------


def test_namespaces_share_nothing() -> None:
    """O009: absent, empty, and tuples that would be one string if they were joined."""
    shelf = Shelf()
    names: list[Hashable] = [
        None,
        "",
        (),
        ("a", "bc"),
        ("ab", "c"),
        ("abc",),
        "abc",
        ("a", "b", "c"),
        (None,),
        ("",),
    ]
    for done, name in enumerate(names):
        assert [shelf.length(run(0, 9), n) for n in names] == [9] * done + [0] * (len(names) - done)
        shelf.put(run(0, 9), name)
    assert shelf.tree.evictable_pages == 3 * len(names)


def test_empty_roots_are_forgotten() -> None:
    shelf = Shelf()
    for i in range(50):
        shelf.put(run(0, 9), i)
        shelf.tree.clear()
        assert shelf.roots == 0
    for i in range(50):  # a pin that publishes nothing leaves nothing either
        node = shelf.tree.pin(shelf.tree.match(i, run(0, 9), 9))
        assert shelf.roots == 1
        shelf.tree.check()
        shelf.tree.unpin(node)
        assert shelf.roots == 0


# -- pins ------------------------------------------------------------------------------------------


def test_pinned_pages_are_not_evicted() -> None:
    shelf = Shelf(10)
    shelf.put(run(0, 13))
    node = shelf.tree.pin(shelf.tree.match("", run(0, 9), 9))
    assert (shelf.tree.pinned_pages, shelf.tree.evictable_pages) == (2, 2)
    shelf.tree.check()
    assert shelf.tree.evict(10) == 2
    assert shelf.length(run(0, 13)) == 8
    shelf.tree.unpin(node)
    assert shelf.tree.clear() == 2
    assert shelf.pool.free_pages == 10


def test_splitting_a_pinned_node_keeps_both_ends_pinned() -> None:
    """O015: the upper part inherits the pins, and each is given back from where it was taken."""
    shelf = Shelf()
    shelf.put(run(0, 24))
    low = shelf.tree.pin(shelf.tree.match("", run(0, 24), 24))
    high = shelf.tree.pin(shelf.tree.match("", run(0, 8), 8))
    middle = shelf.tree.pin(shelf.tree.match("", run(0, 16), 16))
    shelf.tree.check()
    assert [n.pins for n in (high, middle, low)] == [3, 2, 1]
    assert shelf.tree.pinned_pages == 6
    shelf.tree.unpin(low)
    assert (shelf.tree.pinned_pages, shelf.tree.evictable_pages) == (4, 2)
    shelf.tree.unpin(high)
    assert (shelf.tree.pinned_pages, shelf.tree.evictable_pages) == (4, 2)
    shelf.tree.unpin(middle)
    assert (shelf.tree.pinned_pages, shelf.tree.evictable_pages) == (0, 6)
    shelf.tree.check()


@pytest.mark.parametrize("length", [0, 3, 4, 6, 8, 10, 24, 26])
@pytest.mark.parametrize("pinned", [None, 0, 5, 8, 26])
def test_the_cost_of_a_pin_is_what_it_takes_from_others(length: int, pinned: int | None) -> None:
    shelf = Shelf()
    shelf.put(run(0, 26))
    shelf.put((*run(0, 8), *run(50, 9)))
    if pinned is not None:
        shelf.tree.pin(shelf.tree.match("", run(0, 26), pinned))
    match = shelf.tree.match("", run(0, 26), length)
    cost, before = shelf.tree.pin_cost(match), shelf.tree.evictable_pages
    shelf.tree.pin(match)
    if match.partial is not None:
        source = shelf.tree.pin_partial(match)
        assert source.pages[0] == match.partial_page
    assert before - shelf.tree.evictable_pages == cost
    shelf.tree.check()


def test_a_match_at_a_page_edge_has_no_partial_page_to_pin() -> None:
    shelf = Shelf()
    shelf.put(run(0, 12))
    match = shelf.tree.match("", run(0, 8), 8)
    shelf.tree.pin(match)
    with pytest.raises(ValueError, match="page's edge"):
        shelf.tree.pin_partial(match)


# -- publishing ------------------------------------------------------------------------------------


def test_duplicates_collapse() -> None:
    """O018: the second copy's pages are freed, and its writer gets the tree's."""
    shelf = Shelf()
    shelf.put(run(0, 12))
    tree, root = shelf.tree, shelf.tree.pin(shelf.tree.match("", (), 0))
    stored = tree.match("", run(0, 12), 12).pages
    own = shelf.pool.take(4)
    done = tree.extend(root, (*run(0, 12), *run(70, 4)), own)
    assert done.pages == [*stored, own[3]]
    assert done.collapsed == 3
    assert shelf.pool.free_set() >= set(own[:3])
    tree.check()
    assert (tree.pinned_pages, tree.evictable_pages) == (4, 0)
    tree.unpin(done.node)
    assert tree.evictable_pages == 4


def test_duplicates_collapse_up_to_the_page_where_they_part() -> None:
    shelf = Shelf()
    shelf.put(run(0, 12))
    root = shelf.tree.pin(shelf.tree.match("", (), 0))
    own = shelf.pool.take(3)
    done = shelf.tree.extend(root, (*run(0, 6), *run(90, 6)), own)
    assert (done.collapsed, done.pages[1:]) == (1, own[1:])
    shelf.tree.check()
    assert shelf.length((*run(0, 6), *run(90, 6))) == 12
    assert shelf.length(run(0, 12)) == 12


def test_extending_a_lone_end_makes_no_new_node() -> None:
    shelf = Shelf()
    node = shelf.put(run(0, 8), keep=True)
    done = shelf.tree.extend(node, run(8, 8), shelf.pool.take(2))
    assert done.node is node
    assert len(list(shelf.tree.nodes())) == 1
    other = shelf.tree.pin(shelf.tree.match("", run(0, 16), 16))
    assert other is node
    assert shelf.tree.extend(node, run(16, 4), shelf.pool.take(1)).node is not node, "another ends here"
    shelf.tree.check()


def test_only_full_pages_are_published() -> None:
    shelf = Shelf()
    root = shelf.tree.pin(shelf.tree.match("", (), 0))
    with pytest.raises(ValueError, match="full pages"):
        shelf.tree.extend(root, run(0, 7), shelf.pool.take(2))


# -- tails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(), run(0, 4), run(0, 5)])
def test_a_tail_is_neither_empty_nor_full(rows: tuple[int, ...]) -> None:
    shelf = Shelf()
    root = shelf.tree.pin(shelf.tree.match("", (), 0))
    with pytest.raises(ValueError, match="1 to 3"):
        shelf.tree.add_tail(root, rows, shelf.pool.take(1)[0], None)


@pytest.mark.parametrize("longer", [run(0, 3), run(0, 4), run(0, 9)])
def test_a_covered_tail_is_not_inserted(longer: tuple[int, ...]) -> None:
    shelf = Shelf()
    shelf.put(longer)
    free = shelf.pool.free_pages
    shelf.put(run(0, 2))
    shelf.put(run(0, 3))
    assert shelf.pool.free_pages == free


@pytest.mark.parametrize("longer", [run(0, 3), run(0, 4), run(0, 9), (0, 1, 9), (0, 1, 0, 0)])
def test_a_tail_that_a_new_sibling_covers_is_freed(longer: tuple[int, ...]) -> None:
    shelf = Shelf()
    shelf.put(run(0, 2))
    shelf.put(longer)
    assert shelf.tree.evictable_pages == shelf.pool.pages_for(len(longer))
    assert shelf.length((0, 1, 77)) == 2


def test_a_covered_tail_stays_with_its_writer() -> None:
    shelf = Shelf()
    root = shelf.tree.pin(shelf.tree.match("", (), 0))
    (page,) = shelf.pool.take(1)
    leaf = shelf.tree.add_tail(root, run(0, 2), page, writer="me")
    assert leaf is not None
    shelf.tree.check()
    assert shelf.tree.evict(9) == 0, "a writer pins its tail"
    (other,) = shelf.pool.take(1)
    frozen = shelf.tree.add_tail(root, run(0, 3), other, writer=None)
    assert frozen is not None
    assert not leaf.attached
    shelf.tree.take_tail(leaf)
    shelf.tree.check(private=[page])
    shelf.tree.unpin(frozen)
    shelf.tree.unpin(root)
    assert shelf.tree.clear() == 1
    shelf.tree.check(private=[page])


def test_a_covered_tail_is_freed_with_its_last_reader() -> None:
    shelf = Shelf()
    shelf.put(run(0, 2))
    match = shelf.tree.match("", run(0, 2), 2)
    shelf.tree.pin(match)
    reader = shelf.tree.pin_partial(match)
    free = shelf.pool.free_pages
    root = match.node
    (page,) = shelf.pool.take(1)
    longer = shelf.tree.add_tail(root, run(0, 3), page, None)
    assert longer is not None
    assert match.partial_page not in shelf.pool.free_set()
    shelf.tree.unpin(reader)
    assert match.partial_page in shelf.pool.free_set()
    assert shelf.pool.free_pages == free
    shelf.tree.check()


def test_a_tail_that_is_being_read_is_not_taken_back() -> None:
    shelf = Shelf()
    root = shelf.tree.pin(shelf.tree.match("", (), 0))
    leaf = shelf.tree.add_tail(root, run(0, 2), shelf.pool.take(1)[0], writer="me")
    assert leaf is not None
    shelf.tree.pin_node(leaf)
    with pytest.raises(ValueError, match="still being read"):
        shelf.tree.take_tail(leaf)
    shelf.tree.check()


def test_a_tail_taken_back_can_be_refilled_and_published() -> None:
    shelf = Shelf()
    root = shelf.tree.pin(shelf.tree.match("", (), 0))
    (page,) = shelf.pool.take(1)
    for rows in (1, 2, 3):
        leaf = shelf.tree.add_tail(root, run(0, rows), page, writer="me")
        assert leaf is not None
        assert shelf.length(run(0, 4)) == rows
        shelf.tree.take_tail(leaf)
        shelf.tree.check(private=[page])
    shelf.tree.extend(root, run(0, 4), [page])
    shelf.tree.check()
    assert shelf.length(run(0, 4)) == 4


# -- eviction --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 26))
def test_eviction_frees_what_was_asked(count: int) -> None:
    """O017: exactly, as long as there is that much."""
    shelf = Shelf()
    for i in range(4):
        shelf.put((*run(0, 8), *run(100 * (i + 1), 18)))
    held = shelf.tree.evictable_pages
    assert held == 2 + 4 * 5
    assert shelf.tree.evict(count) == min(count, held)
    assert shelf.tree.evictable_pages == held - min(count, held)
    assert shelf.tree.evicted_pages == min(count, held)
    shelf.tree.check()


def test_room_for_one_page_costs_one_page() -> None:
    """O017: 50 warm prefixes, one page asked: the oldest loses its last page, the others nothing."""
    shelf = Shelf(300)
    for i in range(50):
        shelf.put(run(100 * i, 20))
    assert shelf.tree.evict(1) == 1
    assert [shelf.length(run(100 * i, 20)) for i in range(50)] == [16] + [20] * 49


def test_leaves_go_from_their_end_least_recently_used_first() -> None:
    shelf = Shelf()
    for i in range(3):
        shelf.put(run(100 * i, 12))
    shelf.tree.unpin(shelf.tree.pin(shelf.tree.match("", run(0, 12), 12)))  # the first is used again
    lengths = []
    for _ in range(9):
        assert shelf.tree.evict(1) == 1
        shelf.tree.check()
        lengths.append([shelf.length(run(100 * i, 12)) for i in range(3)])
    assert lengths == [
        [12, 8, 12], [12, 4, 12], [12, 0, 12],
        [12, 0, 8], [12, 0, 4], [12, 0, 0],
        [8, 0, 0], [4, 0, 0], [0, 0, 0],
    ]  # fmt: skip


def test_a_shared_beginning_outlives_its_branches() -> None:
    shelf = Shelf()
    for i in range(3):
        shelf.put((*run(0, 8), *run(100 * (i + 1), 8)))
    assert shelf.tree.evict(6) == 6
    assert shelf.length(run(0, 8)) == 8
    assert shelf.tree.evict(1) == 1
    assert shelf.length(run(0, 8)) == 4


def test_nothing_to_evict_changes_nothing() -> None:
    shelf = Shelf()
    shelf.put(run(0, 13), keep=True)
    shelf.tree.clear()
    assert shelf.tree.evict(5) == 0
    assert shelf.length(run(0, 13)) == 12


def test_the_heap_does_not_grow_with_use() -> None:
    """O093: notes of leaves that were used again are dropped in time; the order stays right."""
    shelf = Shelf(16)
    shelf.put(run(100, 8))
    shelf.put(run(200, 8))
    for _ in range(5000):
        shelf.tree.unpin(shelf.tree.pin(shelf.tree.match("", run(100, 8), 8)))
    assert len(shelf.tree._heap) <= 64 + 4 * 16
    assert shelf.tree.evict(2) == 2
    assert (shelf.length(run(100, 8)), shelf.length(run(200, 8))) == (8, 0)
