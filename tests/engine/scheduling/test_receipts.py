"""The receipt says what was cached, what was computed, and what of that is new in the cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest

from engine.cache.node import Match
from tests.engine.scheduling.rig import Rig

SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])
LENGTH = 37
PROMPT = tuple(range(100, 100 + LENGTH))


@SIZES
@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_a_cold_prompt_is_written_whole_and_a_repeat_not_at_all(page_size: int, max_tokens: int) -> None:
    """The last token of a repeat runs again for its logits: computed, not written."""
    rig = Rig(64, page_size)
    cold, warm = rig.run(PROMPT, max_tokens), rig.run(PROMPT, max_tokens)
    assert (cold.cached, cold.receipt.computed_tokens, cold.written) == (0, LENGTH, LENGTH)
    assert (warm.cached, warm.receipt.computed_tokens, warm.written) == (LENGTH - 1, 1, 0)


@SIZES
def test_a_prompt_that_diverges_writes_what_follows(page_size: int) -> None:
    rig = Rig(200, page_size)
    rig.run(PROMPT)
    for k in range(1, LENGTH):
        stream = rig.run((*PROMPT[:k], 1000 + k, 7, 8))
        assert (stream.cached, stream.written) == (k, 3)


@SIZES
def test_the_next_turn_writes_the_last_token_of_the_reply_and_what_is_new(page_size: int) -> None:
    rig = Rig(64, page_size)
    whole = rig.run(PROMPT, 5).all_tokens
    stream = rig.run((*whole, 900, 901))
    assert (stream.cached, stream.written) == (len(whole) - 1, 3)


@SIZES
@pytest.mark.parametrize("cap", [0, 1, 16, 17, 36])
def test_what_may_not_be_matched_is_computed_and_not_written(page_size: int, cap: int) -> None:
    rig = Rig(64, page_size)
    rig.run(PROMPT)
    stream = rig.run((*PROMPT, 900), cache_max_len=cap)
    assert (stream.cached, stream.written) == (cap, 1)
    assert rig.run((*PROMPT, 900), cache_max_len=cap).written == 0


@SIZES
def test_what_is_scored_again_is_computed_and_not_written(page_size: int) -> None:
    rig = Rig(64, page_size)
    rig.run(PROMPT)
    stream = rig.run((*PROMPT, 900), prompt_logprobs=0, prompt_logprobs_from=21)
    assert (stream.cached, stream.receipt.computed_tokens, stream.written) == (20, LENGTH + 1 - 20, 1)


@SIZES
def test_choices_of_one_prompt_write_it_once(page_size: int) -> None:
    rig = Rig(200, page_size)
    ids = [rig.submit(PROMPT, 3, seed=i) for i in range(4)]
    rig.drain()
    assert [rig.streams[i].written for i in ids] == [LENGTH, 0, 0, 0]
    assert [rig.streams[i].cached for i in ids] == [0] + [LENGTH - 1] * 3


@SIZES
@pytest.mark.parametrize("how", [{"cache_max_len": 0}, {"prompt_logprobs": 0}])
def test_those_who_may_not_wait_for_each_other_write_a_prompt_once(
    page_size: int, how: dict[str, int]
) -> None:
    """They all compute it, but what the first one stores is not new when the others do."""
    rig = Rig(400, page_size)
    ids = [rig.submit((*PROMPT, 900 + i), 1, **how) for i in range(4)]
    rig.drain()
    assert [rig.streams[i].cached for i in ids] == [0] * 4
    assert [rig.streams[i].written for i in ids] == [LENGTH + 1, 1, 1, 1]


def test_another_namespace_writes_its_own() -> None:
    rig = Rig(64, 4)
    rig.run(PROMPT)
    assert rig.run(PROMPT, namespace="other").written == LENGTH


def test_what_was_evicted_is_written_again() -> None:
    rig = Rig(64, 4)
    rig.run(PROMPT)
    rig.scheduler.tree.evict(3)  # the partial page, and two of the nine full ones
    stream = rig.run(PROMPT)
    assert (stream.cached, stream.written) == (28, LENGTH - 28)


def test_rows_that_could_not_be_copied_were_stored_all_the_same() -> None:
    """Alone with a pool that has no page for the copy's source: two rows are run again, not written."""
    rig = Rig(6, 4)
    rig.run(range(100, 123))
    stream = rig.run((*range(100, 106), *range(500, 517)))
    assert (stream.cached, stream.written) == (4, 17)


@SIZES
def test_preemption_changes_no_receipt(page_size: int) -> None:
    rig = Rig(128, page_size, max_step_tokens=10)
    rig.run(PROMPT[:8])
    id = rig.submit(PROMPT, 3)
    rig.step()
    rig.preempt(id)
    rig.clear()
    rig.drain()
    stream = rig.streams[id]
    assert (stream.cached, stream.written) == (8, LENGTH - 8)


@SIZES
@pytest.mark.parametrize(
    ("prompt", "how", "looks", "cached", "written"),
    [
        (range(500, 530), {}, 1, 0, 30),  # cold
        ((*PROMPT[:20], 900, 901), {}, 1, 20, 2),  # tokens end the match, inside a page or at its edge
        ((*PROMPT[:16], 900), {}, 2, 16, 1),  # a last token is never matched: it may be stored or not
        (PROMPT[:16], {}, 2, 15, 0),
        (PROMPT, {}, 2, LENGTH - 1, 0),
        ((*PROMPT, 900, 901), {}, 1, LENGTH, 2),
        ((*PROMPT, 900, 901), {"cache_max_len": LENGTH + 1}, 1, LENGTH, 2),  # a cap that does not bind
        ((*PROMPT, 900, 901), {"cache_max_len": LENGTH}, 2, LENGTH, 2),
        ((*PROMPT, 900, 901), {"cache_max_len": 9}, 2, 9, 2),
        ((*PROMPT, 900, 901), {"cache_max_len": 0}, 2, 0, 2),
        ((*PROMPT, 900, 901), {"prompt_logprobs": 0}, 2, 0, 2),
        ((*PROMPT, 900, 901), {"prompt_logprobs": 0, "prompt_logprobs_from": 21}, 2, 20, 2),
        ((*PROMPT[:9], 900, 901), {"prompt_logprobs": 0, "prompt_logprobs_from": 11}, 1, 9, 2),
        (PROMPT, {"namespace": "other"}, 1, 0, LENGTH),
    ],
)
def test_a_prompt_is_looked_up_again_only_where_it_may_not_use_all_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
    prompt: Sequence[int],
    how: dict[str, Any],
    looks: int,
    cached: int,
    written: int,
) -> None:
    """And never where it goes on after preemption: its receipt stands."""
    rig = Rig(200, page_size)
    rig.run(PROMPT)
    tree, limits = rig.scheduler.tree, list[int]()
    look = tree.match

    def match(namespace: Hashable, tokens: Sequence[int], limit: int) -> Match:
        limits.append(limit)
        return look(namespace, tokens, limit)

    monkeypatch.setattr(tree, "match", match)
    id = rig.submit(prompt, 5, **how)
    rig.step()
    assert len(limits) == looks
    rig.preempt(id)
    rig.drain()
    assert len(limits) == looks + 1
    assert (rig.streams[id].cached, rig.streams[id].written) == (cached, written)
