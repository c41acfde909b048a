"""The cache finds the longest prefix, to the token, and the receipt says so."""

from __future__ import annotations

import pytest

from tests.engine.scheduling.rig import Rig

SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])
LENGTH = 37  # pages of 4 and 16 end inside, the last one is partial
PROMPT = tuple(range(100, 100 + LENGTH))


@SIZES
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 9])
def test_a_repeat_reports_all_but_the_last_token(page_size: int, max_tokens: int) -> None:
    rig = Rig(64, page_size)
    assert rig.run(PROMPT, max_tokens).cached == 0
    assert rig.run(PROMPT, max_tokens).cached == LENGTH - 1
    assert rig.run(PROMPT, max_tokens).cached == LENGTH - 1


@SIZES
def test_a_repeat_of_every_length_reports_all_but_the_last_token(page_size: int) -> None:
    for length in range(1, 2 * page_size + 3):
        rig = Rig(64, page_size)
        rig.run(PROMPT[:length])
        assert rig.run(PROMPT[:length]).cached == length - 1


@SIZES
def test_divergence_at_token_k_reports_k(page_size: int) -> None:
    rig = Rig(200, page_size)
    rig.run(PROMPT)
    for k in range(LENGTH):
        other = PROMPT[:k] + tuple(range(1000 * (k + 1), 1000 * (k + 1) + 3))
        assert rig.run(other).cached == k
        assert rig.run(other).cached == len(other) - 1


@SIZES
def test_divergence_inside_the_reply_reports_k(page_size: int) -> None:
    rig = Rig(200, page_size)
    first = rig.run(PROMPT, 11)
    whole = first.all_tokens
    for k in range(LENGTH, len(whole)):
        assert rig.run((*whole[:k], 500 + k, 7)).cached == k


@SIZES
@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_the_next_turn_hits_prompt_and_reply(page_size: int, max_tokens: int) -> None:
    """O004: the reply is in the tree too; its last token was never fed back and has no KV yet."""
    rig = Rig(64, page_size)
    whole = rig.run(PROMPT, max_tokens).all_tokens
    assert rig.run(whole).cached == len(whole) - 1
    assert rig.run((*whole, 900, 901, 902)).cached == len(whole)  # by now the repeat has computed it


def test_the_second_turn_of_a_chat() -> None:
    """O004: 120 prompt and 40 reply tokens, then those 160 and 30 new: 159 come from the cache."""
    rig = Rig(64, 16)
    first = rig.run(range(1000, 1120), 40)
    assert len(first.tokens) == 40
    assert rig.run(first.all_tokens + tuple(range(2000, 2030))).cached == 159


@SIZES
def test_divergence_while_the_other_still_runs(page_size: int) -> None:
    """The owner's last page is open and being written; whoever matches into it copies committed rows."""
    for k in range(1, LENGTH):
        rig = Rig(200, page_size)
        rig.submit(PROMPT, 12)
        rig.step()
        other = rig.submit((*PROMPT[:k], 999))
        again = rig.submit(PROMPT)
        rig.drain()
        assert rig.streams[other].cached == k
        assert rig.streams[again].cached == LENGTH - 1


@SIZES
def test_two_live_sequences_with_one_prompt(page_size: int) -> None:
    """Same prompt, different seeds: they part inside a page and go on side by side."""
    rig = Rig(200, page_size)
    ids = [rig.submit(PROMPT, 20, seed=seed) for seed in (0, 1, 0, 1)]
    rig.drain()
    assert [rig.streams[i].cached for i in ids] == [0] + [LENGTH - 1] * 3
    assert rig.streams[ids[0]].tokens == rig.streams[ids[2]].tokens


@SIZES
@pytest.mark.parametrize("cap", [0, 1, 15, 16, 17, 36, 1000])
def test_cache_max_len_caps_the_match(page_size: int, cap: int) -> None:
    rig = Rig(64, page_size)
    rig.run(PROMPT)
    assert rig.run(PROMPT, cache_max_len=cap).cached == min(cap, LENGTH - 1)
    assert rig.run(PROMPT).cached == LENGTH - 1


@SIZES
def test_an_aborted_prefill_leaves_what_it_computed(page_size: int) -> None:
    """O041: it stops at the next chunk, and what was computed is cached to the token."""
    rig = Rig(64, page_size, max_step_tokens=10)
    id = rig.submit(PROMPT)
    rig.step()
    rig.plan()
    rig.stop(id)
    rig.drain()
    assert rig.streams[id].cached == 0
    assert rig.scheduler.counters.computed_rows == 20
    assert rig.run(PROMPT).cached == 20


@SIZES
def test_a_stopped_reply_leaves_what_it_computed(page_size: int) -> None:
    rig = Rig(64, page_size)
    id = rig.submit(PROMPT, 20)
    for _ in range(7):
        rig.step()
    rig.stop(id, "stop")
    whole = rig.streams[id].all_tokens
    assert len(whole) == LENGTH + 7
    assert rig.run(whole).cached == LENGTH + 6


def test_a_long_neighbour_costs_no_exactness_in_a_tight_pool() -> None:
    """Only the page that is copied from is held, not all that follows it in its node."""
    rig = Rig(20, 4)
    rig.run(range(100, 172))  # 18 of 20 pages
    assert rig.run((*range(100, 110), *range(500, 555))).cached == 10  # needs 17 pages itself


def test_a_copy_that_does_not_fit_is_left_out() -> None:
    """Alone with a pool that has no page for the copy's source: whole pages only, but it runs."""
    rig = Rig(6, 4)
    rig.run(range(100, 123))
    stream = rig.run((*range(100, 106), *range(500, 517)))
    assert stream.cached == 4
    assert stream.finish == "length"
