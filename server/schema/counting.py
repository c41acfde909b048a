"""Bodies with many values: read so that other threads run meanwhile, and no further than can be borne."""

from __future__ import annotations

import json
import json.scanner
from collections.abc import Callable
from typing import Any

from engine import RequestError

MAX_VALUES = 1_000_000
"""Values of a body, each with its share of what converting, checking and freeing it takes."""
MAX_NESTS = 100_000
"""Lists and objects of a body: garbage collection walks them all."""
MAX_KEYS = 100_000
"""Keys of one object."""

# A body with fewer commas and brackets holds fewer values than any limit.
_FEW = 100_000
_SLICE = 1 << 18

# Characters from which on a text is huge, and those that stand for it then.
_HUGE = 100_000
_SHORT = 1000
# Objects inside objects that are looked into for huge texts.
_DEPTH = 3

Scan = Callable[[str, int], tuple[Any, int]]


def holds_many(body: bytes) -> bool:
    """Whether a body may hold so many values that reading them at one go would take long."""
    seen = 0
    for start in range(0, len(body), _SLICE):
        seen += sum(body.count(mark, start, start + _SLICE) for mark in (b",", b"[", b"{"))
        if seen > _FEW:
            return True
    return False


class CountingDecoder(json.JSONDecoder):
    """Reads JSON in Python, where other threads get their turn between any two values, and counts them.

    Raises RequestError where there are too many.
    """

    parse_array: Callable[..., tuple[list[Any], int]]
    parse_object: Callable[..., tuple[Any, int]]
    scan_once: Scan

    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        self._values = self._nests = 0
        self._read_array, self._read_object = self.parse_array, self.parse_object
        self.parse_array, self.parse_object = self._array, self._object
        # The scanner takes both from the decoder as it is now.
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _array(self, at: tuple[str, int], scan: Scan) -> tuple[list[Any], int]:
        self._nest()
        return self._read_array(at, self._counted(scan, MAX_VALUES))

    def _object(self, at: tuple[str, int], strict: bool, scan: Scan, *rest: Any) -> tuple[Any, int]:
        self._nest()
        return self._read_object(at, strict, self._counted(scan, MAX_KEYS), *rest)

    def _counted(self, scan: Scan, most: int) -> Scan:
        """The scanner of one list's or object's values, at most so many."""
        left = most

        def counted(text: str, at: int) -> tuple[Any, int]:
            nonlocal left
            left -= 1
            self._values += 1
            if left < 0 or self._values > MAX_VALUES:
                limit = "values" if self._values > MAX_VALUES or most == MAX_VALUES else "keys in one object"
                raise RequestError(f"The body has more than {min(most, MAX_VALUES):,} {limit}")
            return scan(text, at)

        return counted

    def _nest(self) -> None:
        self._nests += 1
        if self._nests > MAX_NESTS:
            raise RequestError(f"The body has more than {MAX_NESTS:,} lists and objects")


def beginning(value: Any, size: int) -> Any:
    """The first of what a JSON-like value holds: enough to write `size` characters, and not much more."""
    return _beginning(value, [size])


def _beginning(value: Any, left: list[int]) -> Any:
    left[0] -= 1
    if isinstance(value, str):
        found = value[: max(left[0], 0) + 1]
        left[0] -= len(found)
        return found
    if isinstance(value, dict):
        pairs = {}
        for key, item in value.items():
            if left[0] < 0:
                break
            pairs[_beginning(key, left)] = _beginning(item, left)
        return pairs
    if isinstance(value, list | tuple):
        items = []
        for item in value:
            if left[0] < 0:
                break
            items.append(_beginning(item, left))
        return items
    return value


def holds_huge(value: Any, depth: int = _DEPTH) -> bool:
    """Whether an object, or one in it, has a field that is a huge text."""
    if isinstance(value, str):
        return len(value) > _HUGE
    return isinstance(value, dict) and depth > 0 and any(holds_huge(one, depth - 1) for one in value.values())


def shortened(value: Any, depth: int = _DEPTH) -> Any:
    """The value with beginnings in place of the texts that `holds_huge` finds."""
    if isinstance(value, str):
        return value if len(value) <= _HUGE else value[:_SHORT]
    if isinstance(value, dict) and depth > 0:
        return {name: shortened(one, depth - 1) for name, one in value.items()}
    return value
