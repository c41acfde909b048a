"""The bit check makes prompts for every variant, however few it is asked for."""

from __future__ import annotations

import pytest
from check_bits import lengths_up_to, make_cases, scored_cases

PAGE = 16


@pytest.mark.parametrize("most", [520, 770])
def test_any_number_of_prompts_is_made_and_none_is_empty(most: int) -> None:
    for count in range(1, 60):
        lengths = lengths_up_to(count, most)
        assert len(lengths) == count
        assert max(lengths) == most
        cases = make_cases(range(2000), lengths, tokens=1)
        assert [len(case.prompt) for case in cases] == lengths
        assert min(lengths) >= 1


def test_two_prompts_or_more_are_enough_for_a_tree() -> None:
    """Two tiles of 256 tokens and a few more, in two prompts."""
    for count in range(2, 60):
        assert sum(n >= 2 * 256 + 8 for n in lengths_up_to(count, 770)) >= 2


@pytest.mark.parametrize("lengths", [[1], [1, 2, 15], [33], [770], [600, 770]])
def test_scored_prompts_have_their_lengths_whatever_they_are_cut_from(lengths: list[int]) -> None:
    cases = scored_cases(make_cases(range(2000), lengths, tokens=1), PAGE)
    assert [len(case.prompt) for case in cases] == [15, 16, 17, 32, 33, 700]
