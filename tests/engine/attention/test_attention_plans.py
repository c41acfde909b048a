"""Impossible plans are refused, short sequences are right, empty states stay empty, for every executor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionBackend, KvShape
from engine.attention.cpu import merge_weights
from engine.plan import CascadeLevel, CascadePlan, StepPlan
from tests.engine.attention.executors import EXECUTORS, all_slots, build
from tests.engine.attention.plans import Member, step_plan

SHAPE = KvShape(2, 80, 16, 6, 2, 64)


@pytest.fixture(params=[*EXECUTORS, "reference"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return build(request.param, SHAPE, tile=32)


def qkv(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, heads, 64, generator=random) for heads in (6, 2, 2))


def test_sequences_around_one_page_equal_themselves_alone(backend: AttentionBackend) -> None:
    """O022: 1, P-1, P and P+1 tokens mixed with one of 10 P."""
    lengths, first = [1, 15, 16, 17, 160], [1, 2, 3, 4, 6]
    members = [Member((), tuple(range(p, p + 10)), 0, n) for p, n in zip(first, lengths, strict=True)]
    x = qkv(sum(lengths))
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
def test_an_impossible_plan_is_refused(backend: AttentionBackend, fault: str) -> None:
    """O022: an impossible last-page length, and its like, raise instead of reading a wrong page. A query
    longer than its keys (O021) is one of them."""
    backend.begin(good())
    with pytest.raises(ValueError, match="impossible plan"):
        backend.begin(IMPOSSIBLE[fault](good()))
    with pytest.raises(RuntimeError):
        backend.attend(0, *qkv(3))


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_plan_for_another_tile_is_refused(name: str) -> None:
    backend = build(name, SHAPE, tile=32)
    with pytest.raises(ValueError, match="align 64"):
        backend.begin(good()._replace(attention=good().attention._replace(align=64)))
    with pytest.raises(ValueError, match="page size"):
        build(name, SHAPE, tile=24)


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


def test_empty_prefix_levels_change_nothing(backend: AttentionBackend) -> None:
    """O021: segments without pages, prefixes of length 0."""
    plain = Member((), (5, 6), 19, 3)
    backend.begin(step_plan([plain], 16, 32))
    expected = backend.attend(0, *qkv(3))
    backend.begin(step_plan([Member(((), ()), (5, 6), 19, 3)], 16, 32))
    assert torch.equal(backend.attend(0, *qkv(3)), expected)


def test_padding_rows_get_zeros_and_write_nothing(backend: AttentionBackend) -> None:
    member = Member((), (5, 6), 0, 3)
    x = qkv(8)
    backend.begin(step_plan([member], 16, 32))
    padded = backend.attend(1, *x)
    assert padded.shape == (8, 6 * 64)
    assert torch.equal(padded[3:], torch.zeros(5, 6 * 64))
    slots = all_slots(SHAPE)
    written = slots[backend.read_rows(1, slots).flatten(1).any(1)]
    assert written.tolist() == [80, 81, 82]
    assert not backend.read_rows(0, slots).any()


@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("row", [0, 2, 5])
def test_a_row_of_nan_poisons_no_other_sequence(backend: AttentionBackend, which: int, row: int) -> None:
    """Sequences share calls and padding, never results: short tiles are padded with the zero page."""
    members = [Member((), (1, 2), 3, 2), Member((), (3, 4), 3, 1), Member((), (5, 6), 40 - 16, 3)]
    owner = [0, 0, 1, 2, 2, 2]
    x = list(qkv(6))
    backend.begin(step_plan(members, 16, 32))
    clean = backend.attend(0, *x)
    x[which] = x[which].clone()
    x[which][row] = float("nan")
    poisoned = backend.attend(0, *x)
    assert not poisoned[row].isfinite().all()
    others = [other for other in range(6) if owner[other] != owner[row]]
    assert torch.equal(poisoned[others], clean[others])
