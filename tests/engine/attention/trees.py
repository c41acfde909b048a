"""Random trees of sequences over paged KV, and their plans as the planner makes them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from bench_batches import step_plan
from hypothesis import strategies as st

from engine.plan import StepPlan
from engine.scheduling.cascade import Span, plan_cascade

# Sequences grow until the pool holds this many tokens: the oracle takes one row at a time.
MOST_TOKENS = 6000


class Tree(NamedTuple):
    """Sequences of one step over pages 1 .. pages, and the tile that they are cut to."""

    spans: list[Span]
    pages: int
    page_size: int
    tile: int

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.spans)


class Node(NamedTuple):
    """A shared prefix: its tokens, and the full pages that hold them (the rest is each reader's own)."""

    tokens: int
    pages: list[int]
    depth: int


@st.composite
def trees(draw: st.DrawFn, page_sizes: Sequence[int]) -> Tree:
    """1 to 64 sequences under prefixes nested up to 5 deep; three in four have a tile to share."""
    tile = draw(st.sampled_from([16, 32, 64, 256]))
    page_size = draw(st.sampled_from(page_sizes))
    depth = draw(st.integers(0, 5))
    count = draw(st.one_of(st.integers(1, 8), st.integers(1, 64)))
    shares = draw(st.sampled_from([True, True, True, False]))
    return grow(random.Random(draw(st.integers(0, 2**32))), page_size, tile, depth, count, shares)


def grow(rng: random.Random, page_size: int, tile: int, depth: int, count: int, shares: bool) -> Tree:
    """Build the tree: nodes first, then sequences that end somewhere below them, in random order."""
    fresh = iter(range(1, 1_000_000))
    used = [0]

    def take(tokens: int) -> list[int]:
        pages = [next(fresh) for _ in range(-(-tokens // page_size))]
        used.extend(pages)
        return pages

    def child(parent: Node, tokens: int) -> Node:
        """A longer prefix. Only its full pages can be read by several; the parent's open page is copied."""
        end = parent.tokens + tokens
        own = take(end - len(parent.pages) * page_size)
        return Node(end, (parent.pages + own)[: end // page_size], parent.depth + 1)

    lengths = [0, 1, page_size - 1, page_size, tile - 1, tile, tile + 1, 2 * tile, 3 * tile + 5]
    nodes = [Node(0, [], 0)]
    if shares:
        count, depth = max(2, count), max(1, depth)
        nodes.append(child(nodes[0], tile * rng.randint(1, 2) + rng.choice([0, 1, page_size])))
    for _ in range(rng.randint(0, 6)):
        parent = rng.choice(nodes)
        if parent.depth < depth and len(used) * page_size < MOST_TOKENS / 2:
            nodes.append(child(parent, rng.choice(lengths)))
    spans = []
    for number in range(count):
        node = nodes[1] if shares and number < 2 else rng.choice(nodes)
        far = rng.choice(lengths) if len(used) * page_size < MOST_TOKENS else rng.randint(0, page_size)
        start = node.tokens + far
        rows = rng.choice([1, 1, 1, 1, 2, 3, 5, 16, 17, 40]) if count < 12 else 1
        spans.append(Span(node.pages + take(start + rows - len(node.pages) * page_size), start, rows))
    rng.shuffle(spans)
    return Tree(spans, max(used), page_size, tile)


def planned(tree: Tree, levels: int) -> tuple[list[int], StepPlan]:
    """The planner's plan of at most `levels` levels: (which sequence stands where, the step)."""
    order, attention = plan_cascade(tree.spans, tree.page_size, tree.tile, "force", levels)
    return order, step_plan([tree.spans[i] for i in order], attention, tree.page_size)


def flat(spans: Sequence[Span], page_size: int, tile: int) -> StepPlan:
    """These sequences in this order, sharing nothing."""
    return step_plan(spans, plan_cascade(spans, page_size, tile, "off").attention, page_size)


def split(span: Span) -> list[Span]:
    """The same rows, one at a time."""
    return [span._replace(start=span.start + i, rows=1) for i in range(span.rows)]
