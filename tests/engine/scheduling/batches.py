"""Small batches for the planner: sequences over tables that share pages as the prefix tree makes them."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from engine.scheduling.cascade import Span


class Pages:
    """Hands out pages by token path, as the tree does: one path, one page; and private ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}

    def table(self, path: tuple[int, ...], private: int) -> list[int]:
        shared = [self._known.setdefault(path[: i + 1], 1000 - len(self._known)) for i in range(len(path))]
        return shared + [
            self._known.setdefault((-1, len(self._known)), 1000 - len(self._known)) for _ in range(private)
        ]


@st.composite
def batches(draw: st.DrawFn, most: int = 8) -> tuple[list[Span], int, int]:
    """Spans over tables that share pages from the front, page size and tile."""
    size = draw(st.sampled_from((1, 2, 4)))
    align = size * draw(st.integers(1, 3))
    pages, spans = Pages(), []
    for path in draw(st.lists(st.lists(st.integers(0, 1), max_size=7), min_size=1, max_size=most)):
        rows = draw(st.integers(1, 5))
        start = len(path) * size + draw(st.integers(0, size - 1))
        if draw(st.booleans()):  # stands before the end of what it shares, like a chunk that is run again
            start = draw(st.integers(0, start))
        private = max(0, -(-(start + rows) // size) - len(path))
        spans.append(Span(pages.table(tuple(path), private), start, rows))
    return spans, size, align


def most_saved(spans: list[Span], size: int, align: int, levels: int, segment: int = 0) -> int:
    """The most tiles that any plan of `levels` shared levels need not read, less `segment` for each segment.

    Tries every way to group sequences, level by level; a group reads on from where the one above ended.
    """
    step = align // size
    keys = [tuple(s.table[step - 1 : s.start // align * step : step]) for s in spans]

    @cache
    def best(members: tuple[int, ...], reached: int, left: int) -> int:
        """Saved by these sequences, which have come to tile `reached`, under `left` more levels."""
        if not members or not left:
            return 0
        first, rest = members[0], members[1:]
        most = best(rest, reached, left)
        for chosen in range(1 << len(rest)):
            group = (first, *(m for i, m in enumerate(rest) if chosen >> i & 1))
            others = tuple(m for i, m in enumerate(rest) if not chosen >> i & 1)
            for end in range(reached + 1, shared(group) + 1):
                saved = (len(group) - 1) * (end - reached) - segment
                most = max(most, saved + best(group, end, left - 1) + best(others, reached, left))
        return most

    def shared(group: tuple[int, ...]) -> int:
        same = 0
        while all(len(keys[m]) > same for m in group) and len({keys[m][same] for m in group}) == 1:
            same += 1
        return same

    return best(tuple(range(len(spans))), 0, levels)
