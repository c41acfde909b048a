"""Refuse impossible plans before they read or write a wrong page. Numpy only, once a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.plan import CascadeLevel, StepPlan

Ints = npt.NDArray[np.int64]


class Segments(NamedTuple):
    """One checked level: segment s holds rows [first[s], first[s] + rows[s]), whose KV are the absolute
    tokens [start[s], start[s] + tokens[s]), in pages[page_indptr[s] : page_indptr[s + 1]]. All int64."""

    first: Ints
    rows: Ints
    start: Ints
    tokens: Ints
    page_indptr: Ints
    pages: Ints


class CheckedPlan(NamedTuple):
    """A step's segments, shared levels first; the last is the private one, a segment a sequence."""

    shared: tuple[Segments, ...]
    private: Segments
    positions: Ints
    write_slots: Ints


def check_plan(plan: StepPlan, page_size: int, num_pages: int) -> CheckedPlan:
    """Check a plan's arrays against each other. ValueError names the first thing that can't be."""
    attention = plan.attention
    align = attention.align
    _require(plan.rows >= 1, "a step has rows")
    _require(len(attention.levels) >= 1, "a plan needs at least the private level")
    _require(align > 0 and align % page_size == 0, f"align {align} is not a multiple of {page_size}")
    positions = attention.positions.astype(np.int64)
    slots = plan.write_slots.astype(np.int64)
    _require(positions.shape == slots.shape == (plan.rows,), "one position and one slot a row")

    reached = np.zeros(plan.rows, np.int64)
    levels = [_segments(level, plan.rows, page_size, num_pages) for level in attention.levels]
    shared = []
    for segments in levels[:-1]:
        _require(not np.any(segments.tokens % align), f"a shared span is not a multiple of {align}")
        start = _common_start(segments, reached)
        shared.append(segments._replace(start=start))
        reached += np.repeat(segments.tokens, segments.rows)
    _require(bool(np.all(reached <= positions)), "a row lies within its own shared span")

    private = levels[-1]._replace(start=attention.kv_start.astype(np.int64))
    _require(np.array_equal(attention.levels[-1].qo_indptr, plan.row_indptr), "private rows, one a sequence")
    _require(private.start.shape == private.rows.shape, "one kv_start a sequence")
    _require(not np.any(private.start % align), f"a kv_start is not a multiple of {align}")
    _require(
        np.array_equal(np.repeat(private.start, private.rows), reached),
        "kv_start differs from the length of the shared spans",
    )
    _check_rows(private, positions, slots, page_size)
    return CheckedPlan(tuple(shared), private, positions, slots)


def ragged(counts: Ints) -> tuple[Ints, Ints]:
    """Number the members of runs: (owner, offset within the owner's run), each of length sum(counts)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _segments(level: CascadeLevel, rows: int, page_size: int, num_pages: int) -> Segments:
    qo, kv, pages, last = (array.astype(np.int64) for array in level)
    _require(len(qo) == len(kv) == len(last) + 1, "index pointers are one longer than the segments")
    _require(qo[0] == 0 and qo[-1] == rows and not np.any(np.diff(qo) < 0), "a level covers all rows once")
    _require(
        kv[0] == 0 and kv[-1] == len(pages) and not np.any(np.diff(kv) < 0), "kv_indptr covers its pages"
    )
    counts = np.diff(kv)
    _require(
        not np.any((last < np.minimum(counts, 1)) | (last > np.where(counts > 0, page_size, 0))),
        f"last_page_len is 1 to {page_size}, or 0 for a segment without pages",
    )
    if len(pages):
        _require(pages.min() > 0 and pages.max() < num_pages, f"pages are 1 to {num_pages - 1}")
    tokens = np.where(counts > 0, (counts - 1) * page_size + last, 0)
    return Segments(qo[:-1], np.diff(qo), np.zeros_like(last), tokens, kv, pages)


def _common_start(segments: Segments, reached: Ints) -> Ints:
    """Where each segment's span starts: all its rows must have come equally far."""
    used = segments.rows > 0
    start = np.zeros_like(segments.tokens)
    start[used] = reached[segments.first[used]]
    _require(
        np.array_equal(np.repeat(start, segments.rows), reached),
        "rows of one segment have different shared lengths before it",
    )
    return start


def _check_rows(private: Segments, positions: Ints, slots: Ints, page_size: int) -> None:
    """A sequence's rows are consecutive, within its pages, and written where they will be read."""
    owner, offset = ragged(private.rows)
    if not len(owner):
        return
    _require(
        np.array_equal(positions, positions[private.first[owner]] + offset),
        "rows of a sequence stand at consecutive positions",
    )
    token = positions - private.start[owner]
    _require(bool(np.all(token < private.tokens[owner])), "a row lies beyond its sequence's pages")
    page = private.pages[private.page_indptr[owner] + token // page_size]
    _require(
        np.array_equal(slots, page * page_size + token % page_size), "a row is written where it isn't read"
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"impossible plan: {message}")
