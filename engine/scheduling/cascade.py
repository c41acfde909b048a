"""From the batch of one step to a CascadePlan: who reads which whole tiles of KV together.

Hydragen (Juravsky et al., 2024) and ChunkAttention (Ye et al., 2024) describe attention over a shared prefix
read once for many queries; here any number of groups, nested in each other, and sequences that share nothing
stand in one plan. sharing.py finds the batch's prefix tree, folding.py chooses what is opened, segments.py
writes the arrays; this module puts them together and keeps what the next step can use.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Literal, NamedTuple

import numpy as np

from engine.plan import CascadeLevel, CascadePlan, GateCosts, Int32, Int64
from engine.scheduling.folding import NOT_OPENED, Prices, fold
from engine.scheduling.gate import prices
from engine.scheduling.segments import Forest, arrange, private_level, shared_levels
from engine.scheduling.sharing import Keys, Sharing, share, tile_keys

CascadeMode = Literal["off", "auto", "force"]


class Rules(NamedTuple):
    """How batches are cut. Shared spans are multiples of `align` tokens. `levels` counts the private one.

    `token_bytes` is the KV of one token in one layer, which `costs` are weighed against in mode "auto".
    """

    page_size: int
    align: int
    mode: CascadeMode = "auto"
    levels: int = 4
    costs: GateCosts = GateCosts()
    token_bytes: int = 1


class Span(NamedTuple):
    """The rows of one sequence in a step: tokens [start, start + rows), over the pages of `table`."""

    table: Sequence[int]
    start: int
    rows: int


class Planned(NamedTuple):
    """A plan, and the order of its sequences: indices into the batch. Rows of the step follow it."""

    order: list[int]
    attention: CascadePlan


def plan_cascade(
    spans: Sequence[Span],
    page_size: int,
    align: int,
    mode: CascadeMode,
    levels: int = 4,
    costs: GateCosts | None = None,
    token_bytes: int = 1,
) -> Planned:
    """Plan one batch, with nothing known from before; see Rules and CascadePlanner.plan."""
    planner = CascadePlanner(Rules(page_size, align, mode, levels, costs or GateCosts(), token_bytes))
    return planner.plan([s.table for s in spans], [s.start for s in spans], [s.rows for s in spans])


class CascadePlanner:
    """Plans one step after another, and makes a step of pure growth from the one before.

    Plans given out are never changed, and share the arrays that stay the same. A sequence is known by its
    table, a list that lives as long as the sequence runs without a break: its pages that end at or before the
    first row of a plan stay as they were, later ones may change, and more may come. So a plan stays valid
    while every sequence goes on by the row it had: what it shares with others can change only when it
    completes a tile whose page another holds, which is looked up.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        tile_bytes = rules.align * rules.token_bytes
        self._prices = Prices(1) if rules.mode == "force" else prices(rules.costs, tile_bytes)
        self._last: _Last | None = None

    def plan(self, tables: list[Sequence[int]], starts: list[int], rows: list[int]) -> Planned:
        """Plan a step: sequence i runs tokens [starts[i], starts[i] + rows[i]) over the pages of tables[i].

        Groups stand in depth-first order of the batch's tree, then the sequences that share nothing. A
        sequence shares only tiles that end at or before its first row.
        """
        last = self._last
        if last is not None and last.goes_on(tables, starts, rows):
            planned = _grown(last, self.rules)
            if planned is not None:
                return planned
        return self._anew(tables, starts, rows)

    def forget(self) -> None:
        """Plan the next step from nothing."""
        self._last = None

    def _anew(self, tables: list[Sequence[int]], starts: list[int], rows: list[int]) -> Planned:
        rules = self.rules
        keys: Keys | None = None
        forest, refused = None, 0
        if rules.mode != "off" and rules.levels > 1 and len(tables) > 1:
            keys = tile_keys(tables, starts, rules.page_size, rules.align)
            if len(keys.pages):
                forest, refused = self._open(share(keys))
        order, kv_start, members = list(range(len(tables))), np.zeros(len(tables), np.int32), 0
        if forest is not None:
            order, members = forest.order, forest.members
            kv_start = (forest.reach * rules.align).astype(np.int32)
        own_tables, own_rows = [tables[i] for i in order], [rows[i] for i in order]
        first = np.array([starts[i] for i in order], np.int64)
        counts = np.array(own_rows, np.int64)
        indptr = np.zeros(len(order) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        shared: tuple[CascadeLevel, ...] = ()
        saved = 0
        if forest is not None:
            shared = shared_levels(forest, own_tables, indptr, rules.page_size, rules.align)
            saved = int(kv_start.sum()) - forest.tiles * rules.align
        attention = CascadePlan(
            rules.align,
            (*shared, private_level(own_tables, first + counts, kv_start, indptr, rules.page_size)),
            kv_start,
            _positions(first, counts, indptr),
            groups=0 if forest is None else len(forest.node),
            grouped_rows=int(indptr[members]),
            saved_tokens=saved,
            refused=refused,
        )
        planned = Planned(order, attention)
        decoding = int(indptr[-1]) == len(rows)
        self._last = _Last(tables, starts, own_tables, keys, planned) if decoding else None
        return planned

    def _open(self, tree: Sharing) -> tuple[Forest | None, int]:
        """The segments to open, None for none, and how many prefixes the gate has refused."""
        rules = self.rules
        chosen = fold(tree, rules.levels - 1, self._prices)
        forest = arrange(tree, chosen) if np.any(chosen != NOT_OPENED) else None
        return forest, _refused(tree, chosen, rules.levels - 1)


class _Last:
    """The step before, in which every sequence ran one row. `keys` are its tiles (None where nothing is
    shared by rule), `completed` the last pages of tiles that sequences have completed since they were
    gathered; own_tables are the tables in the plan's order."""

    def __init__(
        self,
        tables: list[Sequence[int]],
        starts: list[int],
        own_tables: list[Sequence[int]],
        keys: Keys | None,
        planned: Planned,
    ) -> None:
        self._tables = tables
        self._starts = np.array(starts, np.int64)
        self.own_tables = own_tables
        self.keys = keys
        self.completed = set[int]()
        self.planned = planned

    def goes_on(self, tables: list[Sequence[int]], starts: list[int], rows: list[int]) -> bool:
        """Whether the same sequences run their next row, one each; it is then remembered as the last step."""
        if len(tables) != len(self._tables) or not all(map(is_, tables, self._tables)):
            return False
        now = np.array(starts, np.int64)
        if rows.count(1) != len(rows) or not np.array_equal(now, self._starts + 1):
            return False
        self._starts = now
        return True


def _grown(last: _Last, rules: Rules) -> Planned | None:
    """The last plan, one row further; None where a completed tile may be shared with another."""
    old, size = last.planned.attention, rules.page_size
    positions = old.positions + np.int32(1)
    private = old.levels[-1]
    full = private.last_page_len == size
    turned = np.flatnonzero(full).tolist()
    if turned:
        if last.keys is not None and not _unshared(last, last.keys, positions, turned, rules):
            return None
        private = _turned(private, last.own_tables, positions, turned, size)
    private = private._replace(last_page_len=np.where(full, np.int32(1), old.levels[-1].last_page_len + 1))
    attention = old._replace(levels=(*old.levels[:-1], private), positions=positions)
    last.planned = Planned(last.planned.order, attention)
    return last.planned


def _unshared(last: _Last, keys: Keys, positions: Int32, turned: list[int], rules: Rules) -> bool:
    """Note the tiles that were completed; False where another sequence may hold one of them."""
    for i in turned:
        start = int(positions[i])
        if start % rules.align == 0:
            page = last.own_tables[i][start // rules.page_size - 1]
            if page in last.completed or keys.hold(page):
                return False
            last.completed.add(page)
    return True


def _turned(
    private: CascadeLevel, tables: list[Sequence[int]], positions: Int32, turned: list[int], page_size: int
) -> CascadeLevel:
    """Some sequences have filled a page, which may have become another equal one, and began the next."""
    at = np.array(turned)
    new = [int(p) // page_size for p in positions[at]]
    more = np.zeros(len(private.kv_indptr), np.int32)
    more[at + 1] = 1
    indptr = private.kv_indptr + np.cumsum(more, dtype=np.int32)
    indices = np.insert(
        private.kv_indices,
        private.kv_indptr[at + 1],
        [tables[i][n] for i, n in zip(turned, new, strict=True)],
    )
    indices[indptr[at + 1] - 2] = [tables[i][n - 1] for i, n in zip(turned, new, strict=True)]
    return private._replace(kv_indptr=indptr, kv_indices=indices)


def _refused(tree: Sharing, chosen: Int64, levels: int) -> int:
    """Shared prefixes that were not opened although a level was free for them."""
    shut = np.flatnonzero(chosen == NOT_OPENED)
    if not len(shut):
        return 0
    parents, count = tree.parent.tolist(), len(chosen)
    isopen = (chosen != NOT_OPENED).tolist()
    above, below = [0] * count, [0] * count
    for v in range(count):
        up = parents[v]
        above[v] = isopen[v] + (above[up] if up >= 0 else 0)
    for v in range(count - 1, -1, -1):
        below[v] += isopen[v]
        up = parents[v]
        if up >= 0:
            below[up] = max(below[up], below[v])
    return sum(above[v] + below[v] < levels for v in shut.tolist())


def _positions(first: Int64, counts: Int64, indptr: Int32) -> Int32:
    if len(counts) == int(indptr[-1]):
        return first.astype(np.int32)
    return (np.arange(int(indptr[-1])) + np.repeat(first - indptr[:-1], counts)).astype(np.int32)
