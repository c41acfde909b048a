"""KV memory of every executor, whatever its layout: rows go in and come out, copies and wipes are exact."""

from __future__ import annotations

import pytest
import torch

from engine.attention.base import AttentionBackend, KvShape
from engine.plan import RowCopy
from tests.engine.attention.executors import EXECUTORS, all_slots, build, dtypes
from tests.engine.attention.plans import Member, step_plan

PAGE = 16


def shape(head_dim: int = 64) -> KvShape:
    return KvShape(3, 9, PAGE, 6, 2, head_dim)


@pytest.fixture(params=[*EXECUTORS, "reference"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend(name: str) -> AttentionBackend:
    return filled(build(name, shape(), dtypes(name)[0], 32), shape())


def draw(shape: KvShape, seed: int) -> torch.Tensor:
    """Random bf16 KV of every slot: [n, 2, kv_heads, head_dim]."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(
        len(all_slots(shape)), 2, shape.num_kv_heads, shape.head_dim, generator=random
    ).bfloat16()


def filled(backend: AttentionBackend, shape: KvShape) -> AttentionBackend:
    """Each layer holds draw(shape, layer)."""
    for layer in range(shape.num_layers):
        backend.write_rows(layer, all_slots(shape), draw(shape, layer))
    return backend


def page(number: int) -> slice:
    """Where a page's rows are among all slots."""
    return slice((number - 1) * PAGE, number * PAGE)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_rows_come_out_as_they_went_in(name: str, dtype: torch.dtype, head_dim: int) -> None:
    """In any order, some at a time, without a trace in other layers and slots."""
    sizes = shape(head_dim)
    if dtype not in dtypes(name):
        with pytest.raises(ValueError, match="bfloat16 is not native"):
            build(name, sizes, dtype, 32)
        return
    backend = build(name, sizes, dtype, 32)
    slots = all_slots(sizes)
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(3))
    kv = draw(sizes, 1)
    some, others = order[:50], order[50:]
    backend.write_rows(1, slots[some], kv[some])
    assert torch.equal(backend.read_rows(1, slots[some]).bfloat16(), kv[some])
    assert not backend.read_rows(1, slots[others]).any()
    backend.write_rows(1, slots[others], kv[others])
    assert torch.equal(backend.read_rows(1, slots).bfloat16(), kv)
    assert not backend.read_rows(0, slots).any()
    assert not backend.read_rows(2, slots).any()


def test_attending_writes_the_rows_that_can_be_read(name: str, backend: AttentionBackend) -> None:
    """A step's own keys and values stand at its slots, bit for bit, and nothing else changes."""
    random = torch.Generator().manual_seed(9)
    q, k, v = (
        torch.randn(21, heads, 64, generator=random).bfloat16().to(dtypes(name)[0]) for heads in (6, 2, 2)
    )
    backend.begin(step_plan([Member((), (5, 3), 7, 20), Member((), (8,), 2, 1)], PAGE, 32))
    backend.attend(1, q, k, v)
    expected = draw(shape(), 1)
    rows = [*range(4 * PAGE + 7, 5 * PAGE), *range(2 * PAGE, 2 * PAGE + 11), 7 * PAGE + 2]
    expected[rows] = torch.stack((k, v), 1).bfloat16()
    assert torch.equal(backend.read_rows(1, all_slots(shape())).bfloat16(), expected)
    assert torch.equal(backend.read_rows(2, all_slots(shape())).bfloat16(), draw(shape(), 2))


@pytest.mark.parametrize("rows", range(PAGE + 1))
def test_a_copy_takes_the_first_rows_of_a_page_in_every_layer(backend: AttentionBackend, rows: int) -> None:
    """Rows [0, rows) and nothing behind them, for every offset in a page."""
    backend.copy_rows([RowCopy(7, 2, rows)])
    for layer in range(3):
        expected = draw(shape(), layer)
        expected[page(2)][:rows] = expected[page(7)][:rows].clone()
        assert torch.equal(backend.read_rows(layer, all_slots(shape())).bfloat16(), expected)


def test_copies_are_made_in_order(backend: AttentionBackend) -> None:
    """The target of one may be the source of the next."""
    backend.copy_rows([RowCopy(1, 2, 9), RowCopy(2, 3, 12)])
    for layer in range(3):
        expected = draw(shape(), layer)
        expected[page(2)][:9] = expected[page(1)][:9].clone()
        expected[page(3)][:12] = expected[page(2)][:12].clone()
        assert torch.equal(backend.read_rows(layer, all_slots(shape())).bfloat16(), expected)


def test_a_wiped_page_is_zero_in_every_layer(backend: AttentionBackend) -> None:
    """Whatever stood there: a NaN leaves no trace, and other pages keep theirs."""
    slots = all_slots(shape())
    for layer in range(3):
        backend.write_rows(layer, slots[page(4)], torch.full((PAGE, 2, 2, 64), float("nan")).bfloat16())
    backend.wipe([4, 8])
    backend.wipe([])
    for layer in range(3):
        expected = draw(shape(), layer)
        expected[page(4)] = 0
        expected[page(8)] = 0
        assert torch.equal(backend.read_rows(layer, slots).bfloat16(), expected)


def test_copied_rows_attend_like_the_originals(name: str, backend: AttentionBackend) -> None:
    """A sequence over a copied page gets the bits of the one it was copied from."""
    random = torch.Generator().manual_seed(9)
    x = [torch.randn(1, heads, 64, generator=random).bfloat16().to(dtypes(name)[0]) for heads in (6, 2, 2)]
    backend.copy_rows([RowCopy(5, 6, 11)])
    outputs = []
    for last in (5, 6):
        backend.begin(step_plan([Member((), (3, last), PAGE + 11, 1)], PAGE, 32))
        outputs.append(backend.attend(2, *x))
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("copy", [RowCopy(0, 1, 4), RowCopy(1, 0, 4), RowCopy(1, 2, 17), RowCopy(1, 1, 4)])
def test_an_impossible_copy_is_refused(backend: AttentionBackend, copy: RowCopy) -> None:
    """The zero page is no one's, and a page has no more rows than its size."""
    with pytest.raises(ValueError, match=r"page|copy"):
        backend.copy_rows([copy])


def test_wiping_the_zero_page_is_refused(backend: AttentionBackend) -> None:
    with pytest.raises(ValueError, match="page 0"):
        backend.wipe([0])
