"""At start: does a row keep its bits whatever runs beside it, on this machine, at this thread count?

One real layer with attention over real pages, the head and log-softmax run the same rows alone and in
steps of many sizes. Where bits differ the padding is raised; where that doesn't help, equal bits are not
promised and the server says so. Only the arithmetic is probed: a few hundred milliseconds, not a proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.pipeline import Padding, Pipeline
from engine.plan import SampleRow
from engine.scratch import Chunk, flat_plan
from engine.types import SamplingParams, TokenLogprob

# With 16 and 64 beside odd sizes: or else rows that differ outside multiples of 8 would all agree.
STEP_ROWS = (1, 2, 3, 5, 9, 16, 17, 33, 64, 100, 257)
PADDINGS = (Padding(), Padding(rows=8, queries=16), Padding(rows=16, queries=32))
# Rows that also run quite alone. Each costs a pass over the head's weights.
_ALONE = 16
# Tokens of context that the longest sequences have, where two tiles are more.
_FAR = 640
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)


class Verdict(NamedTuple):
    """The padding to use, whether bits were equal with it, and what to tell the user."""

    padding: Padding
    bit_identical: bool
    notes: tuple[str, ...] = ()


class Probed(NamedTuple):
    """What a step gave for its rows."""

    hidden: Tensor
    logits: Tensor
    reports: list[TokenLogprob | None]


def probe(pipeline: Pipeline) -> Verdict:
    """Find the least padding with which the rows of `pipeline` keep their bits, and leave it set.

    Its executor needs `pages_needed` pages. Never raises for unequal bits.
    """
    for padding in PADDINGS:
        pipeline.pad(padding)
        different = next(_differences(pipeline), None)
        if different is None:
            raised = () if padding == PADDINGS[0] else (f"rows are padded to multiples of {padding.rows}",)
            return Verdict(padding, True, raised)
    return Verdict(
        padding,
        False,
        (f"results may change in the last bits with what runs beside them: {different} differed at start",),
    )


def pages_needed(page_size: int, tile: int, context: int) -> int:
    """Pages that the probe's sequences take, the zero page counted."""
    last = _sequences(page_size, tile, context, 1)[-1]
    return last.first_page + -(-last.end // page_size)


def _differences(pipeline: Pipeline) -> Iterator[str]:
    """Name the steps in which a row's bits differ from those it has in the largest step."""
    attention, config = pipeline.attention, pipeline.decoder.config
    sequences = _sequences(attention.page_size, attention.align, config.context_length, config.vocab_size)
    for chunk in sequences:
        if chunk.start:
            before = [(token + 1) % config.vocab_size for token in range(chunk.start)]
            pipeline.hidden(
                flat_plan([Chunk(chunk.first_page, 0, before)], attention.page_size, attention.align)
            )
    total = sum(len(chunk.tokens) for chunk in sequences)
    whole = _run(pipeline, sequences)
    for size in STEP_ROWS:
        # Single rows of many sequences, as in decoding, and many rows of one, as in prefill.
        for first in {0, max(0, total - size)}:
            if not _same(_run(pipeline, _rows(sequences, first, first + size)), whole, first):
                yield f"a step of {size} rows"
    for row in np.linspace(0, total - 1, _ALONE).astype(int).tolist():
        if not _same(_run(pipeline, _rows(sequences, row, row + 1)), whole, row):
            yield "a row alone"


def _run(pipeline: Pipeline, chunks: Sequence[Chunk]) -> Probed:
    plan = flat_plan(chunks, pipeline.attention.page_size, pipeline.attention.align)
    hidden = pipeline.hidden(plan)
    logits = pipeline.logits(hidden, range(plan.rows))
    rows = [SampleRow(row, _PARAMS, 0, 0, 0, 0) for row in range(plan.rows)]
    return Probed(hidden, logits, pipeline.sampler.sample(logits, rows)[1])


def _same(part: Probed, whole: Probed, first: int) -> bool:
    rows = slice(first, first + len(part.reports))
    return (
        torch.equal(part.hidden, whole.hidden[rows])
        and torch.equal(part.logits, whole.logits[rows])
        and part.reports == whole.reports[rows]
    )


def _sequences(page_size: int, tile: int, context: int, vocab: int) -> list[Chunk]:
    """The largest step, 257 rows where the context allows: 64 decode rows, most with short contexts and
    some with several tiles, then a chunk from nothing and one that crosses a tile's edge."""
    far = max(70, min(2 * tile, _FAR))
    starts = [far + 3 * i if i % 16 == 0 else 5 * i % 99 for i in range(64)]
    shapes = [(start, 1) for start in starts] + [(0, 43), (far - 70, 150)]
    chunks, page, token = [], 1, 0
    for start, rows in shapes:
        rows = min(rows, context)
        start = max(0, min(start, context - rows))
        chunks.append(Chunk(page, start, [(token + i) * 7919 % vocab for i in range(rows)]))
        page += -(-(start + rows) // page_size)
        token += rows
    return chunks


def _rows(sequences: Sequence[Chunk], first: int, end: int) -> list[Chunk]:
    """The chunks of rows [first, end) of the largest step."""
    found, at = [], 0
    for chunk in sequences:
        low, high = max(first - at, 0), min(end - at, len(chunk.tokens))
        if low < high:
            found.append(Chunk(chunk.first_page, chunk.start + low, chunk.tokens[low:high]))
        at += len(chunk.tokens)
    return found
