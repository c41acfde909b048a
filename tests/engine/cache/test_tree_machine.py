"""Random traffic on the tree alone, beside a dictionary that knows which prefixes stand where.

More than the scheduler would do: pins at every depth, eviction and splits between any two calls, tails
taken back and refilled, readers on frozen tails.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.cache.node import Node
from engine.cache.pool import PagePool
from engine.cache.tree import PrefixTree

TOKENS = st.lists(st.integers(0, 1), max_size=14).map(tuple)
NAMES = st.sampled_from((None, "", ("a", "b"), ("ab",)))


class Writer:
    """One who fills pages: where its path ends in the tree, its open page, and its tail if it is named."""

    def __init__(self, name: object, node: Node, tokens: tuple[int, ...]) -> None:
        self.name, self.node, self.tokens = name, node, tokens
        self.open: int | None = None
        self.tail: Node | None = None


class TreeMachine(RuleBasedStateMachine):
    """`rows` says what each (page, row) holds; a match must name rows that hold just its tokens."""

    @initialize(size=st.sampled_from((1, 2, 3, 4)))
    def start(self, size: int) -> None:
        self.size = size
        self.pool = PagePool(41, size)
        self.tree = PrefixTree(self.pool)
        self.rows: dict[tuple[int, int], tuple[object, tuple[int, ...]]] = {}
        self.pins: list[Node] = []
        self.writers: list[Writer] = []

    def check(self) -> None:
        for writer in self.writers:
            if writer.tail is not None and not writer.tail.attached:
                self.tree.take_tail(writer.tail)
                writer.tail = None
        private = [w.open for w in self.writers if w.open is not None and w.tail is None]
        self.tree.check(private)

    def room(self, pages: int) -> bool:
        if self.pool.free_pages + self.tree.evictable_pages < pages:
            return False
        short = pages - self.pool.free_pages
        assert short <= 0 or self.tree.evict(short) == short
        return True

    def verify(self, name: object, tokens: tuple[int, ...], limit: int) -> None:
        match = self.tree.match(name, tokens, limit)
        assert match.length <= min(limit, len(tokens))
        assert match.length == len(match.pages) * self.size + match.partial_rows
        pages = [*match.pages, match.partial_page] if match.partial is not None else match.pages
        for i in range(match.length):
            assert self.rows[pages[i // self.size], i % self.size] == (name, tokens[: i + 1])

    @rule(name=NAMES, tokens=TOKENS, limit=st.integers(0, 15))
    def match(self, name: object, tokens: tuple[int, ...], limit: int) -> None:
        self.verify(name, tokens, limit)

    @rule(name=NAMES, tokens=TOKENS, limit=st.integers(0, 15), copies=st.booleans())
    def pin(self, name: object, tokens: tuple[int, ...], limit: int, copies: bool) -> None:
        match = self.tree.match(name, tokens, limit)
        if not copies:
            match = match._replace(partial=None, partial_page=0, partial_rows=0)
        cost, before = self.tree.pin_cost(match), self.tree.evictable_pages
        self.pins.append(self.tree.pin(match))
        if match.partial is not None:
            source = self.tree.pin_partial(match)
            assert source.pages[0] == match.partial_page
            self.pins.append(source)
        assert before - self.tree.evictable_pages == cost
        self.check()

    @precondition(lambda self: self.pins)
    @rule(at=st.integers(0, 99))
    def unpin(self, at: int) -> None:
        self.tree.unpin(self.pins.pop(at % len(self.pins)))
        self.check()

    @rule(name=NAMES, tokens=TOKENS)
    def begin(self, name: object, tokens: tuple[int, ...]) -> None:
        """A writer begins after the full pages it finds."""
        match = self.tree.match(name, tokens, len(tokens))
        node = self.tree.pin(match)
        self.writers.append(Writer(name, node, tokens[: len(match.pages) * self.size]))
        self.check()

    @precondition(lambda self: self.writers)
    @rule(
        at=st.integers(0, 99), more=st.lists(st.integers(0, 1), min_size=1, max_size=9), named=st.booleans()
    )
    def write(self, at: int, more: list[int], named: bool) -> None:
        """Tokens are appended: full pages are published, the rest stays open, named or not."""
        writer = self.writers[at % len(self.writers)]
        tokens = (*writer.tokens, *more)
        start = len(writer.tokens) // self.size
        needed = self.pool.pages_for(len(tokens)) - start - (writer.open is not None)
        if (writer.tail is not None and writer.tail.pins > 1) or not self.room(needed):
            return
        if writer.tail is not None:
            self.tree.take_tail(writer.tail)
            writer.tail = None
        pages = ([writer.open] if writer.open is not None else []) + self.pool.take(needed)
        for i in range(len(writer.tokens), len(tokens)):
            self.rows[pages[i // self.size - start], i % self.size] = (writer.name, tokens[: i + 1])
        full = len(tokens) // self.size
        if full > start:
            done = self.tree.extend(
                writer.node, tokens[start * self.size : full * self.size], pages[: full - start]
            )
            writer.node = done.node
        writer.open = pages[full - start] if len(tokens) % self.size else None
        writer.tokens = tokens
        if named and writer.open is not None:
            rows = tokens[full * self.size :]
            writer.tail = self.tree.add_tail(writer.node, rows, writer.open, writer)
        self.check()
        self.verify(writer.name, tokens, 99)
        assert self.tree.match(writer.name, tokens, 99).length >= full * self.size + len(
            tokens[full * self.size :] if named else ()
        )

    @precondition(lambda self: self.writers)
    @rule(at=st.integers(0, 99))
    def end(self, at: int) -> None:
        """A writer stops: what is named stays and is frozen, the rest is freed."""
        writer = self.writers.pop(at % len(self.writers))
        if writer.tail is not None:
            writer.tail.writer = None
            self.tree.unpin(writer.tail)
        elif writer.open is not None:
            self.pool.give([writer.open])
        self.tree.unpin(writer.node)
        self.check()

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        held = self.tree.evictable_pages
        assert self.tree.evict(count) == min(count, held)
        self.check()

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        while self.writers:
            self.end(0)
        while self.pins:
            self.unpin(0)
        self.tree.clear()
        assert self.pool.free_pages == self.pool.capacity
        assert not self.tree._roots


TreeMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("TREE_EXAMPLES", "100")),
    stateful_step_count=40,
    deadline=None,
    derandomize="TREE_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
TestTree = TreeMachine.TestCase
