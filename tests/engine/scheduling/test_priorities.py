"""Who is more urgent goes first, loses its place last, and keeps nobody of its own kind waiting for ever."""

from __future__ import annotations

import pytest

from tests.engine.scheduling.rig import Rig


def prompt(i: int, length: int = 12) -> tuple[int, ...]:
    """Prompts that share nothing."""
    return tuple(range(1000 * (i + 1), 1000 * (i + 1) + length))


def order_of_first_tokens(rig: Rig, ids: list[int]) -> list[int]:
    """Run all, and tell in which order they began to answer."""
    found: list[int] = []
    while rig.step():
        found += [i for i in ids if rig.streams[i].tokens and i not in found]
    return found


def test_the_queue_goes_by_priority_and_then_by_arrival() -> None:
    rig = Rig(64, 4, max_running=1)
    running = rig.submit(prompt(9), 2)
    rig.step()
    ids = [rig.submit(prompt(i), priority=p) for i, p in enumerate((0, 1, 0, 2, 1, -1))]
    assert order_of_first_tokens(rig, [running, *ids]) == [running, *(ids[i] for i in (3, 1, 4, 0, 2, 5))]
    rig.audit_idle()


def test_a_prompt_that_is_more_urgent_takes_the_step_first() -> None:
    """A long prefill is under way; the newcomer's rows come before its next chunk."""
    rig = Rig(200, 4, max_step_tokens=20)
    slow = rig.submit(prompt(0, 200))
    rig.step()
    fast = rig.submit(prompt(1, 30), priority=1)
    order = order_of_first_tokens(rig, [slow, fast])
    assert order == [fast, slow]


@pytest.mark.parametrize("urgent", range(4))
def test_the_least_urgent_is_preempted_first_and_the_urgent_never(urgent: int) -> None:
    """Four grow in a pool for two, one of them urgent, whenever it came."""
    rig = Rig(20, 4)
    ids = [rig.submit(prompt(i, 8), 40, priority=1 if i == urgent else 0) for i in range(4)]
    lost: set[int] = set()
    while rig.step():
        lost |= {s.id for s in rig.scheduler.roster.waiting}
    assert rig.scheduler.counters.preemptions > 0
    assert urgent not in lost
    assert all(len(rig.streams[i].tokens) == 40 for i in ids)
    rig.audit_idle()


def test_a_full_queue_loses_its_last_less_urgent_one() -> None:
    """Of the least urgent the last to come; nobody goes for an equal."""
    rig = Rig(64, 4, max_running=1)
    rig.submit(prompt(0), 30)
    rig.step()
    ids = [rig.submit(prompt(i + 1), priority=p) for i, p in enumerate((0, 1, 0, -1, 1))]
    assert [rig.shed(p) for p in (-1, 0, 1, 1, 1, 2, 2, 2)] == [
        None,
        *(ids[i] for i in (3, 2, 0)),
        None,
        *(ids[i] for i in (4, 1)),
        None,
    ]
    rig.drain()
    assert rig.scheduler.counters.finished["shed"] == 5
    assert [rig.streams[i].receipts for i in ids] == [[None]] * 5


def test_whoever_has_begun_is_not_shed() -> None:
    """Running, in flight or preempted: what has been paid for is not thrown away."""
    rig = Rig(64, 4, max_running=2)
    begun = [rig.submit(prompt(i), 9) for i in range(2)]
    rig.plan()
    assert rig.shed(5) is None
    rig.commit()
    rig.preempt(begun[1])
    assert rig.scheduler.waiting == 1
    assert rig.shed(5) is None
    late = rig.submit(prompt(3), 9)
    assert rig.shed(5) == late
    rig.drain()
    assert [rig.streams[i].finish for i in begun] == ["length", "length"]


def test_shedding_while_a_step_is_in_flight_changes_nothing_of_it() -> None:
    rig = Rig(64, 4, max_running=1)
    running = rig.submit(prompt(0), 5)
    waiting = rig.submit(prompt(0), 5)  # waits for the other's rows, too
    assert rig.plan() is not None
    assert rig.shed(1) == waiting
    rig.commit()
    rig.drain()
    assert rig.streams[running].finish == "length"


def test_nobody_starves_among_equals() -> None:
    """New ones keep coming, all as urgent: each is served in its turn, preempted ones before newer ones."""
    rig = Rig(24, 4, max_running=4)
    ids = [rig.submit(prompt(0, 10), 20)]
    for turn in range(1, 60):
        ids.append(rig.submit(prompt(turn, 10), 20))
        for _ in range(6):
            rig.step()
    rig.drain()
    assert rig.scheduler.counters.preemptions > 0
    ends = [i for i in rig.ended if i in ids]
    assert all(abs(place - i) < 5 for place, i in enumerate(ends)), "one was overtaken again and again"


def test_an_urgent_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    """Also where the long one takes whole steps."""
    rig = Rig(300, 4, max_step_tokens=20)
    slow = rig.submit(prompt(0, 400))
    rig.step()
    fast = rig.submit(prompt(1, 35), priority=1)
    rig.step()
    plan = rig.plan()
    assert plan is not None
    assert rig.streams[fast].tokens == []
    assert dict(
        zip(plan.sequence_ids, (plan.row_indptr[1:] - plan.row_indptr[:-1]).tolist(), strict=True)
    ) == {
        fast: 15,
        slow: 5,
    }
    rig.commit()
    assert len(rig.streams[fast].tokens) == 1
    rig.drain()


def test_whoever_is_waited_for_is_as_urgent_as_the_one_who_waits() -> None:
    """An urgent request waits for the rows of one that is not: a third, less urgent than it and more than
    the owner, goes before neither."""
    rig = Rig(400, 4, max_step_tokens=200)
    owner = rig.submit(prompt(1, 300))
    rig.step()
    third = rig.submit(prompt(0, 1000), priority=1)
    urgent = rig.submit((*prompt(1, 300), 7), priority=2)
    assert order_of_first_tokens(rig, [owner, third, urgent]) == [owner, urgent, third]
    assert rig.streams[urgent].cached == 300
    assert rig.scheduler.counters.computed_rows == 300 + 1 + 1000
    rig.audit_idle()


def test_a_lifted_request_is_ordinary_again_once_its_rows_are_there() -> None:
    """Only its prefill was waited for: what it goes on to generate is no more urgent than before."""
    rig = Rig(100, 4, max_step_tokens=40)
    older = rig.submit(prompt(0, 30), 60)
    owner = rig.submit(prompt(1, 60), 60)
    rig.step()
    urgent = rig.submit(prompt(1, 60), 60, priority=1)

    def order() -> list[int]:
        return [s.id for s in rig.scheduler.roster.running]

    rig.step()
    assert order() == [owner, older]
    rig.step()
    assert order() == [older, owner]
    rig.step()
    assert order() == [urgent, older, owner]
    rig.drain()


def test_a_lifted_request_that_is_preempted_waits_in_its_own_place() -> None:
    rig = Rig(100, 4, max_step_tokens=40)
    older = rig.submit(prompt(0, 30), 60)
    owner = rig.submit(prompt(1, 60), 60)
    rig.step()
    urgent = rig.submit(prompt(1, 60), 60, priority=1)
    rig.step()
    rig.preempt(owner)
    assert [s.id for s in rig.scheduler.roster.waiting] == [urgent, owner]
    rig.step()
    assert [s.id for s in rig.scheduler.roster.running] == [urgent, older]
    rig.drain()
    assert rig.streams[urgent].cached == 49
