"""Turns generated ids into text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from engine.text.vocabulary import Vocabulary

_LONGEST_TAIL = 3  # a UTF-8 character that is cut off has at most three of its four bytes


class Detokenizer:
    """Incremental decoder of one reply: O(new tokens), and never half a character.

    The joined results of `push` and `flush` are the text of all pushed ids. Control tokens and end
    tokens give nothing, but those in `shown` their spelling. Bytes that are no UTF-8 become U+FFFD once
    they can no longer become a character. `prompt_ids` is what stands before the reply: if it ends inside
    a character, that character appears once, when the reply completes it, and nothing else of the prompt
    ever does.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompt_ids: Sequence[int] = (), shown: frozenset[int] = frozenset()
    ) -> None:
        self._vocabulary = vocabulary
        self._silent = vocabulary.silent_ids - shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail = _cut_off(_last_bytes(vocabulary, prompt_ids))
        self._held = b""  # bytes of the reply that wait to see whether they complete the prompt's tail
        follows_text = any(i not in vocabulary.silent_ids for i in prompt_ids)
        self._spaces = 0 if follows_text else vocabulary.leading_spaces

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is now certain, often empty."""
        data = self._strip(_bytes_of(self._vocabulary, ids, self._silent))
        if self._tail:
            data = self._join_tail(data)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End the text: return what was held back, an unfinished character as U+FFFD."""
        held, self._held, self._tail = self._held, b"", b""
        return self._decoder.decode(held, final=True)

    def _strip(self, data: bytes) -> bytes:
        if not self._spaces or not data:
            return data
        spaces, self._spaces = self._spaces, 0
        leading = len(data) - len(data.lstrip(b" "))
        return data[min(spaces, leading) :]

    def _join_tail(self, data: bytes) -> bytes:
        self._held += data
        whole = self._tail + self._held
        try:
            if not codecs.getincrementaldecoder("utf-8")().decode(whole[: _length(whole[0])]):
                return b""
        except UnicodeDecodeError:
            whole = self._held  # the prompt's character stays broken: its bytes are no part of the reply
        self._tail = self._held = b""
        return whole


def decode(vocabulary: Vocabulary, ids: Iterable[int], *, skip_special: bool = True) -> str:
    """The text of a whole sequence of ids, as a Detokenizer would give it in pieces."""
    data = _bytes_of(vocabulary, ids, vocabulary.silent_ids if skip_special else frozenset())
    leading = len(data) - len(data.lstrip(b" "))
    return data[min(vocabulary.leading_spaces, leading) :].decode("utf-8", "replace")


def _bytes_of(vocabulary: Vocabulary, ids: Iterable[int], silent: frozenset[int]) -> bytes:
    bytes_of = vocabulary.bytes_of
    return b"".join([bytes_of(i) for i in ids if i not in silent])


def _last_bytes(vocabulary: Vocabulary, ids: Sequence[int]) -> bytes:
    """The last few bytes of a text, read backwards so that a long prompt costs nothing."""
    data = b""
    for i in reversed(ids):
        if i not in vocabulary.silent_ids:
            data = vocabulary.bytes_of(i) + data
        if len(data) >= _LONGEST_TAIL:
            break
    return data[-_LONGEST_TAIL:]


def _cut_off(data: bytes) -> bytes:
    """The unfinished UTF-8 character at the end of `data`, empty if it ends between characters."""
    for start in range(len(data) - 1, -1, -1):
        if data[start] >= 0xC0:
            try:
                complete = codecs.getincrementaldecoder("utf-8")().decode(data[start:])
            except UnicodeDecodeError:
                return b""
            return b"" if complete else data[start:]
        if data[start] < 0x80:
            break
    return b""


def _length(lead: int) -> int:
    return 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
