"""Stop strings are found whatever the edges of the pieces, and nothing is held back without need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text import StopFilter


def run(stops: Sequence[str], pieces: Iterable[str]) -> tuple[str, bool]:
    """All text that a filter lets through, and whether it stopped."""
    stop_filter, shown = StopFilter(stops), ""
    for piece in pieces:
        text, stopped = stop_filter.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + stop_filter.flush(), False


def naive(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """Look at every beginning of the text until one ends with a stop string."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if stop and text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("ab<", max_size=6), max_size=12),
)
def test_equals_a_naive_search_for_any_cut(stops: list[str], pieces: list[str]) -> None:
    """O046: the cut is just before the first completed stop string, wherever the token edges are."""
    assert run(stops, pieces) == naive(stops, "".join(pieces))


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_stop_cut_at_each_character_of_a_word(cut: int) -> None:
    """O046: the stop string ends inside a token or begins inside one."""
    word = "capitals"
    for end in range(cut, len(word) + 1):
        stop = word[cut - 1 : end]
        assert run([stop], ["The ", word, " of"])[0] == ("The " + word).partition(stop)[0]


def test_of_stops_that_begin_alike_the_shorter_ends_the_text() -> None:
    """O046: several stops, one a prefix of another."""
    assert run(["END", "EN"], ["x E", "ND"]) == ("x ", True)
    assert run(["EN", "END"], ["x END"]) == ("x ", True)


def test_of_stops_that_end_together_the_earliest_begins_the_cut() -> None:
    assert run(["d", "bcd", "cd"], ["abcd"]) == ("a", True)


def test_a_stop_in_the_last_piece_is_found() -> None:
    """O046: the stop string is completed by the last allowed token."""
    assert run(["\n\n"], ["line\n", "\n"]) == ("line", True)


def test_nothing_is_held_back_that_can_not_begin_a_stop() -> None:
    """O047: a long stop string that never occurs delays nothing."""
    stop_filter = StopFilter(["#" * 40])
    assert [stop_filter.push(piece) for piece in ("One", " two", " three")] == [
        ("One", False),
        (" two", False),
        (" three", False),
    ]
    assert stop_filter.flush() == ""


def test_what_may_begin_a_stop_is_held_only_until_it_can_not() -> None:
    """O047: held text comes with the piece that rules the stop string out, or at the end."""
    stop_filter = StopFilter(["</s>"])
    assert stop_filter.push("a <") == ("a ", False)
    assert stop_filter.push("/") == ("", False)
    assert stop_filter.push("b> <") == ("</b> ", False)
    assert stop_filter.flush() == "<"


def test_nothing_comes_after_a_stop() -> None:
    stop_filter = StopFilter(["x"])
    assert stop_filter.push("axb") == ("a", True)
    assert stop_filter.push("more") == ("", True)
    assert stop_filter.flush() == ""


def test_without_stops_text_passes_through() -> None:
    for stops in ([], [""]):
        assert run(stops, ["a", "", "b"]) == ("ab", False)
