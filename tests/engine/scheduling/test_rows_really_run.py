"""A cold prefix is computed once: the counter of rows really run is exact, whoever comes, waits or leaves."""

from __future__ import annotations

import pytest

from tests.engine.scheduling.rig import Rig

PREFIX = tuple(range(10_000, 11_500))  # 1,500 tokens: 93 pages of 16 and 12 tokens more
TAIL = 10


def prompt(i: int, shared: tuple[int, ...] = PREFIX, tail: int = TAIL) -> tuple[int, ...]:
    """A shared beginning, and an end that differs from its first token on."""
    return shared + tuple(range(100 * i, 100 * i + tail))


def cold(**limits: object) -> Rig:
    limits.setdefault("max_step_tokens", 512)
    return Rig(400, 16, **limits)


def rows(rig: Rig) -> int:
    assert rig.scheduler.counters.recomputed_rows == 0
    return rig.scheduler.counters.computed_rows


@pytest.mark.parametrize("max_step_tokens", [100, 512, 4096])
def test_arriving_together(max_step_tokens: int) -> None:
    rig = cold(max_step_tokens=max_step_tokens)
    ids = [rig.submit(prompt(i)) for i in range(16)]
    rig.drain()
    assert rows(rig) == 1500 + 16 * TAIL
    assert [rig.streams[i].cached for i in ids] == [0] + [1500] * 15


def test_decode_rows_come_on_top() -> None:
    rig = cold()
    for i in range(16):
        rig.submit(prompt(i), 5)
    rig.drain()
    assert rows(rig) == 1500 + 16 * TAIL + 16 * 4  # the fifth token of each is never fed back


def test_spread_over_the_owners_prefill() -> None:
    rig = cold(max_step_tokens=100)
    for i in range(16):
        rig.submit(prompt(i))
        rig.step()
    rig.drain()
    assert rows(rig) == 1500 + 16 * TAIL


def test_arriving_while_the_owners_step_is_in_flight() -> None:
    rig = cold()
    rig.submit(prompt(0))
    for i in range(1, 16):
        if rig.plan() is not None:
            rig.submit(prompt(i))
            rig.commit()
        else:
            rig.submit(prompt(i))
    rig.drain()
    assert rows(rig) == 1500 + 16 * TAIL


def test_diverging_inside_a_page_that_the_owner_has_not_filled() -> None:
    """Follower i leaves the owner's prompt after 90 + i tokens: inside two pages and at the edge between."""
    rig = cold(max_step_tokens=64)
    ids = [rig.submit(prompt(0, PREFIX[:200], 0))]
    ids += [rig.submit(prompt(i, PREFIX[: 90 + i], 7)) for i in range(1, 16)]
    rig.step()
    assert rig.scheduler.running == 1, "the followers wait"
    rig.drain()
    assert rows(rig) == 200 + 15 * 7
    assert [rig.streams[i].cached for i in ids] == [0] + [90 + i for i in range(1, 16)]


def test_diverging_inside_the_last_page_of_a_shorter_owner() -> None:
    """The owner's prompt ends at 1,495, inside the page in which the followers go on."""
    rig = cold()
    rig.submit(PREFIX[:1495])
    for i in range(1, 16):
        rig.submit(prompt(i))
    rig.drain()
    assert rows(rig) == 1495 + 5 + 15 * TAIL  # the 5 tokens from 1,495 on by the second, once


def test_identical_prompts_run_one_row_each() -> None:
    rig = cold()
    for _ in range(16):
        rig.submit(PREFIX)
    rig.drain()
    assert rows(rig) == 1500 + 15


@pytest.mark.parametrize("in_flight", [False, True])
def test_the_first_one_leaves_half_way(in_flight: bool) -> None:
    rig = cold()
    ids = [rig.submit(prompt(i)) for i in range(16)]
    rig.step()
    if in_flight:
        rig.plan()
    rig.stop(ids[0])
    rig.drain()
    assert rows(rig) == 1500 + 15 * TAIL
    taken_over = 1024 if in_flight else 512
    assert [rig.streams[i].cached for i in ids] == [0, taken_over] + [1500] * 14


@pytest.mark.parametrize("early", [False, True])
def test_the_first_ones_step_fails(early: bool) -> None:
    """What the failed step ran is not kept and not counted; the next in line computes it again."""
    rig = cold()
    ids = [rig.submit(prompt(i)) for i in range(16)]
    rig.step()
    rig.plan()
    rig.fail(early=early)
    rig.drain()
    assert rows(rig) == 1500 + 15 * TAIL
    assert [rig.streams[i].cached for i in ids] == [0, 512] + [1500] * 14
    assert rig.streams[ids[0]].finish == "error"


def test_the_first_one_gives_a_bad_number() -> None:
    rig = cold()
    ids = [rig.submit(prompt(i)) for i in range(16)]
    rig.step()
    rig.plan()
    rig.commit(bad=frozenset({0}))
    rig.drain()
    assert rows(rig) == 512 + 512 + (1500 - 512) + 15 * TAIL  # the bad step ran, and counts
    assert rig.streams[ids[0]].finish == "error"


def test_a_preempted_owner_goes_on_where_it_was() -> None:
    rig = cold()
    ids = [rig.submit(prompt(i)) for i in range(16)]
    rig.step()
    rig.preempt(ids[0])
    rig.drain()
    assert rows(rig) == 1500 + 16 * TAIL
    assert rig.scheduler.counters.preemptions == 1


def test_nested_prefixes_are_computed_once_each() -> None:
    """Four groups of four: all share 500 tokens, each group 500 more."""
    rig = cold()
    for group in range(4):
        shared = PREFIX[:500] + tuple(range(20_000 + 1000 * group, 20_500 + 1000 * group))
        for i in range(4):
            rig.submit(prompt(4 * group + i, shared))
    rig.drain()
    assert rows(rig) == 500 + 4 * 500 + 16 * TAIL


def test_namespaces_compute_on_their_own() -> None:
    rig = cold(max_step_tokens=2000)
    for i in range(16):
        rig.submit(prompt(i), namespace=("account", i % 2))
    rig.plan()
    assert rig.scheduler.running == 2, "one waited for what is computed in another namespace"
    rig.drain()
    assert rows(rig) == 2 * 1500 + 16 * TAIL


def test_without_cache_each_computes_all() -> None:
    """cache_max_len 0 neither matches nor waits; what it computes is kept, once."""
    rig = cold(max_step_tokens=8192)
    for i in range(4):
        rig.submit(prompt(i), cache_max_len=0)
    assert rig.plan() is not None
    assert rig.scheduler.running == 4
    rig.drain()
    assert rows(rig) == 4 * 1510
    assert rig.run(prompt(9)).cached == 1500
    assert rig.scheduler.tables.collapsed_pages == 3 * 93


def test_nobody_waits_for_an_owner_that_is_far_behind() -> None:
    """An owner without cache recomputes 1,500 cached tokens: one that shares 1,501 does not wait."""
    rig = cold(max_step_tokens=4096)
    rig.run(PREFIX)
    rig.submit((*PREFIX, 7, 8, 9), cache_max_len=0)
    late = rig.submit((*PREFIX, 7, 5))
    rig.step()
    rig.drain()
    assert rig.streams[late].cached == 1500
    assert rows(rig) == 1500 + 1503 + 2
