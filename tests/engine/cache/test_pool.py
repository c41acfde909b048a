"""The page pool: what is taken is nobody else's, what is given back can be taken again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.pool import PagePool


def test_page_0_is_never_handed_out() -> None:
    pool = PagePool(8, 16)
    assert pool.capacity == pool.free_pages == 7
    assert sorted(pool.take(7)) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("pages", "size"), [(1, 16), (0, 16), (2, 0)])
def test_a_pool_that_can_hold_nothing_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="two pages"):
        PagePool(pages, size)


def test_taking_more_than_there_is_changes_nothing() -> None:
    pool = PagePool(4, 16)
    with pytest.raises(ValueError, match="4 pages asked, 3 free"):
        pool.take(4)
    assert pool.free_pages == 3


@pytest.mark.parametrize("page", [0, -1, 3])
def test_giving_what_is_not_in_use_is_an_error(page: int) -> None:
    pool = PagePool(8, 16)
    assert pool.take(2) == [1, 2]
    with pytest.raises(ValueError, match="not in use"):
        pool.give([page])
    assert pool.free_pages == 5


def test_a_page_given_twice_is_an_error() -> None:
    pool = PagePool(8, 16)
    (page,) = pool.take(1)
    pool.give([page])
    with pytest.raises(ValueError, match="not in use"):
        pool.give([page])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10)])
def test_pages_for_tokens(tokens: int, pages: int) -> None:
    assert PagePool(8, 16).pages_for(tokens) == pages


@given(st.lists(st.integers(-9, 9), max_size=60))
@settings(deadline=None, derandomize=True)
def test_a_page_is_free_or_taken(moves: list[int]) -> None:
    """Positive: take so many; negative: give so many back."""
    pool, held = PagePool(20, 4), list[int]()
    for move in moves:
        if move >= 0:
            taken = pool.take(min(move, pool.free_pages))
            assert not set(taken) & set(held)
            held += taken
        else:
            pool.give(held[:-move])
            del held[:-move]
        assert len(held) == len(set(held))
        assert pool.free_set() == set(range(1, 20)) - set(held)
        assert pool.free_pages == 19 - len(held)
