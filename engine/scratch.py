"""Plans made by hand, for measuring and probing at start: a few sequences on pages of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.plan import CascadeLevel, CascadePlan, Int32, StepPlan


class Chunk(NamedTuple):
    """`rows` rows from absolute position `start` of a sequence whose pages are consecutive ones, from
    `first_page`. `tokens` are the rows' ids."""

    first_page: int
    start: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def flat_plan(chunks: Sequence[Chunk], page_size: int, align: int) -> StepPlan:
    """A step of these chunks, sharing nothing and sampling nothing."""
    indptr = _indptr([len(chunk.tokens) for chunk in chunks])
    pages = [-(-chunk.end // page_size) for chunk in chunks]
    level = CascadeLevel(
        indptr,
        _indptr(pages),
        np.concatenate([c.first_page + np.arange(n) for c, n in zip(chunks, pages, strict=True)]).astype(
            np.int32
        ),
        np.asarray([(chunk.end - 1) % page_size + 1 for chunk in chunks], np.int32),
    )
    positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
    base = np.repeat([chunk.first_page * page_size for chunk in chunks], [len(c.tokens) for c in chunks])
    return StepPlan(
        step=0,
        sequence_ids=tuple(range(len(chunks))),
        row_indptr=indptr,
        token_ids=np.concatenate([np.asarray(chunk.tokens, np.int64) for chunk in chunks]),
        write_slots=base + positions,
        attention=CascadePlan(align, (level,), np.zeros(len(chunks), np.int32), positions.astype(np.int32)),
        samples=(),
        sample_sequences=(),
    )


def _indptr(counts: Sequence[int]) -> Int32:
    return np.cumsum([0, *counts]).astype(np.int32)
