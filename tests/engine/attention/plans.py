"""Step plans for tests, built from page lists: any forest of sequences, at any number of levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from engine.plan import CascadeLevel, CascadePlan, SampleRow, StepPlan


@dataclass(frozen=True)
class Member:
    """One sequence of a step: shared spans (page lists, outermost first), private pages, and which rows
    run: `rows` of them from absolute position `start`. Private pages may be more than the rows need."""

    spans: tuple[tuple[int, ...], ...]
    private: tuple[int, ...]
    start: int
    rows: int

    def flat(self) -> Member:
        """The same rows over the same pages, sharing nothing."""
        return replace(self, spans=(), private=sum(self.spans, ()) + self.private)

    def pages(self) -> tuple[int, ...]:
        return self.flat().private

    def split(self, sizes: Sequence[int]) -> list[Member]:
        """The same rows in consecutive chunks."""
        assert sum(sizes) == self.rows
        starts = self.start + np.cumsum([0, *sizes[:-1]])
        return [replace(self, start=int(s), rows=n) for s, n in zip(starts, sizes, strict=True)]


def step_plan(
    members: Sequence[Member],
    page_size: int,
    align: int,
    *,
    tokens: Sequence[int] | None = None,
    samples: tuple[SampleRow, ...] = (),
    sample_sequences: tuple[int, ...] = (),
) -> StepPlan:
    """A plan in which neighbours with equal outer spans share segments. Members are in DFS order."""
    depth = max(len(m.spans) for m in members)
    levels = [_shared_level(members, level, page_size) for level in range(depth)]
    indptr = _indptr([m.rows for m in members])
    kv_start = [sum(len(s) for s in m.spans) * page_size for m in members]
    levels.append(_private_level(members, kv_start, indptr, page_size))
    positions = np.concatenate([np.arange(m.start, m.start + m.rows) for m in members])
    slots = [
        np.asarray(m.pages())[p // page_size] * page_size + p % page_size for m, p in _positions(members)
    ]
    rows = int(indptr[-1])
    return StepPlan(
        step=0,
        sequence_ids=tuple(range(len(members))),
        row_indptr=indptr,
        token_ids=np.asarray(tokens if tokens is not None else [0] * rows, np.int64),
        write_slots=np.concatenate(slots).astype(np.int64),
        attention=CascadePlan(align, tuple(levels), _int32(kv_start), _int32(positions)),
        samples=samples,
        sample_sequences=sample_sequences,
    )


def _positions(members: Sequence[Member]) -> list[tuple[Member, np.ndarray]]:
    return [(m, np.arange(m.start, m.start + m.rows)) for m in members]


def _shared_level(members: Sequence[Member], level: int, page_size: int) -> CascadeLevel:
    """Neighbours that agree on spans up to this level share a segment; the others have empty ones."""
    groups = [(key, list(run)) for key, run in groupby(members, key=lambda m: m.spans[: level + 1])]
    pages = [key[level] if len(key) > level else () for key, _ in groups]
    return CascadeLevel(
        _indptr([sum(m.rows for m in run) for _, run in groups]),
        _indptr([len(p) for p in pages]),
        _int32(sum(pages, ())),
        _int32([page_size if p else 0 for p in pages]),
    )


def _private_level(
    members: Sequence[Member], kv_start: Sequence[int], indptr: np.ndarray, page_size: int
) -> CascadeLevel:
    lengths = [m.start + m.rows - start for m, start in zip(members, kv_start, strict=True)]
    pages = [m.private[: -(-n // page_size)] for m, n in zip(members, lengths, strict=True)]
    last = [(n - 1) % page_size + 1 for n in lengths]
    return CascadeLevel(indptr, _indptr([len(p) for p in pages]), _int32(sum(pages, ())), _int32(last))


def _indptr(counts: Sequence[int]) -> np.ndarray:
    return _int32(np.cumsum([0, *counts]))


def _int32(values: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(values, np.int32)
