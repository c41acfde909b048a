"""Steps for the GPU check: random forests of sequences, and batches that share long prefixes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from engine.attention.base import KvShape
from engine.plan import CascadeLevel, CascadePlan, Int32, StepPlan

PAGE = 16


@dataclass(frozen=True, eq=False)
class Span:
    """Pages that several sequences share. Two spans are the same only if they are one object."""

    pages: Int32


@dataclass(frozen=True)
class Member:
    """One sequence of a step: `rows` rows from absolute position `start`, after shared spans (outermost
    first) on private pages, which may be more than the rows need."""

    spans: tuple[Span, ...]
    private: Int32
    start: int
    rows: int

    def flat(self) -> Member:
        """The same rows over the same pages, sharing nothing."""
        return replace(self, spans=(), private=np.concatenate([s.pages for s in self.spans] + [self.private]))

    def chunks(self, size: int) -> list[Member]:
        """The same rows, at most `size` at a time."""
        ends = [*range(self.start + size, self.start + self.rows, size), self.start + self.rows]
        starts = [self.start, *ends[:-1]]
        return [replace(self, start=a, rows=b - a) for a, b in zip(starts, ends, strict=True)]

    @property
    def shared_tokens(self) -> int:
        return sum(len(span.pages) for span in self.spans) * PAGE


class Case(NamedTuple):
    """A random forest: a name, the executor's sizes, and the sequences in the order of the tree."""

    name: str
    shape: KvShape
    members: tuple[Member, ...]

    @property
    def rows(self) -> int:
        return sum(member.rows for member in self.members)


def random_case(seed: int, head_dim: int, *, decode: bool = False) -> Case:
    """A forest of up to 3 nested levels with loners, prefill beside decode (or decode rows alone)."""
    rng = random.Random(seed)
    pages = iter(rng.sample(range(1, 2000), 1999))
    members = [
        member
        for _ in range(rng.randint(1, 4))
        for member in _grow(rng, (), pages, rng.randint(0, 3), (1,) if decode else (1, 1, 2, 5, 17, 40, 150))
    ]
    heads, kv_heads = rng.choice([(8, 8), (8, 2), (32, 8), (14, 2), (9, 3), (16, 1)])
    kind = "decode" if decode else "mixed"
    name = f"{kind} {seed}: {len(members)} sequences, {heads}/{kv_heads} heads of {head_dim}"
    return Case(name, KvShape(2, 2000, PAGE, heads, kv_heads, head_dim), tuple(members))


def _grow(
    rng: random.Random, path: tuple[Span, ...], pages: Iterator[int], depth: int, rows: Sequence[int]
) -> list[Member]:
    members = []
    for _ in range(rng.randint(1, 4)):
        if depth and rng.random() < 0.6:
            span = Span(_int32([next(pages) for _ in range(rng.choice([1, 2, 9]))]))
            members += _grow(rng, (*path, span), pages, depth - 1, rows)
            continue
        shared = sum(len(span.pages) for span in path) * PAGE
        start, count = shared + rng.choice([0, 1, 15, 16, 17, 100]), rng.choice(rows)
        own = [next(pages) for _ in range(-(-(start + count - shared) // PAGE))]
        members.append(Member(path, _int32(own), start, count))
    return members


def shared_batch(prefix: int, batch: int, groups: int, tail: int) -> tuple[Member, ...]:
    """A decode step: `batch` sequences in `groups` groups, each under a prefix of its own (in tokens, whole
    pages), each with `tail` private tokens, the new one counted."""
    at = 1
    members = []
    for group in range(groups):
        span = Span(np.arange(at, at + prefix // PAGE, dtype=np.int32))
        at += len(span.pages)
        for _ in range(batch // groups + (group < batch % groups)):
            own = np.arange(at, at + -(-tail // PAGE), dtype=np.int32)
            at += len(own)
            members.append(Member((span,), own, prefix + tail - 1, 1))
    return tuple(members)


def pages_of(members: Sequence[Member]) -> int:
    """Pages that a pool needs for these members, the zero page counted."""
    return 1 + max(int(array.max()) for m in members for array in (*(s.pages for s in m.spans), m.private))


def step_plan(members: Sequence[Member]) -> StepPlan:
    """A step in which neighbours share segments as far as their spans are the same."""
    depth = max(len(member.spans) for member in members)
    rows = [member.rows for member in members]
    levels = [_shared(members, level) for level in range(depth)]
    levels.append(_private(members))
    positions = np.concatenate([np.arange(m.start, m.start + m.rows) for m in members])
    tables = [m.flat().private for m in members]
    slots = [
        table[at // PAGE].astype(np.int64) * PAGE + at % PAGE
        for table, at in zip(tables, np.split(positions, np.cumsum(rows)[:-1]), strict=True)
    ]
    return StepPlan(
        step=0,
        sequence_ids=tuple(range(len(members))),
        row_indptr=_indptr(rows),
        token_ids=np.zeros(len(positions), np.int64),
        write_slots=np.concatenate(slots),
        attention=CascadePlan(
            PAGE, tuple(levels), _int32([m.shared_tokens for m in members]), positions.astype(np.int32)
        ),
        samples=(),
        sample_sequences=(),
    )


def _shared(members: Sequence[Member], level: int) -> CascadeLevel:
    groups = [
        (path[level].pages if len(path) > level else np.zeros(0, np.int32), sum(m.rows for m in run))
        for path, run in groupby(members, key=lambda m: m.spans[: level + 1])
    ]
    return CascadeLevel(
        _indptr([rows for _, rows in groups]),
        _indptr([len(pages) for pages, _ in groups]),
        np.concatenate([pages for pages, _ in groups]),
        _int32([PAGE if len(pages) else 0 for pages, _ in groups]),
    )


def _private(members: Sequence[Member]) -> CascadeLevel:
    tokens = [m.start + m.rows - m.shared_tokens for m in members]
    pages = [m.private[: -(-n // PAGE)] for m, n in zip(members, tokens, strict=True)]
    return CascadeLevel(
        _indptr([m.rows for m in members]),
        _indptr([len(p) for p in pages]),
        np.concatenate(pages),
        _int32([(n - 1) % PAGE + 1 for n in tokens]),
    )


def _indptr(counts: Sequence[int]) -> Int32:
    return _int32(np.cumsum([0, *counts]))


def _int32(values: Sequence[int] | np.ndarray) -> Int32:
    return np.asarray(values, np.int32)
