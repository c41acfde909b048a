"""Promise 1 for the CPU executor: grouping, batching and chunking change no bit of any row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import KvReads, KvShape
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from tests.engine.attention.plans import Member, step_plan

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Bench:
    """An executor and the oracle over the same random KV pages, fed the same rows."""

    def __init__(self, shape: KvShape, dtype: torch.dtype, tile: int, seed: int = 0) -> None:
        self.shape, self.dtype, self.tile = shape, dtype, tile
        self.cpu = CpuAttention(shape, dtype, tile=tile)
        self.reference = ReferenceAttention(shape, align=tile)
        self.random = torch.Generator().manual_seed(seed)
        for own, oracle in zip(self.cpu.memory.layers, self.reference.memory.layers, strict=True):
            own[shape.page_size :] = self.draw(own.shape[0] - shape.page_size, 2, *own.shape[2:])
            oracle.copy_(own)

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random).to(self.dtype)

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k, v of `count` rows; q is scaled up, so that some rows look at few tokens."""
        kv_heads, head_dim = self.shape.num_kv_heads, self.shape.head_dim
        q = self.draw(count, self.shape.num_heads, head_dim) * (
            1 + 3 * torch.rand(count, 1, 1, generator=self.random)
        ).to(self.dtype)
        return q, self.draw(count, kv_heads, head_dim), self.draw(count, kv_heads, head_dim)

    def run(
        self, members: Sequence[Member], qkv: Sequence[torch.Tensor], oracle: bool = False
    ) -> torch.Tensor:
        backend = self.reference if oracle else self.cpu
        backend.begin(step_plan(members, self.shape.page_size, self.tile))
        return backend.attend(self.shape.num_layers - 1, *qkv)


def rows_of(members: Sequence[Member]) -> list[slice]:
    """Which rows of the step are each member's."""
    at, found = 0, []
    for member in members:
        found.append(slice(at, at + member.rows))
        at += member.rows
    return found


@st.composite
def forests(draw: st.DrawFn) -> tuple[Bench, list[Member]]:
    """A random forest of sequences with random chunks, and an executor of random shape."""
    page_size = draw(st.sampled_from([1, 4, 16]))
    tile = draw(st.sampled_from([16, 32, 64, 256]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    kv_heads, group = draw(st.sampled_from([(3, 3), (1, 1), (2, 4), (1, 8), (2, 2), (1, 7)]))
    head_dim = draw(st.sampled_from([64, 128]))
    depth = draw(st.integers(0, 2))
    fresh = iter(draw(st.permutations(range(1, 64))) if page_size == 16 and tile < 64 else range(1, 100_000))
    used = [0]

    def pages(tokens: int) -> tuple[int, ...]:
        count = -(-tokens // page_size)
        taken = tuple(next(fresh) for _ in range(count))
        used.extend(taken)
        return taken

    def grow(path: tuple[tuple[int, ...], ...]) -> list[Member]:
        members = []
        for _ in range(draw(st.integers(1, 3))):
            if len(path) < depth and draw(st.booleans()):
                members += grow((*path, pages(tile * draw(st.integers(1, 2)))))
                continue
            shared = sum(len(span) for span in path) * page_size
            start = shared + draw(st.integers(0, tile + 3))
            rows = draw(st.sampled_from([1, 1, 2, 3, 5, 16, 17, 40]))
            members.append(Member(path, pages(start + rows - shared), start, rows))
        return members

    try:
        members = grow(())
    except RuntimeError:  # the shuffled pool ran out: take pages in order
        fresh, used[:] = iter(range(1, 100_000)), [0]
        members = grow(())
    shape = KvShape(2, max(used) + 1, page_size, kv_heads * group, kv_heads, head_dim)
    return Bench(shape, dtype, tile, seed=draw(st.integers(0, 1000))), members


@settings(max_examples=40, deadline=None)
@given(forests())
def test_a_planned_row_equals_the_same_row_flat_and_alone(case: tuple[Bench, list[Member]]) -> None:
    """O020: cascade on, off and alone give the same bits; and they are right."""
    bench, members = case
    qkv = bench.rows(sum(m.rows for m in members))
    planned = bench.run(members, qkv)
    exact = bench.run(members, qkv, oracle=True)
    torch.testing.assert_close(planned, exact, rtol=TOLERANCE[bench.dtype], atol=TOLERANCE[bench.dtype])
    for member, rows in zip(members, rows_of(members), strict=True):
        alone = bench.run([member.flat()], [x[rows] for x in qkv])
        assert torch.equal(alone, planned[rows])
        one_by_one = [
            bench.run([m], [x[rows][i : i + 1] for x in qkv])
            for i, m in enumerate(member.split([1] * member.rows))
        ]
        assert torch.equal(torch.cat(one_by_one), planned[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tile", [16, 64, 256])
def test_chunks_that_cross_tile_edges_change_no_bit(dtype: torch.dtype, tile: int) -> None:
    shape = KvShape(1, 1 + 2 * 48, 16, 9, 3, 64)
    bench = Bench(shape, dtype, tile)
    total = 2 * tile + 133
    whole = Member((), tuple(range(1, 1 + -(-total // 16))), 0, total)
    qkv = bench.rows(total)
    at_once = bench.run([whole], qkv)
    torch.testing.assert_close(
        at_once, bench.run([whole], qkv, oracle=True), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    for size in (16, 17, tile - 1, tile, tile + 1):
        chunks = whole.split([size] * (total // size) + [total % size] * (total % size > 0))
        parts = [bench.run([c], [x[c.start : c.start + c.rows] for x in qkv]) for c in chunks]
        assert torch.equal(torch.cat(parts), at_once), size
    for row in [*range(8), *range(tile - 8, tile + 8), *range(total - 8, total)]:
        alone = bench.run([Member((), whole.private, row, 1)], [x[row : row + 1] for x in qkv])
        assert torch.equal(alone, at_once[row : row + 1]), row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_many_tiles_keep_their_bits(dtype: torch.dtype) -> None:
    """Merging 1 to 60 partial states beside rows that have more or fewer of them."""
    bench = Bench(KvShape(1, 1 + 61, 16, 6, 2, 64), dtype, 16)
    pages = tuple(range(1, 62))
    members = [Member((), pages, 16 * tiles - 5, 1) for tiles in range(1, 61)]
    for seed in range(4):
        bench.random.manual_seed(seed)
        qkv = bench.rows(60)
        together = bench.run(members, qkv)
        alone = [bench.run([m], [x[i : i + 1] for x in qkv]) for i, m in enumerate(members)]
        assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_single_row_over_a_single_kv_head_keeps_its_bits(dtype: torch.dtype) -> None:
    """One item of one head is the only work of its call, which torch then runs on another path."""
    shape = KvShape(1, 130, 16, 7, 1, 64)
    members = [Member((), (1 + 2 * i, 2 + 2 * i), 3 + i % 24, 1) for i in range(64)]
    for seed in range(8):
        bench = Bench(shape, dtype, 16, seed)
        qkv = bench.rows(64)
        together = bench.run(members, qkv)
        alone = [bench.run([m], [x[i : i + 1] for x in qkv]) for i, m in enumerate(members)]
        assert torch.equal(torch.cat(alone), together)


def test_a_shared_span_is_read_once_for_all_its_rows() -> None:
    """Promise 4: 16 sequences under 1,024 shared tokens read them once, and O020's group changes hold."""
    shape = KvShape(1, 300, 16, 9, 3, 64)
    bench = Bench(shape, torch.bfloat16, 256)
    prefix = tuple(range(1, 65))
    members = [Member((prefix,), (65 + i,), 1024 + i % 16, 1) for i in range(16)]
    qkv = bench.rows(16)
    grouped = bench.run(members, qkv)
    assert bench.cpu.kv_tokens_read == KvReads(shared=1024, private=16 * 16)
    flat = bench.run([m.flat() for m in members], qkv)
    assert bench.cpu.kv_tokens_read == KvReads(shared=0, private=16 * 1040)
    assert torch.equal(grouped, flat)
    for leave in (0, 7, 15):  # one finishes, one joins
        stay = [i for i in range(16) if i != leave]
        again = bench.run([members[i] for i in stay], [x[stay] for x in qkv])
        assert torch.equal(again, grouped[stay])


def test_a_hundred_identical_sequences_equal_one() -> None:
    """O020: one long common prefix and nothing else; then 30 of A beside 20 of B."""
    shape = KvShape(1, 400, 16, 9, 3, 64)
    bench = Bench(shape, torch.bfloat16, 256)
    a, b = tuple(range(1, 33)), tuple(range(33, 65))
    qkv = [x[:1].repeat(100, 1, 1) for x in bench.rows(1)]
    members = [Member((a,), (100 + i,), 512, 1) for i in range(100)]
    same = bench.run(members, qkv)
    assert torch.equal(same, same[:1].expand_as(same))
    mixed = members[:30] + [Member((b,), (300 + i,), 512, 1) for i in range(20)]
    both = bench.run(mixed, [x[:50] for x in qkv])
    assert torch.equal(both[:30], same[:30])
    assert torch.equal(both[30:], both[30:31].expand(20, -1))
    assert not torch.equal(both[0], both[30])


ROOT, A, B, C = (1, 2), (3, 4, 5), (6,), (7, 8)
# r0..r3 are A's, r4..r6 B's, r7 and r8 C's, r9 shares nothing; three rows have a second suffix page.
SUFFIX = [1, 2, 1, 1, 2, 1, 1, 1, 2, 1]


def worked_example(paths: Sequence[tuple[tuple[int, ...], ...]]) -> list[Member]:
    fresh = iter(range(9, 64))
    pages = [tuple(next(fresh) for _ in range(count)) for count in SUFFIX]
    return [
        Member(path, own, 4 * (sum(map(len, path)) + len(own) - 1) + i % 4, 1)
        for i, (path, own) in enumerate(zip(paths, pages, strict=True))
    ]


def test_the_worked_example_has_these_arrays() -> None:
    """The arrays of the reference's example: groups A, B and C, a loner, and a root under A and B."""
    two = step_plan(worked_example([(ROOT + A,)] * 4 + [(ROOT + B,)] * 3 + [(C,)] * 2 + [()]), 4, 4).attention
    first, last = two.levels
    assert first.qo_indptr.tolist() == [0, 4, 7, 9, 10]
    assert first.kv_indptr.tolist() == [0, 5, 8, 10, 10]
    assert first.kv_indices.tolist() == [*ROOT, *A, *ROOT, *B, *C]
    assert first.last_page_len.tolist() == [4, 4, 4, 0]
    assert last.qo_indptr.tolist() == list(range(11))
    assert last.kv_indptr.tolist() == [0, 1, 3, 4, 5, 7, 8, 9, 10, 12, 13]

    three = step_plan(
        worked_example([(ROOT, A)] * 4 + [(ROOT, B)] * 3 + [((), C)] * 2 + [()]), 4, 4
    ).attention
    root, groups, last = three.levels
    assert root.qo_indptr.tolist() == [0, 7, 9, 10]
    assert root.kv_indptr.tolist() == [0, 2, 2, 2]
    assert root.last_page_len.tolist() == [4, 0, 0]
    assert groups.qo_indptr.tolist() == [0, 4, 7, 9, 10]
    assert groups.kv_indptr.tolist() == [0, 3, 4, 6, 6]
    assert groups.last_page_len.tolist() == [4, 4, 4, 0]
    assert last.kv_indptr.tolist() == two.levels[1].kv_indptr.tolist()


def test_the_worked_example_reads_21_pages_instead_of_46() -> None:
    """Flat, at two levels and at three levels: the same bits, from fewer and fewer reads."""
    bench = Bench(KvShape(1, 64, 4, 4, 2, 64), torch.float32, 4)
    members = worked_example([(ROOT, A)] * 4 + [(ROOT, B)] * 3 + [((), C)] * 2 + [()])
    qkv = bench.rows(10)
    tree = bench.run(members, qkv)
    assert sum(bench.cpu.kv_tokens_read) == 4 * 21
    folded = [(ROOT + A,)] * 4 + [(ROOT + B,)] * 3 + [(C,)] * 2 + [()]
    assert torch.equal(bench.run(worked_example(folded), qkv), tree)
    assert sum(bench.cpu.kv_tokens_read) == 4 * 23
    assert torch.equal(bench.run([m.flat() for m in members], qkv), tree)
    assert sum(bench.cpu.kv_tokens_read) == 4 * 46
    torch.testing.assert_close(tree, bench.run(members, qkv, oracle=True), rtol=0.0, atol=1e-5)
