"""Page tables of sequences: what they take from the tree, and what they give back to it."""

from __future__ import annotations

from array import array

from engine.cache.node import Match, Node
from engine.cache.pool import PagePool
from engine.cache.tree import PrefixTree
from engine.plan import RowCopy
from engine.scheduling.sequence import PAGE_TYPE, Sequence


class PageTables:
    """The only writer of `Sequence.table`, `shared`, `node` and `tail`.

    No call leaves a page in two places: it is free, in one node, or private to one table. A table is one
    object from `attach` to `release`; while it lives, its pages before the last committed full one stay as
    they are, which is what cached plans rely on.

    `wipe` are pages that a failed step wrote: they are free, and must be wiped before anyone reads them.
    """

    def __init__(self, pool: PagePool, tree: PrefixTree) -> None:
        self.pool = pool
        self.tree = tree
        self.collapsed_pages = 0
        self.wipe: list[int] = []
        self._copy_sources: list[Node] = []

    @property
    def available(self) -> int:
        """Pages that can be had: free ones and those that eviction would free."""
        return self.pool.free_pages + self.tree.evictable_pages

    def cost(self, match: Match, tokens: int) -> int:
        """Pages that would be lost to others if a sequence of `tokens` tokens began from this match."""
        return self.tree.pin_cost(match) + self.pool.pages_for(tokens) - len(match.pages)

    def attach(self, seq: Sequence, match: Match) -> RowCopy | None:
        """Begin from a match: pin it, then take a page for rows that continue in a page of another.

        The caller has seen that the cost is available. Returns the copy; its source stays pinned until the
        step that copies has `landed`.
        """
        seq.node = self.tree.pin(match)
        seq.table = array(PAGE_TYPE, match.pages)
        seq.shared = len(match.pages)
        seq.computed = match.length
        if match.partial is None:
            return None
        self._copy_sources.append(self.tree.pin_partial(match))
        (page,) = self._take(1)
        seq.table.append(page)
        return RowCopy(match.partial_page, page, match.partial_rows)

    def landed(self) -> None:
        """The step in flight is over: what it copied from may be evicted."""
        for node in self._copy_sources:
            self.tree.unpin(node)
        self._copy_sources.clear()

    def take_wipe(self) -> tuple[int, ...]:
        """The pages that the next step wipes."""
        pages, self.wipe = tuple(self.wipe), []
        return pages

    def missing(self, seq: Sequence, end: int) -> int:
        """Pages that the table lacks to hold tokens [0, end)."""
        return self.pool.pages_for(end) - len(seq.table)

    def grow(self, seq: Sequence, end: int) -> None:
        """Take pages to hold tokens [0, end). The caller has seen that they are available."""
        missing = self.missing(seq, end)
        if missing > 0:
            seq.table.extend(self._take(missing))

    def publish(self, seq: Sequence, *, tail: bool) -> None:
        """Put committed full pages into the tree; if `tail`, name the rows of the last page there too."""
        if seq.node is None:
            raise ValueError("only an admitted sequence publishes")
        size = self.pool.page_size
        full = seq.computed // size
        if full > seq.shared:
            self._take_back_tail(seq)
            done = self.tree.extend(
                seq.node, seq.tokens[seq.shared * size : full * size], seq.table[seq.shared : full]
            )
            seq.table[seq.shared : full] = array(PAGE_TYPE, done.pages)
            seq.node, seq.shared = done.node, full
            self.collapsed_pages += done.collapsed
        rows = seq.computed - full * size
        if tail and rows and (seq.tail is None or len(seq.tail.tokens) != rows):
            self._take_back_tail(seq)
            tokens = seq.tokens[full * size : seq.computed]
            seq.tail = self.tree.add_tail(seq.node, tokens, seq.table[full], writer=seq)

    def reclaim(self, seq: Sequence) -> None:
        """If a sibling has covered this sequence's tail, make its page private again."""
        if seq.tail is not None and not seq.tail.attached:
            self._take_back_tail(seq)

    def release(self, seq: Sequence) -> None:
        """Stop holding anything. What was published stays in the tree; pages with nothing published go."""
        self.reclaim(seq)
        kept = seq.shared
        if seq.tail is not None:
            seq.tail.writer = None
            self.tree.unpin(seq.tail)
            kept += 1
        self.pool.give(seq.table[kept:])
        self._forget(seq)

    def discard(self, seq: Sequence) -> None:
        """Stop holding anything after a failed step: all pages of its own are freed, also a published tail,
        and wiped before anyone reads them."""
        self._take_back_tail(seq)
        own = seq.table[seq.shared :].tolist()
        self.pool.give(own)
        self.wipe += own
        self._forget(seq)

    def private_pages(self, seq: Sequence) -> list[int]:
        """Pages that stand in this table only."""
        own = seq.shared + (1 if seq.tail is not None and seq.tail.attached else 0)
        return seq.table[own:].tolist()

    def _forget(self, seq: Sequence) -> None:
        if seq.node is not None:
            self.tree.unpin(seq.node)
        seq.node = seq.tail = None
        seq.table, seq.shared, seq.computed, seq.target = array(PAGE_TYPE), 0, 0, 0

    def _take_back_tail(self, seq: Sequence) -> None:
        if seq.tail is not None:
            self.tree.take_tail(seq.tail)
            seq.tail = None

    def _take(self, count: int) -> list[int]:
        short = count - self.pool.free_pages
        if short > 0:
            self.tree.evict(short)
        return self.pool.take(count)
