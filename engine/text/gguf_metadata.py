"""Reads the key-value part of a GGUF file, and nothing of its tensors.

A tokenizer's arrays hold hundreds of thousands of strings; reading them straight from the mapped file
takes a few hundredths of a second. Layout: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from engine.errors import ModelError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def is_gguf(path: Path) -> bool:
    """Whether the file begins like a GGUF file."""
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def read_metadata(path: Path) -> dict[str, Any]:
    """Return every key of the file with its value: numbers, booleans, strings, and lists of them.

    Raises ModelError when the file is not GGUF, is cut short, or is of a version not known here.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ModelError(f"{path.name} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data, path.name).metadata()
            except (struct.error, OverflowError, MemoryError):
                raise ModelError(f"{path.name} is cut short or damaged: its metadata can't be read") from None


class _Reader:
    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data = data
        self._name = name
        self._at = len(_MAGIC)

    def metadata(self) -> dict[str, Any]:
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self._name}: GGUF version {version} is not known here, only 2 and 3 are")
        self._scalar("Q")
        count = self._scalar("Q")
        return {self._string(): self._value(self._scalar("I")) for _ in range(count)}

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        data, at, found = self._data, self._at, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = length_at(data, at)
            at += 8
            raw = data[at : at + length]
            if len(raw) != length:
                raise struct.error("string runs past the end of the file")
            found.append(raw.decode("utf-8", "replace"))
            at += length
        self._at = at
        return found

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ModelError(f"{self._name}: value type {kind} is not part of GGUF")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self._name}: value type {kind} is not part of GGUF")
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return list(values)
