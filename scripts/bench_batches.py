"""Batches for the benches: sequences that share prefixes in given patterns, as step plans and in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.plan import CascadePlan, GateCosts, StepPlan
from engine.scheduling.cascade import CascadeMode, Span, plan_cascade


class Batch(NamedTuple):
    """Decode rows over pages 1 .. pages, one a sequence. `shared` are the spans that several read, as
    (tokens before it, tokens of it, sequences that share it)."""

    name: str
    spans: list[Span]
    pages: int
    page_size: int
    shared: tuple[tuple[int, int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of context of all rows, their own included."""
        return sum(span.start + span.rows for span in self.spans)


class Branch(NamedTuple):
    """A prefix of so many tokens, and what stands below it: further prefixes, or so many sequences."""

    tokens: int
    below: tuple[Branch, ...] = ()
    sequences: int = 0


def batch_of(name: str, roots: Sequence[Branch], tail: int, page_size: int) -> Batch:
    """Lay a forest out in pages: each sequence ends in `tail` tokens of its own, the last of which is
    this step's row. Prefixes are cut to whole pages, as the cache shares them; what is left is private."""
    spans: list[Span] = []
    shared: list[tuple[int, int, int]] = []
    last = 0

    def take(tokens: int) -> list[int]:
        nonlocal last
        first, last = last + 1, last + -(-tokens // page_size)
        return list(range(first, last + 1))

    def lay(branch: Branch, table: list[int], at: int) -> int:
        end = at + branch.tokens
        table = table + take(end // page_size * page_size - len(table) * page_size)
        members = sum(lay(below, table, end) for below in branch.below) + branch.sequences
        for number in range(branch.sequences):
            total = end + tail + number % page_size
            spans.append(Span(table + take(total - len(table) * page_size), total - 1, 1))
        if members > 1:
            shared.append((at, branch.tokens, members))
        return members

    for root in roots:
        lay(root, [], 0)
    return Batch(name, spans, last, page_size, tuple(shared))


def private(sequences: int, tokens: int, page_size: int) -> Batch:
    """Sequences that share nothing, of about `tokens` tokens each."""
    return batch_of(f"{sequences} x {tokens} private", [Branch(0, (), 1)] * sequences, tokens, page_size)


def grouped(groups: int, members: int, prefix: int, tail: int, page_size: int) -> Batch:
    """Groups of sequences, each group under a prefix of its own."""
    name = f"{groups} x {members} under {prefix}"
    return batch_of(name, [Branch(prefix, (), members)] * groups, tail, page_size)


def nested(groups: int, members: int, root: int, prefix: int, tail: int, page_size: int) -> Batch:
    """Groups of sequences, each under a prefix of its own, all under a common root."""
    below = tuple([Branch(prefix, (), members)] * groups)
    name = f"{groups} x {members} under {prefix} under {root}"
    return batch_of(name, [Branch(root, below)], tail, page_size)


def step_of(
    batch: Batch,
    align: int,
    mode: CascadeMode,
    levels: int = 4,
    costs: GateCosts | None = None,
    token_bytes: int = 1,
) -> StepPlan:
    """The batch as one step, planned as the scheduler plans it. `levels` counts the private one; `costs`
    and the bytes of a token's KV in a layer decide in mode "auto"."""
    order, attention = plan_cascade(
        batch.spans, batch.page_size, align, mode, levels, costs or GateCosts(), token_bytes
    )
    return step_plan([batch.spans[i] for i in order], attention, batch.page_size)


def step_plan(spans: Sequence[Span], attention: CascadePlan, page_size: int) -> StepPlan:
    """A step of sequences that stand in the plan's order; token ids are arbitrary, nothing is sampled."""
    positions = [np.arange(s.start, s.start + s.rows) for s in spans]
    slots = [
        np.asarray(s.table, np.int64)[at // page_size] * page_size + at % page_size
        for s, at in zip(spans, positions, strict=True)
    ]
    rows = sum(s.rows for s in spans)
    return StepPlan(
        step=0,
        sequence_ids=tuple(range(len(spans))),
        row_indptr=np.cumsum([0, *(s.rows for s in spans)]).astype(np.int32),
        token_ids=np.arange(rows, dtype=np.int64) * 7919 % 20_000,
        write_slots=np.concatenate(slots),
        attention=attention,
        samples=(),
        sample_sequences=(),
    )


def least_reads(batch: Batch, align: int) -> int:
    """KV tokens that a layer reads where every shared tile is read once, private tails in whole pages."""
    saved = sum((members - 1) * _tiles(at, tokens, align) for at, tokens, members in batch.shared)
    flat = sum(-(-(s.start + s.rows) // batch.page_size) * batch.page_size for s in batch.spans)
    return flat - saved * align


def _tiles(at: int, tokens: int, align: int) -> int:
    """Whole tiles that all tokens up to the end of a span [at, at + tokens) fill beyond those before it."""
    return (at + tokens) // align - at // align


def same_plan(one: CascadePlan, other: CascadePlan) -> bool:
    """Whether two plans are the same work, to the last index."""
    return len(one.levels) == len(other.levels) and all(
        np.array_equal(a, b)
        for first, second in zip(one.levels, other.levels, strict=True)
        for a, b in zip(first, second, strict=True)
    )


def attention_flops(batch: Batch, heads: int, head_dim: int) -> int:
    """Multiplications and additions of one layer's attention: QK and PV."""
    return 4 * heads * head_dim * batch.tokens
