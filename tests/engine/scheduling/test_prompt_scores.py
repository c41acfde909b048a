"""Log-probabilities of the prompt: each once, of the right row, wherever pages, tiles, chunks and steps end.

FakeRunner's numbers depend on the whole prefix of the row that a plan names, and Rig compares every list with
that of the request alone.
"""

from __future__ import annotations

import pytest

from engine.scheduling.scheduler import SCORED_ROWS
from tests.engine.scheduling.rig import Rig, Stream

SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])


def text(length: int, first: int = 100) -> tuple[int, ...]:
    """Tokens that are all different, so that no wrong row has the right number."""
    return tuple(range(first, first + length))


def complete(stream: Stream) -> bool:
    """Whether it got one entry a prompt token from the first one asked for."""
    request = stream.request
    return len(stream.scores) == max(0, len(request.prompt) - request.prompt_logprobs_from)


@SIZES
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_every_length_has_one_entry_a_token_cold_and_warm(page_size: int, max_tokens: int) -> None:
    """O001, O034: the very first token has none, all others do; what is cached is run again, and said so."""
    for length in [*range(1, 2 * page_size + 3), 3 * page_size + 1]:
        rig = Rig(64, page_size, align=2 * page_size)
        cold, warm = (rig.run(text(length), max_tokens, prompt_logprobs=2) for _ in range(2))
        assert complete(cold)
        assert warm.scores == cold.scores
        assert warm.scores[0] is None
        assert [s.token_id for s in warm.scores[1:] if s] == list(text(length)[1:])
        assert all(len(s.top) == 2 for s in warm.scores[1:] if s)
        assert (cold.cached, warm.cached) == (0, 0)
        assert rig.run(text(length)).cached == length - 1, (
            "the next ordinary request is served from the cache"
        )


@SIZES
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 15, 16, 17, 40])
def test_entries_are_right_at_the_edges_of_chunks_pages_and_tiles(page_size: int, chunk: int) -> None:
    rig = Rig(256, page_size, align=2 * page_size, max_step_tokens=chunk)
    assert complete(rig.run(text(53), 3, prompt_logprobs=0))


@SIZES
def test_scoring_may_begin_at_any_token(page_size: int) -> None:
    """O003: the first entry asked for is of the first token after the cached ones, and it has a number."""
    for first in range(40):
        rig = Rig(64, page_size)
        rig.run(text(37))
        stream = rig.run(text(37), prompt_logprobs=1, prompt_logprobs_from=first)
        assert complete(stream)
        assert stream.cached == (max(first - 1, 0) if first < 37 else 36)
        assert (None in stream.scores) == (first == 0)


def test_the_new_part_of_a_second_turn_is_scored_with_the_old_one_cached() -> None:
    """O003"""
    rig = Rig(64, 16)
    turn = rig.run(text(120), 40).all_tokens
    stream = rig.run(turn + text(30, 1000), prompt_logprobs=0, prompt_logprobs_from=160)
    assert (stream.cached, len(stream.scores)) == (159, 30)
    assert stream.receipt.computed_tokens == 31


@pytest.mark.parametrize("cap", [0, 1, 16, 17, 30])
def test_the_lower_cap_counts(cap: int) -> None:
    rig = Rig(64, 16)
    rig.run(text(37))
    stream = rig.run(text(37), prompt_logprobs=0, prompt_logprobs_from=21, cache_max_len=cap)
    assert stream.cached == min(cap, 20)
    assert complete(stream)


def test_scored_prompts_run_beside_others_and_with_each_other() -> None:
    """Chunks of several, of which some are scored, stand beside decode rows in one step."""
    rig = Rig(200, 4, max_step_tokens=23, cascade="force")
    rig.run(text(24))
    ids = [
        rig.submit(
            text(24) + text(9 + i, 1000 * i),
            4,
            prompt_logprobs=1 if i % 3 else None,
            prompt_logprobs_from=(0, 24, 30)[i % 3],
        )
        for i in range(9)
    ]
    rig.drain()
    assert all(complete(rig.streams[i]) for i in ids if i % 3 != 1)
    assert rig.scheduler.counters.cascade_groups > 0


@SIZES
@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("steps", range(1, 6))
def test_a_preempted_prefill_goes_on_where_its_scores_end(page_size: int, evict: bool, steps: int) -> None:
    """What was scored is not scored again, whether its KV was kept or has to be computed anew."""
    rig = Rig(128, page_size, max_step_tokens=11)
    id = rig.submit(text(37), 3, prompt_logprobs=1)
    for _ in range(steps):
        rig.step()
    rig.preempt(id)
    if evict:
        rig.clear()
    rig.drain()
    assert rig.streams[id].scores == rig.streams[id].expected_scores
    assert rig.streams[id].cached == 0
    assert rig.scheduler.counters.preemptions == 1
    assert rig.runner.rows_scored == 36


@pytest.mark.parametrize("early", [False, True])
def test_a_failed_step_ends_the_prompt_that_it_scored_and_no_other(early: bool) -> None:
    """O002: and the next request, scored or not, is served."""
    rig = Rig(128, 4, max_step_tokens=10)
    hit = rig.submit(text(37), 3, prompt_logprobs=1)
    later = rig.submit(text(37), 3, prompt_logprobs=1)
    rig.step()
    rig.plan()
    rig.fail(early=early)
    assert (rig.streams[hit].finish, rig.streams[hit].scores) == ("error", ())
    rig.drain()
    assert complete(rig.streams[later])
    assert complete(rig.run(text(37), 3, prompt_logprobs=1))
    assert rig.run(text(37), 3).finish == "length"


def test_a_scored_row_that_is_not_finite_ends_its_own_request() -> None:
    rig = Rig(128, 4)
    ids = [rig.submit(text(20, 100 * i), 3, prompt_logprobs=1) for i in range(3)]
    rig.plan()
    rig.commit(frozenset({1}))
    rig.drain()
    assert [rig.streams[i].finish for i in ids] == ["length", "error", "length"]
    assert [complete(rig.streams[i]) for i in ids] == [True, False, True]


def test_leaving_in_the_middle_of_a_scored_prefill_gives_no_part_of_a_list() -> None:
    rig = Rig(128, 4, max_step_tokens=10)
    id = rig.submit(text(37), 3, prompt_logprobs=1)
    rig.step()
    rig.plan()
    rig.stop(id)
    rig.drain()
    assert (rig.streams[id].finish, rig.streams[id].scores) == ("abort", ())
    assert rig.run(text(37)).cached == 20


def test_a_step_takes_the_head_for_no_more_than_some_rows_of_a_prompt() -> None:
    """O085: what a long scored prompt needs at once does not grow with it."""
    rig = Rig(64, 16, max_step_tokens=512)
    rig.submit(text(900), prompt_logprobs=0)
    sizes = []
    while (plan := rig.plan()) is not None:
        sizes.append(sum(len(score.targets) for score in plan.scores))
        rig.commit()
    assert max(sizes) == SCORED_ROWS
    assert sum(sizes) == 899


def test_rows_before_the_first_scored_one_run_as_ever() -> None:
    rig = Rig(64, 16, max_step_tokens=512)
    rig.submit(text(900), prompt_logprobs=0, prompt_logprobs_from=600)
    rows, scored = [], []
    while (plan := rig.plan()) is not None:
        rows.append(plan.rows)
        scored.append(sum(len(score.targets) for score in plan.scores))
        rig.commit()
    assert rows == [512, 87 + SCORED_ROWS, SCORED_ROWS, 900 - 599 - 2 * SCORED_ROWS]
    assert scored == [0, SCORED_ROWS, SCORED_ROWS, 300 - 2 * SCORED_ROWS]


def test_scoring_holds_up_no_ordinary_prompt_in_the_same_step() -> None:
    """What a scored prompt may not take of a step, the next one does."""
    rig = Rig(128, 16, max_step_tokens=512)
    rig.submit(text(900), prompt_logprobs=0)
    rig.submit(text(900, 5000))
    plan = rig.plan()
    assert plan is not None
    assert sorted((plan.row_indptr[1:] - plan.row_indptr[:-1]).tolist()) == [SCORED_ROWS, 512 - SCORED_ROWS]
    rig.commit()
    rig.drain()
