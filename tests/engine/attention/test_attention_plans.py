"""Impossible plans are refused, short sequences are right, empty states stay empty, pages are kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.attention.base import KvShape
from engine.attention.cpu import CpuAttention, merge_weights
from engine.attention.reference import ReferenceAttention
from engine.plan import CascadeLevel, CascadePlan, RowCopy, StepPlan
from tests.engine.attention.plans import Member, step_plan

SHAPE = KvShape(2, 80, 16, 6, 2, 64)


def executors() -> list[CpuAttention | ReferenceAttention]:
    return [CpuAttention(SHAPE, torch.float32, tile=32), ReferenceAttention(SHAPE, align=32)]


def qkv(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, heads, 64, generator=random) for heads in (6, 2, 2))


def test_sequences_around_one_page_equal_themselves_alone() -> None:
    """O022: 1, P-1, P and P+1 tokens mixed with one of 10 P."""
    lengths, first = [1, 15, 16, 17, 160], [1, 2, 3, 4, 6]
    members = [Member((), tuple(range(p, p + 10)), 0, n) for p, n in zip(first, lengths, strict=True)]
    x = qkv(sum(lengths))
    for backend in executors():
        backend.begin(step_plan(members, 16, 32))
        mixed = backend.attend(0, *x)
        assert mixed.isfinite().all()
        at = 0
        for member in members:
            backend.begin(step_plan([member], 16, 32))
            alone = backend.attend(0, *(t[at : at + member.rows] for t in x))
            assert torch.equal(alone, mixed[at : at + member.rows])
            at += member.rows


def level(qo: list[int], kv: list[int], pages: list[int], last: list[int]) -> CascadeLevel:
    return CascadeLevel(*(np.asarray(part, np.int32) for part in (qo, kv, pages, last)))


def good() -> StepPlan:
    """Two sequences under 32 shared tokens, of one row and of two."""
    return step_plan([Member(((1, 2),), (3,), 40, 1), Member(((1, 2),), (4,), 33, 2)], 16, 32)


def with_attention(plan: StepPlan, **fields: object) -> StepPlan:
    return plan._replace(attention=plan.attention._replace(**fields))


def with_level(plan: StepPlan, index: int, **fields: list[int]) -> StepPlan:
    levels = list(plan.attention.levels)
    levels[index] = levels[index]._replace(**{k: np.asarray(v, np.int32) for k, v in fields.items()})
    return with_attention(plan, levels=tuple(levels))


IMPOSSIBLE: dict[str, Callable[[StepPlan], StepPlan]] = {
    "last page longer than a page": lambda p: with_level(p, 1, last_page_len=[17, 3]),
    "last page of no tokens": lambda p: with_level(p, 1, last_page_len=[0, 3]),
    "negative last page": lambda p: with_level(p, 1, last_page_len=[-1, 3]),
    "tokens without pages": lambda p: with_level(
        p, 1, kv_indptr=[0, 0, 1], kv_indices=[4], last_page_len=[9, 3]
    ),
    "shared span not cut to tiles": lambda p: with_level(p, 0, last_page_len=[15]),
    "kv_start not at a tile": lambda p: with_attention(p, kv_start=np.asarray([16, 32], np.int32)),
    "kv_start behind the shared span": lambda p: with_attention(p, kv_start=np.asarray([0, 32], np.int32)),
    "a row within its shared span": lambda p: with_attention(p, positions=np.asarray([31, 33, 34], np.int32)),
    "a row beyond its pages": lambda p: with_attention(p, positions=np.asarray([41, 33, 34], np.int32)),
    "rows that leave a gap": lambda p: with_attention(p, positions=np.asarray([40, 32, 34], np.int32)),
    "rows without a segment": lambda p: with_level(p, 0, qo_indptr=[0, 2]),
    "rows in two segments": lambda p: with_level(p, 1, qo_indptr=[0, 2, 3]),
    "the zero page": lambda p: with_level(p, 1, kv_indices=[0, 4]),
    "a page beyond the pool": lambda p: with_level(p, 1, kv_indices=[3, 80]),
    "a row written elsewhere": lambda p: p._replace(write_slots=p.write_slots + 1),
    "no private level": lambda p: with_attention(p, levels=()),
    "no rows": lambda p: StepPlan(
        0,
        (),
        np.zeros(1, np.int32),
        np.zeros(0, np.int64),
        np.zeros(0, np.int64),
        CascadePlan(32, (level([0], [0], [], []),), np.zeros(0, np.int32), np.zeros(0, np.int32)),
        (),
        (),
    ),
}


@pytest.mark.parametrize("fault", IMPOSSIBLE)
def test_an_impossible_plan_is_refused(fault: str) -> None:
    """O022: an impossible last-page length, and its like, raise instead of reading a wrong page. A query
    longer than its keys (O021) is one of them."""
    for backend in executors():
        backend.begin(good())
        with pytest.raises(ValueError, match="impossible plan"):
            backend.begin(IMPOSSIBLE[fault](good()))
        with pytest.raises(RuntimeError):
            backend.attend(0, *qkv(3))


def test_a_plan_for_another_tile_is_refused() -> None:
    backend = CpuAttention(SHAPE, torch.float32, tile=32)
    with pytest.raises(ValueError, match="align 64"):
        backend.begin(good()._replace(attention=good().attention._replace(align=64)))
    with pytest.raises(ValueError, match="page size"):
        CpuAttention(SHAPE, torch.float32, tile=24)


def test_empty_states_merge_to_an_empty_state() -> None:
    """O021: empty with empty has no weight and is never NaN; empty with full is the full one."""
    empty = float("-inf")
    lse = torch.full((3, 16), empty)
    lse[1, 4] = -3.0
    lse[2, [0, 9]] = torch.tensor([1.0, 1.0])
    weights = merge_weights(lse)
    assert torch.equal(weights[0], torch.zeros(16))
    assert torch.equal(weights[1], torch.eye(16)[4])
    assert weights[2, 0] == weights[2, 9] == 0.5
    assert weights[2].sum() == 1.0


def test_merge_weights_do_not_depend_on_the_tiles_of_others() -> None:
    """A row merged beside one with a hundred tiles gets the bits that it gets alone."""
    lse = torch.randn(9, 40, generator=torch.Generator().manual_seed(1)) * 20
    narrow = torch.full((9, 48), float("-inf"))
    narrow[:, :40] = lse
    for tiles in (64, 128, 1024):
        wide = torch.full((9, tiles), float("-inf"))
        wide[:, :40] = lse
        assert torch.equal(merge_weights(wide)[:, :48], merge_weights(narrow))
        assert torch.equal(merge_weights(wide[4:5])[:, :48], merge_weights(narrow)[4:5])


def test_empty_prefix_levels_change_nothing() -> None:
    """O021: segments without pages, prefixes of length 0."""
    plain = Member((), (5, 6), 19, 3)
    for backend in executors():
        backend.begin(step_plan([plain], 16, 32))
        expected = backend.attend(0, *qkv(3))
        backend.begin(step_plan([Member(((), ()), (5, 6), 19, 3)], 16, 32))
        assert torch.equal(backend.attend(0, *qkv(3)), expected)


def test_padding_rows_get_zeros_and_write_nothing() -> None:
    member = Member((), (5, 6), 0, 3)
    x = qkv(8)
    for backend in executors():
        backend.begin(step_plan([member], 16, 32))
        padded = backend.attend(1, *x)
        assert padded.shape == (8, 6 * 64)
        assert torch.equal(padded[3:], torch.zeros(5, 6 * 64))
        written = backend.memory.layers[1].flatten(1).any(1).nonzero().flatten()
        assert written.tolist() == [80, 81, 82]
        assert not backend.memory.layers[0].any()


@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("row", [0, 2, 5])
def test_a_row_of_nan_poisons_no_other_sequence(which: int, row: int) -> None:
    """Sequences share calls and padding, never results: short tiles are padded with the zero page."""
    members = [Member((), (1, 2), 3, 2), Member((), (3, 4), 3, 1), Member((), (5, 6), 40 - 16, 3)]
    owner = [0, 0, 1, 2, 2, 2]
    for backend in executors():
        x = list(qkv(6))
        backend.begin(step_plan(members, 16, 32))
        clean = backend.attend(0, *x)
        x[which] = x[which].clone()
        x[which][row] = float("nan")
        poisoned = backend.attend(0, *x)
        assert not poisoned[row].isfinite().all()
        others = [other for other in range(6) if owner[other] != owner[row]]
        assert torch.equal(poisoned[others], clean[others])


def test_copied_rows_attend_like_the_originals_and_wiped_pages_are_zero() -> None:
    """COPY of [0, rows) in every layer, nothing beyond; a wiped page holds no trace of a NaN."""
    for backend in executors():
        for layer in range(2):
            backend.begin(step_plan([Member((), (7,), 0, 16)], 16, 32))
            backend.attend(layer, *qkv(16, seed=layer))
        backend.copy_rows([RowCopy(7, 9, 11)])
        for memory in backend.memory.layers:
            assert torch.equal(memory[9 * 16 : 9 * 16 + 11], memory[7 * 16 : 7 * 16 + 11])
            assert not memory[9 * 16 + 11 : 10 * 16].any()
            memory[9 * 16 + 12] = float("nan")
        backend.wipe([9])
        backend.wipe([])
        assert not any(memory[9 * 16 : 10 * 16].any() for memory in backend.memory.layers)
        assert all(memory[7 * 16 : 8 * 16].any() for memory in backend.memory.layers)


@pytest.mark.parametrize("copy", [RowCopy(0, 1, 4), RowCopy(1, 0, 4), RowCopy(1, 2, 17), RowCopy(1, 1, 4)])
def test_an_impossible_copy_is_refused(copy: RowCopy) -> None:
    """The zero page is no one's, and a page has no more rows than its size."""
    with pytest.raises(ValueError, match=r"page|copy"):
        CpuAttention(SHAPE, torch.float32, tile=32).copy_rows([copy])


def test_wiping_the_zero_page_is_refused() -> None:
    with pytest.raises(ValueError, match="page 0"):
        CpuAttention(SHAPE, torch.float32, tile=32).wipe([0])
