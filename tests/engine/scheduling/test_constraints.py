"""Sequences that follow a grammar: each keeps its place, ends with its grammar, and fails alone.

Script lets each token depend on all before it, and says so where it is led elsewhere; Rig compares streams
with what their requests give alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.engine.scheduling.rig import Rig
from tests.engine.scheduling.truth import STOP, Script

PROMPT = tuple(range(100, 121))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_finished_grammar_ends_with_stop_and_without_another_step(ignore_eos: bool) -> None:
    rig = Rig(64, 4)
    script = Script(5)
    id = rig.submit(PROMPT, 40, constraint=script, ignore_eos=ignore_eos)
    steps = rig.drain()
    stream = rig.streams[id]
    assert (stream.finish, len(stream.tokens)) == ("stop", 5)
    assert STOP not in stream.tokens
    assert steps == script.masks == 5


def test_a_grammar_that_is_cut_ends_with_length() -> None:
    rig = Rig(64, 4)
    stream = rig.run(PROMPT, 7, constraint=Script(30))
    assert (stream.finish, len(stream.tokens)) == ("length", 7)


def test_a_grammar_that_ends_with_the_last_allowed_token_ends_with_stop() -> None:
    rig = Rig(64, 4)
    assert rig.run(PROMPT, 7, constraint=Script(7)).finish == "stop"


def test_where_nothing_can_follow_an_end_token_does() -> None:
    rig = Rig(64, 4)
    stream = rig.run(PROMPT, 7, constraint=Script(0), ignore_eos=False)
    assert (stream.finish, stream.tokens) == ("stop", [STOP])


@pytest.mark.parametrize(
    ("script", "given"),
    [
        (Script(30, 0), 1),
        (Script(30, 4), 5),
        (Script(30, complete_limit=0), 0),
        (Script(30, complete_limit=4), 4),
    ],
)
def test_a_grammar_that_cannot_be_followed_ends_only_its_own_sequence(script: Script, given: int) -> None:
    """By its mask in the step, or by its end after it; the others, of the same prompt too, go on."""
    rig = Rig(64, 4)
    hit = rig.submit(PROMPT, 20, constraint=script.fresh())
    others = [rig.submit(PROMPT, 20), rig.submit(PROMPT, 20, constraint=Script(30)), rig.submit((1, 2), 20)]
    rig.drain()
    assert (rig.streams[hit].finish, len(rig.streams[hit].tokens)) == ("error", given)
    assert "tokens" in (rig.streams[hit].error or "")
    assert [rig.streams[i].finish for i in others] == ["length"] * 3
    assert rig.scheduler.counters.failed_steps == 0
    assert rig.run(PROMPT).cached == 20, "what it computed for its prompt is kept up to the last page"


def test_constrained_and_free_rows_stand_in_one_step() -> None:
    rig = Rig(200, 4, max_step_tokens=30)
    ids = [rig.submit(PROMPT[: 5 + i], 20, constraint=Script(4 + i) if i % 2 else None) for i in range(8)]
    rig.drain()
    assert [rig.streams[i].finish for i in ids] == ["length", "stop"] * 4
    assert [len(rig.streams[i].tokens) for i in ids] == [20, 5, 20, 7, 20, 9, 20, 11]


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("at", range(1, 9))
def test_a_preempted_sequence_goes_on_in_the_same_place(at: int, evict: bool) -> None:
    rig = Rig(64, 4)
    script = Script(9)
    id = rig.submit(PROMPT, 20, constraint=script)
    for _ in range(at):
        rig.step()
    rig.preempt(id)
    if evict:
        rig.clear()
    rig.drain()
    assert (rig.streams[id].finish, len(rig.streams[id].tokens)) == ("stop", 9)
    assert script.masks == 9, "no token is asked for twice"


class Witness(Script):
    """A script that remembers what it was told."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.told: list[Sequence[int]] = []

    def mask(self, generated: Sequence[int]) -> bytes:
        self.told.append(generated)
        return super().mask(generated)

    def complete(self, generated: Sequence[int]) -> bool:
        self.told.append(generated)
        return super().complete(generated)


def test_a_constraint_is_told_one_list_that_grows_and_nobody_elses() -> None:
    """No token costs a copy of those before it; choices of one prompt keep apart, preempted or not."""
    rig = Rig(64, 4)
    choices = [Witness(9), Witness(9), Witness(5)]
    ids = [rig.submit(PROMPT, 20, seed=i, constraint=choice) for i, choice in enumerate(choices)]
    for _ in range(4):
        rig.step()
    rig.preempt(ids[1])
    rig.clear()
    rig.drain()
    assert [len(choice.told) for choice in choices] == [18, 18, 10]
    assert len({id(told) for choice in choices for told in choice.told}) == len(choices)


def test_a_step_that_fails_moves_nobody_else() -> None:
    """One with a grammar waits for room while another's step fails; then it goes on where it was."""
    rig = Rig(64, 4, max_running=1)
    first = rig.submit(PROMPT, 12, constraint=Script(9))
    for _ in range(4):
        rig.step()
    rig.preempt(first)
    urgent = rig.submit((1, 2), 5, priority=1)
    rig.plan()
    rig.fail()
    rig.drain()
    assert (rig.streams[urgent].finish, rig.streams[first].finish) == ("error", "stop")


def test_what_a_choice_depends_on_is_told_and_nothing_else() -> None:
    """Tokens so far where penalties or a grammar need them, mirostat's bound across preemption: FakeRunner
    checks each sample."""
    rig = Rig(64, 4)
    ids = [
        rig.submit(PROMPT, 9, constraint=Script(30)),
        rig.submit(PROMPT, 9, repetition_penalty=1.5),
        rig.submit(PROMPT, 9, frequency_penalty=0.5),
        rig.submit(PROMPT, 9, presence_penalty=-0.5),
        rig.submit(PROMPT, 9, mirostat_target=3.0),
        rig.submit(PROMPT, 9),
    ]
    for _ in range(4):
        rig.step()
    for id in ids:
        rig.preempt(id)
    rig.clear()
    rig.drain()
    assert {rig.streams[i].finish for i in ids} == {"length"}


def test_choices_of_one_prompt_share_it_and_part() -> None:
    """O044: n choices run the prompt once, and one row each for all but the first."""
    rig = Rig(64, 4)
    ids = [rig.submit(PROMPT, 12, seed=i) for i in range(5)]
    rig.drain()
    assert rig.scheduler.counters.computed_rows == len(PROMPT) + 4 + 5 * 11
    assert len({tuple(rig.streams[i].tokens) for i in ids}) == 5
    again = [rig.submit(PROMPT, 12, seed=i) for i in range(5)]
    rig.drain()
    assert [rig.streams[i].tokens for i in again] == [rig.streams[i].tokens for i in ids]
