"""Random forests of sequences for the FlashInfer tests, in pages of 4 tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.engine.attention.plans import Member

PAGE = 4


def random_members(rng: random.Random, *, rows: int, pages: int) -> list[Member]:
    """Sequences of up to three nested spans in DFS order, each with 1 to `rows` rows, whose pages are
    different ones of 1..pages-1."""
    fresh = iter(rng.sample(range(1, pages), pages - 1))
    return [
        member
        for _ in range(rng.randint(1, 3))
        for member in _grow(rng, (), fresh, rows, depth=rng.randint(0, 3))
    ]


def _grow(
    rng: random.Random, path: tuple[tuple[int, ...], ...], fresh: Iterator[int], rows: int, depth: int
) -> list[Member]:
    members = []
    for _ in range(rng.randint(1, 3)):
        if depth and rng.random() < 0.7:
            span = tuple(next(fresh) for _ in range(rng.randint(1, 2)))
            members += _grow(rng, (*path, span), fresh, rows, depth - 1)
            continue
        shared = sum(map(len, path)) * PAGE
        start, count = shared + rng.randint(0, 9), rng.randint(1, rows)
        own = tuple(next(fresh) for _ in range(-(-(start + count - shared) // PAGE)))
        members.append(Member(path, own, start, count))
    return members
