"""Faults that other engines had, as the scheduler must answer them. Row ids are those of docs/faults.md."""

from __future__ import annotations

import pytest

from engine.plan import StepCosts, StepPlan
from engine.types import Namespace
from tests.engine.scheduling.rig import Rig


def unrelated(i: int, length: int) -> tuple[int, ...]:
    """A prompt that shares no token with that of another i."""
    return tuple(range(10_000 * (i + 1), 10_000 * (i + 1) + length))


# -- what counts as cached -------------------------------------------------------------------------


def test_a_preempted_request_finds_its_own_pages_and_that_is_no_hit() -> None:
    """O005"""
    rig = Rig(20, 4)
    ids = [rig.submit(unrelated(i, 12), 40) for i in range(5)]
    rig.drain()
    counters = rig.scheduler.counters
    assert counters.preemptions > 0
    assert counters.recomputed_rows > 0
    assert counters.cached_tokens == 0
    assert counters.prompt_tokens == 5 * 12
    assert [rig.streams[i].cached for i in ids] == [0] * 5


def test_a_request_that_waits_for_room_is_looked_up_once() -> None:
    """O006"""
    rig = Rig(16, 4)
    warm = unrelated(0, 22)
    rig.run(warm)
    rig.submit(unrelated(1, 36), 25)
    rig.step()
    before = rig.scheduler.counters.requests, rig.scheduler.counters.cached_tokens
    id = rig.submit(warm, 20)
    for _ in range(15):
        assert rig.step()
        counters = rig.scheduler.counters
        assert (counters.requests, counters.cached_tokens) == before
        assert rig.scheduler.waiting == 1
    rig.drain()
    assert rig.scheduler.counters.requests == before[0] + 1
    assert rig.scheduler.counters.cached_tokens == before[1] + rig.streams[id].cached
    assert rig.scheduler.counters.prompt_tokens == 22 + 36 + 22


# -- namespaces ------------------------------------------------------------------------------------

KEYS = [None, "", "a", "ab", "a/b", "a\0b", "\0", "é", "e\u0301", "x" * 10_000]


def test_an_isolation_key_is_not_mistaken_for_an_account() -> None:
    """O007"""
    rig = Rig(200, 4)
    prompt = unrelated(0, 18)
    for name in ["", "model", "a"]:
        assert rig.run(prompt, namespace=("m", Namespace(account=name))).cached == 0
        assert rig.run(prompt, namespace=("m", Namespace(isolation_key=name))).cached == 0
        assert rig.run(prompt, namespace=("m", Namespace(account=name, isolation_key=name))).cached == 0
    assert rig.run(prompt, namespace=("m", Namespace())).cached == 0


def test_each_key_misses_first_and_hits_then() -> None:
    """O008"""
    rig = Rig(1000, 16)
    prompt = unrelated(0, 450)
    keys = [None, "one", "two", "three", "four", "five"]
    assert [rig.run(prompt, namespace=Namespace(isolation_key=k)).cached for k in keys] == [0] * 6
    assert [rig.run(prompt, namespace=Namespace(isolation_key=k)).cached for k in keys] == [449] * 6


def test_parts_of_a_namespace_are_not_joined() -> None:
    """O009"""
    rig = Rig(2000, 4)
    names = [Namespace(account=a, isolation_key=k) for a in KEYS for k in KEYS]
    assert [rig.run(unrelated(0, 6), namespace=n).cached for n in names] == [0] * len(names)
    assert [rig.run(unrelated(0, 6), namespace=n).cached for n in names] == [5] * len(names)


class Clash(str):
    """Text whose hash says nothing."""

    def __hash__(self) -> int:
        return 7


class ClashingToken(int):
    """A token whose hash says nothing."""

    def __hash__(self) -> int:
        return 7


def test_equal_hashes_share_nothing() -> None:
    """O012: tokens and namespaces are compared, never only their hashes."""
    rig = Rig(200, 4)
    prompt = [ClashingToken(t) for t in unrelated(0, 18)]
    other = [ClashingToken(t) for t in unrelated(1, 18)]
    assert rig.run(prompt, namespace=Clash("a")).cached == 0
    assert rig.run(other, namespace=Clash("a")).cached == 0
    assert rig.run(prompt, namespace=Clash("b")).cached == 0
    assert rig.run(prompt, namespace=Clash("a")).cached == 17


def test_a_new_weight_version_matches_nothing_of_the_old() -> None:
    """O013: and the old pages can be had back, however warm they were."""
    rig = Rig(12, 4)
    prompt = unrelated(0, 30)
    rig.run(prompt, namespace=("model", 1))
    assert rig.run(prompt, namespace=("model", 1)).cached == 29
    assert rig.run(prompt, namespace=("model", 2)).cached == 0
    assert rig.run(prompt, namespace=("model", 2)).cached == 29


# -- pages -----------------------------------------------------------------------------------------


def test_pages_are_counted_once_where_prompts_part_inside_them() -> None:
    """O016: 96 requests, pages of 32 tokens, prefixes that diverge inside a page; Rig checks each step."""
    rig = Rig(400, 32, max_running=64)
    for i in range(96):
        rig.submit(unrelated(i % 3, 40 + i % 11) + unrelated(10 + i, 5), 1 + i % 7)
    rig.drain()
    tree = rig.scheduler.tree
    assert tree.evictable_pages == sum(len(n.pages) for n in tree.nodes())
    assert tree.pinned_pages == 0


def test_many_equal_prompts_at_once_leave_one_copy() -> None:
    """O018: also where each computes for itself; then eviction under pressure."""
    rig = Rig(64, 4, max_step_tokens=2048)
    prompt = unrelated(0, 14)
    ids = [rig.submit(prompt, 3, cache_max_len=0) for _ in range(16)]
    rig.drain()
    assert rig.scheduler.counters.computed_rows == 16 * (14 + 2)
    assert rig.scheduler.tree.evictable_pages == 4
    assert len({tuple(rig.streams[i].tokens) for i in ids}) == 1
    for i in range(1, 6):
        rig.run(unrelated(i, 200))
    assert rig.run(prompt).cached == 0


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 24])
def test_a_partly_cached_prompt_in_chunks_that_end_inside_pages(chunk: int) -> None:
    """O025: 2.5 pages are cached, the prompt has 20, others decode meanwhile."""
    rig = Rig(200, 16, max_step_tokens=chunk + 3)
    prompt = unrelated(0, 320)
    rig.run(prompt[:40])
    for i in range(1, 4):
        rig.submit(unrelated(i, 5), 250)
    while rig.scheduler.counters.generated_tokens < 4:
        rig.step()
    id = rig.submit(prompt, 5)
    rig.drain()
    assert rig.streams[id].cached == 40
    assert rig.scheduler.counters.recomputed_rows == 0


def test_a_request_does_not_evict_what_it_is_about_to_hit() -> None:
    """O026: the pool is full of evictable pages, this prompt's own the least recently used of them."""
    rig = Rig(32, 4)
    prompt = unrelated(0, 40)
    rig.run(prompt)
    for i in range(1, 5):
        rig.run(unrelated(i, 17))
    assert rig.pool.free_pages == 2
    assert rig.run(prompt + unrelated(7, 60)).cached == 40


# -- room ------------------------------------------------------------------------------------------


def test_the_context_fits_the_pool_or_the_scheduler_does_not_start() -> None:
    """O027"""
    with pytest.raises(ValueError, match="must fit the pool"):
        Rig(10, 4, context=41)
    rig = Rig(10, 4, context=40)
    id = rig.submit(unrelated(0, 39), 5)
    small = [rig.submit(unrelated(i, 3), 2) for i in range(1, 5)]
    rig.drain()
    assert len(rig.streams[id].tokens) == 1
    assert all(rig.streams[i].finish == "length" for i in small)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_request_grows_until_the_pool_is_full(page_size: int) -> None:
    """O029: it ends with "length", and the next is served."""
    pages = 48 // page_size
    rig = Rig(pages, page_size)
    stream = rig.run(unrelated(0, 40), 1000)
    assert (stream.finish, len(stream.all_tokens)) == ("length", 48)
    assert rig.run(unrelated(1, 40), 3).finish == "length"


def test_two_warm_prompts_that_do_not_fit_together() -> None:
    """O030: who waits holds no pins."""
    rig = Rig(24, 4)
    long = [unrelated(0, 50), unrelated(1, 50)]
    rig.run(long[0][:40])
    rig.run(long[1][:40])
    ids = [rig.submit(long[i] + unrelated(2 + i, 20), 10) for i in range(2)]
    ids += [rig.submit(unrelated(5 + i, 4), 3) for i in range(6)]
    rig.step()
    assert rig.scheduler.running == 1
    assert rig.scheduler.waiting == 7
    rig.drain()
    assert all(rig.streams[i].finish == "length" for i in ids)


@pytest.mark.parametrize("pages", [15, 16, 20, 29, 30])
def test_all_reach_a_page_edge_in_the_same_step(pages: int) -> None:
    """O031: room is counted in pages, not in tokens."""
    rig = Rig(pages, 16, max_running=15)
    ids = [rig.submit(unrelated(i, 14), 12) for i in range(15)]
    rig.drain()
    assert all(len(rig.streams[i].tokens) == 12 for i in ids)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_stream_is_one_reply_across_preemption(page_size: int) -> None:
    """O032: Rig compares each stream with what the request gives alone; some replies end by a stop token."""
    rig = Rig(48 // page_size, page_size)
    ids = [rig.submit(unrelated(i % 3, 6), 30, seed=i, ignore_eos=i % 2 == 0) for i in range(9)]
    rig.drain()
    assert rig.scheduler.counters.preemptions > 0
    assert {rig.streams[i].finish for i in ids} == {"length", "stop"}


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("company", [0, 5])
def test_max_tokens_0_runs_the_prompt_and_nothing_else(company: int) -> None:
    """O034"""
    rig = Rig(64, 4)
    for i in range(company):
        rig.submit(unrelated(i, 9), 8)
    rig.step()
    id = rig.submit(unrelated(9, 21), 0)
    rig.drain()
    stream = rig.streams[id]
    assert (stream.finish, stream.tokens, stream.cached) == ("length", [], 0)
    assert rig.run(unrelated(9, 21)).cached == 20


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("below", "max_tokens", "generated"), [(2, 1, 1), (2, 2, 2), (2, 99, 2), (1, 1, 1), (1, 9, 1)]
)
def test_prompts_just_below_the_limit(page_size: int, below: int, max_tokens: int, generated: int) -> None:
    """O035"""
    rig = Rig(64, page_size, context=48)
    stream = rig.run(unrelated(0, 48 - below), max_tokens)
    assert (len(stream.tokens), stream.finish) == (generated, "length")


@pytest.mark.parametrize("length", [0, 48, 49, 96])
def test_prompts_that_do_not_fit_are_refused_at_the_door(length: int) -> None:
    """O033, O035, O036: at once, and nobody else notices."""
    rig = Rig(64, 4, context=48)
    other = rig.submit(unrelated(0, 9), 20)
    rig.step()
    with pytest.raises(ValueError, match=f"{length} tokens"):
        rig.submit(unrelated(1, length))
    assert (rig.scheduler.running, rig.scheduler.waiting) == (1, 0)
    rig.drain()
    assert len(rig.streams[other].tokens) == 20


def test_a_model_that_never_stops_ends_with_the_context() -> None:
    """O037"""
    rig = Rig(64, 4, context=60)
    stream = rig.run(unrelated(0, 10), 10**9, ignore_eos=True)
    assert (len(stream.all_tokens), stream.finish) == (60, "length")


# -- leaving ---------------------------------------------------------------------------------------


def test_a_burst_of_which_half_leave_while_they_wait() -> None:
    """O038: Rig.drain checks that nothing is pinned at idle."""
    rig = Rig(24, 4, max_running=4)
    ids = [rig.submit(unrelated(i % 20, 3 + i % 7), 1 + i % 4) for i in range(200)]
    for turn, id in enumerate(ids[::2]):
        if turn % 3 == 0:
            rig.step()
        rig.stop(id)
    rig.drain()
    left = [rig.streams[i].finish for i in ids[::2]]
    assert left.count("abort") > 80
    assert {rig.streams[i].finish for i in ids[1::2]} == {"length"}


def test_leaving_before_the_first_step() -> None:
    """O039: while all slots are taken, twice, and with an id that never was."""
    rig = Rig(24, 4, max_running=1)
    running = rig.submit(unrelated(0, 5), 9)
    rig.step()
    waiting = rig.submit(unrelated(1, 5))
    rig.stop(waiting)
    rig.stop(waiting)
    rig.scheduler.stop(12345, "abort")
    rig.drain()
    assert rig.streams[waiting].receipts == [None]
    assert len(rig.streams[running].tokens) == 9


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("max_running", [1, 2])
def test_leaving_stops_nobody_else(max_running: int, in_flight: bool) -> None:
    """O042: from the queue (1 runs) and out of the same batch (2 run)."""
    rig = Rig(64, 4, max_running=max_running)
    a = rig.submit(unrelated(0, 9), 20)
    b = rig.submit(unrelated(0, 9), 20)
    for _ in range(4):
        rig.step()
    if in_flight:
        rig.plan()
    rig.stop(b)
    rig.drain()
    assert (rig.streams[b].finish, rig.streams[a].finish) == ("abort", "length")
    assert len(rig.streams[a].tokens) == 20


def test_gauges_are_right_when_all_leave_and_no_step_follows() -> None:
    """O092"""
    rig = Rig(64, 4, max_running=3)
    ids = [rig.submit(unrelated(i, 9), 20) for i in range(6)]
    rig.step()
    rig.step()
    for id in ids:
        rig.stop(id)
    rig.audit_idle()


# -- pace ------------------------------------------------------------------------------------------

COSTS = StepCosts(base_ms=1.0, row_ms=0.5, pair_ms=0.002)


def predicted(plan: StepPlan) -> float:
    return COSTS.predict(plan.rows, int(plan.attention.positions.sum()) + plan.rows)


def test_a_long_prompt_does_not_hold_up_running_streams() -> None:
    """O043: while streams run, each step stays within its time and gives each of them a token."""
    rig = Rig(300, 16, COSTS, step_ms=40.0, max_step_tokens=512)
    streams = [rig.submit(unrelated(i, 10), 150) for i in range(8)]
    rig.step()
    long = rig.submit(unrelated(20, 2000), 1)
    steps = 0
    while rig.streams[long].finish is None:
        plan = rig.plan()
        assert plan is not None
        assert set(streams) <= set(plan.sequence_ids), "a stream got no row"
        prefill = plan.rows - len(streams)
        assert prefill >= 1, "the prompt got no row"
        assert predicted(plan) <= 40.0 or prefill <= 16
        rig.commit()
        steps += 1
    assert 2000 / 68 <= steps <= 2000 / 16
    rig.drain()


def test_without_streams_a_prompt_takes_whole_steps() -> None:
    """O043: the time budget binds only while decode rows run."""
    rig = Rig(300, 16, COSTS, step_ms=1.0, max_step_tokens=512)
    rig.submit(unrelated(0, 2000), 1)
    sizes = []
    while (plan := rig.plan()) is not None:
        sizes.append(plan.rows)
        rig.commit()
    assert sizes == [512, 512, 512, 464]


def test_every_running_stream_gets_a_token_in_every_step() -> None:
    """No more streams begin than a step has rows."""
    rig = Rig(100, 4, max_step_tokens=3)
    ids = [rig.submit(unrelated(i, 3), 12) for i in range(7)]
    while (plan := rig.plan()) is not None:
        streams = [i for i in ids if rig.streams[i].tokens and rig.streams[i].finish is None]
        assert set(streams) <= set(plan.sequence_ids)
        rig.commit()
    assert all(len(rig.streams[i].tokens) == 12 for i in ids)


def test_a_preempted_stream_runs_no_row_in_that_step() -> None:
    """A stream has its row in the plan already when an older prompt takes the last page from it.

    The first request lets the second wait; the third begins to stream meanwhile and grows into the room that
    the second was promised.
    """
    rig = Rig(15, 4, max_step_tokens=8)
    first = rig.submit(unrelated(0, 12), 1)
    second = rig.submit(unrelated(0, 12) + unrelated(1, 40), 1)
    third = rig.submit(unrelated(2, 3), 40)
    rig.drain()
    assert rig.streams[second].cached == 12
    assert rig.scheduler.counters.preemptions == 1
    assert [len(rig.streams[i].tokens) for i in (first, second, third)] == [1, 1, 40]


@pytest.mark.parametrize(("pages", "admitted"), [(10, True), (11, False), (13, False)])
def test_admission_keeps_a_page_for_each_running_sequence(pages: int, admitted: bool) -> None:
    """Otherwise the newcomer would be preempted as soon as one of them needs its next page."""
    rig = Rig(16, 4)
    for i in range(3):
        rig.submit(unrelated(i, 3), 4)  # a page each, and a second one after the next step
    rig.step()
    id = rig.submit(unrelated(5, 4 * pages), 1)
    plan = rig.plan()
    assert plan is not None
    assert (id in plan.sequence_ids) == admitted
    rig.drain()
    assert rig.scheduler.counters.preemptions == 0


def test_a_request_evicts_no_more_than_it_takes() -> None:
    """O017"""
    rig = Rig(32, 4)
    for i in range(4):
        rig.run(unrelated(i, 32), 0)
    assert rig.pool.free_pages == 0
    rig.run(unrelated(9, 20), 0)
    assert rig.scheduler.tree.evicted_pages == 5
    assert [rig.scheduler.tree.match("", unrelated(i, 32), 99).length for i in range(4)] == [12, 32, 32, 32]


def test_request_ids_of_clients_mean_nothing() -> None:
    """O044: all of Rig's requests carry the same one; each stream gets its own tokens."""
    rig = Rig(64, 4)
    ids = [rig.submit(unrelated(i, 5), 6, seed=i) for i in range(3)]
    assert len({rig.streams[i].request.request_id for i in ids}) == 1
    rig.drain()
    assert len(set(ids)) == 3
