"""From chosen chunks to the arrays of a StepPlan."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from engine.plan import RowCopy, SampleRow, StepPlan
from engine.scheduling.cascade import CascadeMode, Span, plan_cascade
from engine.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """The next `rows` rows of a sequence, and the copy that must come before them."""

    seq: Sequence
    rows: int
    copy: RowCopy | None = None


class Layout(Protocol):
    """The limits that shape a plan."""

    @property
    def align(self) -> int: ...
    @property
    def cascade(self) -> CascadeMode: ...


def assemble(
    step: int, chunks: list[Chunk], page_size: int, layout: Layout, wipe: tuple[int, ...]
) -> StepPlan:
    """Build the plan of a step. Rows follow the cascade's order of the sequences."""
    spans = [Span(c.seq.table, c.seq.computed, c.rows) for c in chunks]
    order, attention = plan_cascade(spans, page_size, layout.align, layout.cascade)
    chunks = [chunks[i] for i in order]
    indptr = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum([c.rows for c in chunks], out=indptr[1:])
    samples, owners = [], []
    for index, chunk in enumerate(chunks):
        if _samples(chunk):
            samples.append(_sample_row(chunk, int(indptr[index + 1]) - 1))
            owners.append(index)
    return StepPlan(
        step=step,
        sequence_ids=tuple(c.seq.id for c in chunks),
        row_indptr=indptr,
        token_ids=np.array(
            [t for c in chunks for t in c.seq.tokens[c.seq.computed : c.seq.computed + c.rows]], np.int64
        ),
        write_slots=np.concatenate([_write_slots(c, page_size) for c in chunks]),
        attention=attention,
        samples=tuple(samples),
        sample_sequences=tuple(owners),
        copies=tuple(c.copy for c in chunks if c.copy is not None),
        wipe=wipe,
    )


def _samples(chunk: Chunk) -> bool:
    """A token is wanted when the chunk ends with the last known token."""
    return chunk.rows == chunk.seq.remaining and chunk.seq.request.params.max_tokens > 0


def _sample_row(chunk: Chunk, row: int) -> SampleRow:
    seq = chunk.seq
    request = seq.request
    return SampleRow(
        row, request.params, seq.seed, request.prompt_index, request.choice_index, position=seq.generated
    )


def _write_slots(chunk: Chunk, page_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    seq, rows = chunk.seq, chunk.rows
    first = seq.computed // page_size
    pages = np.array(seq.table[first : -(-(seq.computed + rows) // page_size)], np.int64)
    at = np.arange(seq.computed, seq.computed + rows, dtype=np.int64)
    return pages[at // page_size - first] * page_size + at % page_size
