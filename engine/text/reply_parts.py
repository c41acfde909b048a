"""The parts that a reply consists of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

BLANKS = " \t\r\n"
# White space next to a marker is dropped up to here: what is held back costs time with every piece of text.
MOST_BLANKS = 1000

Kind = Literal["content", "reasoning", "call"]


class Part(NamedTuple):
    """A piece of a reply, to be joined with its neighbours of the same kind and index.

    For a "call", `index` counts the reply's calls from 0; its first part has the name, whole, later ones
    None; `text` is a piece of the arguments' JSON text, and may be empty.
    """

    kind: Kind
    text: str
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which means nothing for a part
    name: str | None = None


class Parts:
    """Collects parts."""

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def add(self, kind: Kind, text: str, index: int = 0, name: str | None = None) -> None:
        """Append a part."""
        self._parts.append(Part(kind, text, index, name))

    def take(self) -> list[Part]:
        """Return what was collected since the last time, neighbours joined."""
        parts, self._parts = self._parts, []
        return join_parts(parts)


def join_parts(parts: Iterable[Part]) -> list[Part]:
    """Join neighbours that belong together; what has neither text nor a name is left out."""
    found: list[tuple[Part, list[str]]] = []
    for part in parts:
        last = found[-1][0] if found else None
        if last is not None and part.name is None and (last.kind, last.index) == (part.kind, part.index):
            found[-1][1].append(part.text)
        elif part.text or part.name is not None:
            found.append((part, [part.text]))
    return [part._replace(text="".join(texts)) for part, texts in found]


def begun(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`, short of all of it."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def trimmed(text: str, end: int, chars: str = BLANKS) -> int:
    """Where `text[:end]` ends without the blanks, or `chars`, at its end: at most MOST_BLANKS of them."""
    start = max(end - MOST_BLANKS, 0)
    return start + len(text[start:end].rstrip(chars))
