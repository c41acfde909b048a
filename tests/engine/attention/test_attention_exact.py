"""Promise 1 for every CPU executor: grouping, batching and chunking change no bit of any row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import KvReads, KvShape
from tests.engine.attention.executors import EXECUTORS, PAGE_SIZES, Bench, dtypes, rows_of
from tests.engine.attention.plans import Member, step_plan
from tests.engine.attention.trees import Tree, flat, planned, split, trees

every_executor = pytest.mark.parametrize("name", EXECUTORS)
every_case = pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param(n, d, id=f"{n}-{d}") for n in EXECUTORS for d in dtypes(n)]
)


@st.composite
def shapes(draw: st.DrawFn, name: str) -> tuple[int, int, int, torch.dtype]:
    """(query heads, KV heads, head_dim, dtype), with 1 to 8 query heads for a KV head."""
    kv_heads, group = draw(st.sampled_from([(3, 3), (1, 1), (2, 4), (1, 8), (2, 2), (1, 7), (4, 1), (2, 5)]))
    head_dim = draw(st.sampled_from([64, 128]))
    return kv_heads * group, kv_heads, head_dim, draw(st.sampled_from(dtypes(name)))


@every_executor
def test_a_planned_tree_gives_the_bits_of_the_same_rows_flat_and_alone(name: str) -> None:
    """O020: whatever the planner makes of a batch, at 1 to 5 levels: the same bits; and they are right."""
    examples = shared = 0

    @settings(max_examples=120, deadline=None)
    @given(trees(PAGE_SIZES[name]), shapes(name), st.integers(0, 1000))
    def check(tree: Tree, sizes: tuple[int, int, int, torch.dtype], seed: int) -> None:
        nonlocal examples, shared
        heads, kv_heads, head_dim, dtype = sizes
        shape = KvShape(2, tree.pages + 1, tree.page_size, heads, kv_heads, head_dim)
        bench = Bench(name, shape, dtype, tree.tile, seed)
        qkv = bench.rows(tree.rows)
        together = flat(tree.spans, tree.page_size, tree.tile)
        expected = bench.execute(together, qkv)
        bench.assert_right(expected, together, qkv)
        examples += 1
        shared += check_levels(bench, tree, qkv, expected)
        check_alone(bench, tree, qkv, expected)

    check()
    assert shared >= examples / 2, f"only {shared} of {examples} examples share a segment"


def check_levels(bench: Bench, tree: Tree, qkv: Sequence[torch.Tensor], expected: torch.Tensor) -> bool:
    """Every number of levels gives `expected`, and more levels never read more; True if any shares."""
    rows = rows_of([span.rows for span in tree.spans])
    reads = []
    for levels in range(1, 6):
        order, plan = planned(tree, levels)
        assert len(plan.attention.levels) <= levels
        at = torch.cat([torch.arange(rows[i].start, rows[i].stop) for i in order])
        assert torch.equal(bench.execute(plan, [x[at] for x in qkv]), expected[at])
        reads.append(bench.executor.kv_tokens_read)
    totals = [sum(read) for read in reads]
    assert reads[0].shared == 0
    assert totals == sorted(totals, reverse=True)
    return reads[-1].shared > 0


def check_alone(bench: Bench, tree: Tree, qkv: Sequence[torch.Tensor], expected: torch.Tensor) -> None:
    """Some sequences by themselves, at once and a row at a time."""
    rows = rows_of([span.rows for span in tree.spans])
    for span, part in list(zip(tree.spans, rows, strict=True))[:3]:
        alone = flat([span], tree.page_size, tree.tile)
        assert torch.equal(bench.execute(alone, [x[part] for x in qkv]), expected[part])
        for row, single in zip(range(part.start, part.stop), split(span), strict=True):
            plan = flat([single], tree.page_size, tree.tile)
            assert torch.equal(bench.execute(plan, [x[row : row + 1] for x in qkv])[0], expected[row])


@every_case
@pytest.mark.parametrize("tile", [16, 64, 256])
def test_chunks_that_cross_tile_edges_change_no_bit(name: str, dtype: torch.dtype, tile: int) -> None:
    shape = KvShape(1, 1 + 2 * 48, 16, 9, 3, 64)
    bench = Bench(name, shape, dtype, tile)
    total = 2 * tile + 133
    whole = Member((), tuple(range(1, 1 + -(-total // 16))), 0, total)
    qkv = bench.rows(total)
    at_once = bench.run([whole], qkv)
    bench.assert_right(at_once, step_plan([whole], 16, tile), qkv)
    for size in (16, 17, tile - 1, tile, tile + 1):
        chunks = whole.split([size] * (total // size) + [total % size] * (total % size > 0))
        parts = [bench.run([c], [x[c.start : c.start + c.rows] for x in qkv]) for c in chunks]
        assert torch.equal(torch.cat(parts), at_once), size
    for row in [*range(8), *range(tile - 8, tile + 8), *range(total - 8, total)]:
        alone = bench.run([Member((), whole.private, row, 1)], [x[row : row + 1] for x in qkv])
        assert torch.equal(alone, at_once[row : row + 1]), row


@every_case
def test_rows_of_many_tiles_keep_their_bits(name: str, dtype: torch.dtype) -> None:
    """Merging 1 to 60 partial states beside rows that have more or fewer of them."""
    bench = Bench(name, KvShape(1, 1 + 61, 16, 6, 2, 64), dtype, 16)
    pages = tuple(range(1, 62))
    members = [Member((), pages, 16 * tiles - 5, 1) for tiles in range(1, 61)]
    for seed in range(4):
        bench.random.manual_seed(seed)
        qkv = bench.rows(60)
        together = bench.run(members, qkv)
        alone = [bench.run([m], [x[i : i + 1] for x in qkv]) for i, m in enumerate(members)]
        assert torch.equal(torch.cat(alone), together)


@every_case
def test_a_single_row_over_a_single_kv_head_keeps_its_bits(name: str, dtype: torch.dtype) -> None:
    """One item of one head is the only work of its call, which torch then runs on another path."""
    shape = KvShape(1, 130, 16, 7, 1, 64)
    members = [Member((), (1 + 2 * i, 2 + 2 * i), 3 + i % 24, 1) for i in range(64)]
    for seed in range(8):
        bench = Bench(name, shape, dtype, 16, seed)
        qkv = bench.rows(64)
        together = bench.run(members, qkv)
        alone = [bench.run([m], [x[i : i + 1] for x in qkv]) for i, m in enumerate(members)]
        assert torch.equal(torch.cat(alone), together)


@every_executor
def test_a_shared_span_is_read_once_for_all_its_rows(name: str) -> None:
    """Promise 4: 16 sequences under 1,024 shared tokens read them once, and O020's group changes hold."""
    shape = KvShape(1, 300, 16, 9, 3, 64)
    bench = Bench(name, shape, dtypes(name)[0], 256)
    prefix = tuple(range(1, 65))
    members = [Member((prefix,), (65 + i,), 1024 + i % 16, 1) for i in range(16)]
    qkv = bench.rows(16)
    grouped = bench.run(members, qkv)
    assert bench.executor.kv_tokens_read == KvReads(shared=1024, private=16 * 16)
    assert torch.equal(bench.run([m.flat() for m in members], qkv), grouped)
    assert bench.executor.kv_tokens_read == KvReads(shared=0, private=16 * 1040)
    for leave in (0, 7, 15):  # one finishes, one joins
        stay = [i for i in range(16) if i != leave]
        again = bench.run([members[i] for i in stay], [x[stay] for x in qkv])
        assert torch.equal(again, grouped[stay])


@every_executor
def test_a_hundred_identical_sequences_equal_one(name: str) -> None:
    """O020: one long common prefix and nothing else; then 30 of A beside 20 of B."""
    shape = KvShape(1, 400, 16, 9, 3, 64)
    bench = Bench(name, shape, dtypes(name)[0], 256)
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


def worked_example(paths: Sequence[tuple[tuple[int, ...], ...]], page_size: int = 16) -> list[Member]:
    fresh = iter(range(9, 64))
    pages = [tuple(next(fresh) for _ in range(count)) for count in SUFFIX]
    return [
        Member(path, own, page_size * (sum(map(len, path)) + len(own) - 1) + i % 4, 1)
        for i, (path, own) in enumerate(zip(paths, pages, strict=True))
    ]


def test_the_worked_example_has_these_arrays() -> None:
    """The arrays of the reference's example: groups A, B and C, a loner, and a root under A and B."""
    folded = [(ROOT + A,)] * 4 + [(ROOT + B,)] * 3 + [(C,)] * 2 + [()]
    two = step_plan(worked_example(folded, 4), 4, 4).attention
    first, last = two.levels
    assert first.qo_indptr.tolist() == [0, 4, 7, 9, 10]
    assert first.kv_indptr.tolist() == [0, 5, 8, 10, 10]
    assert first.kv_indices.tolist() == [*ROOT, *A, *ROOT, *B, *C]
    assert first.last_page_len.tolist() == [4, 4, 4, 0]
    assert last.qo_indptr.tolist() == list(range(11))
    assert last.kv_indptr.tolist() == [0, 1, 3, 4, 5, 7, 8, 9, 10, 12, 13]

    tree = [(ROOT, A)] * 4 + [(ROOT, B)] * 3 + [((), C)] * 2 + [()]
    three = step_plan(worked_example(tree, 4), 4, 4).attention
    root, groups, last = three.levels
    assert root.qo_indptr.tolist() == [0, 7, 9, 10]
    assert root.kv_indptr.tolist() == [0, 2, 2, 2]
    assert root.last_page_len.tolist() == [4, 0, 0]
    assert groups.qo_indptr.tolist() == [0, 4, 7, 9, 10]
    assert groups.kv_indptr.tolist() == [0, 3, 4, 6, 6]
    assert groups.last_page_len.tolist() == [4, 4, 4, 0]
    assert last.kv_indptr.tolist() == two.levels[1].kv_indptr.tolist()


@every_executor
def test_the_worked_example_reads_21_pages_instead_of_46(name: str) -> None:
    """Flat, at two levels and at three levels: the same bits, from fewer and fewer reads."""
    bench = Bench(name, KvShape(1, 64, 16, 4, 2, 64), torch.float32, 16)
    members = worked_example([(ROOT, A)] * 4 + [(ROOT, B)] * 3 + [((), C)] * 2 + [()])
    qkv = bench.rows(10)
    tree = bench.run(members, qkv)
    assert sum(bench.executor.kv_tokens_read) == 16 * 21
    folded = [(ROOT + A,)] * 4 + [(ROOT + B,)] * 3 + [(C,)] * 2 + [()]
    assert torch.equal(bench.run(worked_example(folded), qkv), tree)
    assert sum(bench.executor.kv_tokens_read) == 16 * 23
    assert torch.equal(bench.run([m.flat() for m in members], qkv), tree)
    assert sum(bench.executor.kv_tokens_read) == 16 * 46
    bench.assert_right(tree, step_plan(members, 16, 16), qkv)
