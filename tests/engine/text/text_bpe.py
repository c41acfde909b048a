"""A second, plain implementation of the tokenizers, to check the real ones against."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise

CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def byte_to_char() -> dict[int, str]:
    """Byte-level BPE's alphabet."""
    found, shifted = {}, 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            found[byte] = chr(byte)
        else:
            found[byte] = chr(shifted)
            shifted += 1
    return found


def kind(char: str) -> str:
    """letter, number, space or other, as the pre-tokenizers see it."""
    category = unicodedata.category(char)[0]
    if category in "LN":
        return category
    return "S" if char.isspace() and char not in "\x1c\x1d\x1e\x1f" else "O"


def split_digits(text: str) -> Iterator[str]:
    """Cut a text so that every number character stands alone."""
    start = 0
    for i, char in enumerate(text):
        if kind(char) == "N":
            if i > start:
                yield text[start:i]
            yield char
            start = i + 1
    if start < len(text):
        yield text[start:]


def split_words(text: str) -> Iterator[str]:
    """Cut a text into words as GPT-2 does, by hand instead of by a regular expression."""
    at = 0
    while at < len(text):
        end = _word_end(text, at)
        yield text[at:end]
        at = end


def _word_end(text: str, at: int) -> int:
    for contraction in CONTRACTIONS:
        if text.startswith(contraction, at):
            return at + len(contraction)
    first = at + 1 if text[at] == " " and at + 1 < len(text) else at
    if kind(text[first]) != "S":
        return _run(text, first, kind(text[first]))
    end = _run(text, at, "S")
    # White space before a word leaves its last character to the word, or to a token of its own.
    return end - 1 if end < len(text) and end - at > 1 else end


def _run(text: str, at: int, wanted: str) -> int:
    while at < len(text) and kind(text[at]) == wanted:
        at += 1
    return at


def merge(symbols: Sequence[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Apply BPE merges, lowest rank first, everywhere it occurs from the left."""
    found = list(symbols)
    while True:
        pairs = set(pairwise(found)) & ranks.keys()
        if not pairs:
            return found
        best = min(pairs, key=ranks.__getitem__)
        merged: list[str] = []
        i = 0
        while i < len(found):
            if tuple(found[i : i + 2]) == best:
                merged.append(found[i] + found[i + 1])
                i += 2
            else:
                merged.append(found[i])
                i += 1
        found = merged


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """Merge the neighbours whose union scores best, leftmost first, until none is a piece."""
    found = list(text)
    while True:
        unions = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(found)) if a + b in scores]
        if not unions:
            return found
        i = -max(unions)[1]
        found[i : i + 2] = [found[i] + found[i + 1]]
