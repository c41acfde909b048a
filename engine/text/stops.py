"""Finds stop strings in a stream of text, whatever the edges of its pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on, cut just before the first stop string that is completed.

    Holds back only what could still begin a stop string. Of stop strings that are completed by the same
    character the longest counts, as it starts earliest; so the result does not depend on how the text
    is cut into pieces. Each character costs O(number of stop strings), by the matcher of Knuth, Morris
    and Pratt (1977). Empty stop strings are ignored. `found` is the one that was completed, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops) if stop]
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown, and True once a stop string was found."""
        if self.found is not None:
            return "", True
        if not self._matchers:
            return text, False
        seen = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            found = max([matcher.advance(char) for matcher in self._matchers])
            if found:
                self._held, self.found = "", seen[end - found : end]
                return seen[: end - found], True
        certain = len(seen) - max(matcher.matched for matcher in self._matchers)
        self._held = seen[certain:]
        return seen[:certain], False

    def flush(self) -> str:
        """End the text: return what was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """How much of one stop string the text seen so far ends with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._shorter = _borders(stop)
        self.matched = 0

    def advance(self, char: str) -> int:
        """Take one character; return the length of the stop string if it is now complete, else 0."""
        stop, matched = self._stop, self.matched
        while matched and stop[matched] != char:
            matched = self._shorter[matched - 1]
        if stop[matched] == char:
            matched += 1
        self.matched = matched
        return matched if matched == len(stop) else 0


def _borders(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders
