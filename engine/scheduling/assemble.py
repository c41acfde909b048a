"""From chosen chunks to the arrays of a StepPlan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.plan import (
    CascadeLevel,
    Int32,
    Int64,
    RowCopy,
    SampleRow,
    ScoreRows,
    StepPlan,
)
from engine.scheduling.cascade import CascadePlanner
from engine.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """The next `rows` rows of a sequence, and the copy that must come before them."""

    seq: Sequence
    rows: int
    copy: RowCopy | None = None


def assemble(step: int, chunks: list[Chunk], planner: CascadePlanner, wipe: tuple[int, ...]) -> StepPlan:
    """Build the plan of a step. Rows follow the cascade's order of the sequences."""
    batch = [c.seq for c in chunks]
    starts = [seq.computed for seq in batch]
    order, attention = planner.plan([seq.table for seq in batch], starts, [c.rows for c in chunks])
    if attention.groups:
        chunks = [chunks[i] for i in order]
        starts = [starts[i] for i in order]
    private = attention.levels[-1]
    token_ids = list[int]()
    samples, owners, scores = list[SampleRow](), list[int](), list[ScoreRows]()
    for index, ((seq, rows, _), start) in enumerate(zip(chunks, starts, strict=True)):
        tokens = seq.tokens
        end = start + rows
        if rows == 1:
            token_ids.append(tokens[start])
        else:
            token_ids += tokens[start:end]
        if (score := _score(seq, start, end, len(token_ids) - rows, index)) is not None:
            scores.append(score)
        # A token is wanted when the chunk ends with the last known token.
        if end == len(tokens) and seq.request.params.max_tokens > 0:
            samples.append(_sample(seq, len(token_ids) - 1))
            owners.append(index)
    return StepPlan(
        step=step,
        sequence_ids=tuple([c.seq.id for c in chunks]),
        row_indptr=private.qo_indptr,
        token_ids=np.array(token_ids, np.int64),
        write_slots=_write_slots(attention.positions, attention.kv_start, private, planner.rules.page_size),
        attention=attention,
        samples=tuple(samples),
        sample_sequences=tuple(owners),
        copies=tuple([c.copy for c in chunks if c.copy is not None]),
        wipe=wipe,
        scores=tuple(scores),
    )


def _sample(seq: Sequence, row: int) -> SampleRow:
    """The sample of a sequence's last known token, which stands in `row`."""
    request = seq.request
    return SampleRow(
        row,
        request.params,
        seq.seed,
        request.prompt_index,
        request.choice_index,
        seq.generated,
        past=seq.past,
        constraint=request.constraint,
        bound=seq.bound,
    )


def _score(seq: Sequence, start: int, end: int, first: int, index: int) -> ScoreRows | None:
    """The prompt tokens that rows [start, end) of a sequence predict and whose log-probability is wanted.

    `first` is the step's row of `start`, `index` the sequence's place in the plan.
    """
    position = seq.next_score
    if position is None or position > end:
        return None
    targets = seq.request.prompt[position : end + 1]
    if not targets:
        return None
    return ScoreRows(first + position - 1 - start, targets, seq.request.prompt_logprobs or 0, index)


def _write_slots(positions: Int32, kv_start: Int32, private: CascadeLevel, page_size: int) -> Int64:
    """Where each row's own KV goes: in the page of its sequence's private level that holds its position."""
    if len(kv_start) == len(positions):  # one row each, the last of its sequence
        pages = private.kv_indices[private.kv_indptr[1:] - 1]
        return pages.astype(np.int64) * page_size + positions % page_size
    owner = np.repeat(np.arange(len(kv_start)), np.diff(private.qo_indptr))
    token = positions - kv_start[owner]
    pages = private.kv_indices[private.kv_indptr[owner] + token // page_size]
    return pages.astype(np.int64) * page_size + token % page_size
