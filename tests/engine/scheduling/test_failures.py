"""A step that fails ends only its own requests; nothing it wrote is ever read, and no page is lost."""

from __future__ import annotations

import pytest

from engine.plan import StepResult
from tests.engine.scheduling.rig import Rig
from tests.engine.scheduling.truth import choose

PROMPT = tuple(range(100, 121))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("at", range(6))
def test_a_step_that_raises_ends_those_it_ran(at: int, early: bool) -> None:
    rig = Rig(64, 4, max_step_tokens=12)
    ids = [rig.submit((*PROMPT, 500 + i), 4) for i in range(6)]
    for _ in range(at):
        rig.step()
    plan = rig.plan()
    assert plan is not None
    concerned = set(plan.sequence_ids)
    rig.fail(early=early)
    assert {i for i in ids if rig.streams[i].finish == "error"} == concerned
    rig.drain()
    assert {i for i in ids if rig.streams[i].finish == "error"} == concerned
    assert rig.scheduler.counters.failed_steps == 1


@pytest.mark.parametrize("bad", [{0}, {1}, {0, 2}, {0, 1, 2}])
def test_a_bad_number_ends_only_its_own_request(bad: set[int]) -> None:
    rig = Rig(64, 4)
    ids = [rig.submit((*PROMPT, 500 + i), 9) for i in range(3)]
    for _ in range(3):
        rig.step()
    plan = rig.plan()
    assert plan is not None
    concerned = {plan.sequence_ids[i] for i in bad}
    rig.commit(frozenset(bad))
    rig.drain()
    assert {i for i in ids if rig.streams[i].finish == "error"} == concerned
    assert {rig.streams[i].finish for i in set(ids) - concerned} <= {"length"}


def test_pages_of_a_failed_step_are_wiped_before_they_are_used() -> None:
    rig = Rig(6, 4)
    rig.submit(range(100, 108), 5)
    rig.plan()
    rig.fail()
    rig.submit(range(200, 205), 5)
    plan = rig.plan()
    assert plan is not None
    assert set(plan.wipe) == {1, 2}
    rig.drain()
    assert rig.run(range(300, 305)).finish == "length"
    assert len(rig.scheduler.tables.wipe) == 0, "wiped once is enough"


def test_a_wipe_that_did_not_happen_is_asked_for_again() -> None:
    """The next step needs one of two pages to wipe, and raises before it wipes; the one after takes both."""
    rig = Rig(6, 4)
    rig.submit(range(100, 108), 5)
    rig.plan()
    rig.fail()
    rig.submit(range(200, 203), 5)
    rig.plan()
    rig.fail(early=True)
    rig.submit(range(300, 305), 5)
    plan = rig.plan()
    assert plan is not None
    assert {1, 2} <= set(plan.wipe)
    rig.drain()


def test_a_published_tail_goes_with_its_failed_writer() -> None:
    """Rows committed earlier stand in the page that the failed step wrote: the page goes as a whole."""
    rig = Rig(64, 4)
    rig.submit(PROMPT, 9)
    rig.step()
    assert rig.scheduler.tree.match("", PROMPT, 99).length == 21
    rig.plan()
    rig.commit(frozenset({0}))
    assert rig.scheduler.tree.match("", PROMPT, 99).length == 20
    assert rig.run(PROMPT).cached == 20


def test_an_end_asked_for_in_a_step_that_fails_is_an_error() -> None:
    rig = Rig(64, 4)
    id = rig.submit(PROMPT, 9)
    rig.plan()
    rig.stop(id)
    rig.fail()
    assert rig.streams[id].finish == "error"
    rig.drain()


def test_a_tail_covered_by_one_who_leaves_is_its_writers_again() -> None:
    """B generated past the end of A's prompt; when B leaves, its longer tail takes the place of A's."""
    tokens = [0]
    for _ in range(5):
        tokens.append(choose(0, tokens))
    rig = Rig(40, 8)
    b = rig.submit(tokens[:1], 20)
    for _ in range(3):
        rig.step()
    a = rig.submit(tokens[:2], 20)
    rig.step()
    rig.stop(b)
    rig.drain()
    assert rig.streams[a].tokens == rig.streams[a].expected


def test_a_tail_covered_by_a_preempted_one_is_its_writers_again() -> None:
    tokens = [0]
    for _ in range(5):
        tokens.append(choose(0, tokens))
    rig = Rig(40, 8)
    b = rig.submit(tokens[:1], 20)
    for _ in range(3):
        rig.step()
    rig.submit(tokens[:2], 20)
    rig.step()
    rig.preempt(b)
    rig.drain()


# -- the contract of plan and commit ---------------------------------------------------------------


def test_one_step_is_in_flight_at_most() -> None:
    rig = Rig(64, 4)
    rig.submit(PROMPT, 3)
    plan = rig.plan()
    assert plan is not None
    with pytest.raises(RuntimeError, match="in flight"):
        rig.scheduler.plan()
    rig.commit()
    with pytest.raises(RuntimeError, match="not in flight"):
        rig.scheduler.commit(plan, StepResult((1,), (None,)))
    with pytest.raises(RuntimeError, match="not in flight"):
        rig.scheduler.fail(plan, "late")
    rig.drain()


def test_the_tile_is_a_multiple_of_the_page() -> None:
    with pytest.raises(ValueError, match="multiple of the page"):
        Rig(64, 4, align=6)


def test_an_idle_scheduler_plans_nothing() -> None:
    rig = Rig(64, 4)
    assert rig.plan() is None
    assert rig.scheduler.idle


def test_a_paused_scheduler_finishes_what_runs_and_admits_nothing() -> None:
    rig = Rig(64, 4)
    a = rig.submit(PROMPT, 3)
    rig.step()
    rig.scheduler.paused = True
    b = rig.submit(PROMPT, 3)
    while rig.step():
        pass
    assert (rig.streams[a].finish, rig.streams[b].finish) == ("length", None)
    rig.scheduler.paused = False
    rig.drain()
    assert rig.streams[b].cached == 20


def test_a_paused_scheduler_lets_a_preempted_request_go_on() -> None:
    rig = Rig(64, 4)
    a = rig.submit(PROMPT, 5)
    rig.step()
    rig.scheduler.paused = True
    rig.preempt(a)
    assert rig.scheduler.admitted == 1
    rig.drain()
    assert len(rig.streams[a].tokens) == 5


def test_those_that_have_not_begun_can_be_taken_out() -> None:
    """In order of arrival; who has begun stays, also where it waits again."""
    rig = Rig(64, 4, max_running=1)
    ids = [rig.submit(PROMPT, 5) for _ in range(4)]
    rig.step()
    rig.preempt(ids[0])
    assert [s.id for s in rig.scheduler.take_waiting()] == ids[1:]
    assert (rig.scheduler.waiting, rig.scheduler.admitted) == (1, 1)
    while rig.step():
        pass
    assert rig.scheduler.idle
    assert [rig.streams[i].finish for i in ids] == ["length", None, None, None]
