"""Keeps what users write from becoming control tokens.

Where a user's string spells a control token, that spelling is replaced by a placeholder before the
template runs. The template's own markers are then the only ones in the rendered text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from engine.errors import RequestError

_PRIVATE_USE = range(0xE000, 0xF900)


class Placeholders:
    """Stands in for texts that must not be read as control tokens, and gives them back."""

    def __init__(self, used: set[str]) -> None:
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        try:
            self._open, self._close = next(free), next(free)
        except StopIteration:
            raise RequestError("the messages use every private-use character", param="messages") from None
        self._texts: list[str] = []
        self._pattern = re.compile(f"{self._open}([0-9]+){self._close}")

    def put(self, text: str) -> str:
        """Return the placeholder of a text."""
        if text not in self._texts:
            self._texts.append(text)
        return f"{self._open}{self._texts.index(text)}{self._close}"

    def restore(self, rendered: str) -> str:
        """Put every text back in its place."""
        if self._open not in rendered:
            return rendered
        return self._pattern.sub(lambda match: self._texts[int(match[1])], rendered)


class Guard:
    """Finds the spellings of control tokens in users' strings.

    Whole spellings count, and pieces of one at the edges of a string, which could meet their other half
    in the text beside it. Pieces that begin with a letter or digit are left alone: no template writes
    half a word next to a user's string.
    """

    def __init__(self, specials: Iterable[str]) -> None:
        spellings = sorted({text for text in specials if text}, key=lambda text: (-len(text), text))
        self._whole = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        cuts = [(text[:i], text[i:]) for text in spellings for i in range(1, len(text))]
        self._heads = frozenset(head for head, _ in cuts if not head[0].isalnum())
        self._tails = frozenset(tail for _, tail in cuts if not tail[-1].isalnum())
        self._longest = max(map(len, spellings), default=1) - 1

    def needs_hiding(self, value: Any) -> bool:
        """Whether any string in a JSON-like value, keys included, spells a control token or its edge."""
        return self._whole is not None and any(self._is_hot(text) for text in texts_of(value))

    def hide(self, value: Any, placeholders: Placeholders) -> Any:
        """Return the value with every such spelling replaced by a placeholder."""
        return _map_strings(value, lambda text: self._hide(text, placeholders))

    def _is_hot(self, text: str) -> bool:
        assert self._whole is not None
        return bool(self._whole.search(text) or self._tail_at_start(text) or self._head_at_end(text))

    def _hide(self, text: str, placeholders: Placeholders) -> str:
        assert self._whole is not None
        text = self._whole.sub(lambda match: placeholders.put(match[0]), text)
        if length := self._head_at_end(text):
            end = len(text.rstrip())
            text = text[: end - length] + placeholders.put(text[end - length : end]) + text[end:]
        if length := self._tail_at_start(text):
            start = len(text) - len(text.lstrip())
            text = text[:start] + placeholders.put(text[start : start + length]) + text[start + length :]
        return text

    # Templates often trim what they are given, so edges are looked at behind white space.
    def _head_at_end(self, text: str) -> int:
        edge = text.rstrip()[-self._longest :] if self._longest else ""
        return next((n for n in range(len(edge), 0, -1) if edge[-n:] in self._heads), 0)

    def _tail_at_start(self, text: str) -> int:
        edge = text.lstrip()[: self._longest]
        return next((n for n in range(len(edge), 0, -1) if edge[:n] in self._tails), 0)


def characters(*values: Any) -> set[str]:
    """Every character that occurs in the strings of JSON-like values."""
    return {char for value in values for text in texts_of(value) for char in set(text)}


def texts_of(value: Any) -> Iterator[str]:
    """All strings in a JSON-like value, keys included, in no order."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value
