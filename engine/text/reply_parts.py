"""The parts that a reply consists of."""

from __future__ import annotations

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
    """Collects parts, joining neighbours."""

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def add(self, kind: Kind, text: str, index: int = 0, name: str | None = None) -> None:
        """Append a part; nothing where it has neither text nor a name."""
        last = self._parts[-1] if self._parts else None
        if last and name is None and (last.kind, last.index) == (kind, index):
            self._parts[-1] = last._replace(text=last.text + text)
        elif text or name is not None:
            self._parts.append(Part(kind, text, index, name))

    def take(self) -> list[Part]:
        """Return what was collected since the last time."""
        parts, self._parts = self._parts, []
        return parts


def begun(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`, short of all of it."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def trimmed(text: str, end: int, chars: str = BLANKS) -> int:
    """Where `text[:end]` ends without the blanks, or `chars`, at its end: at most MOST_BLANKS of them."""
    start = max(end - MOST_BLANKS, 0)
    return start + len(text[start:end].rstrip(chars))
