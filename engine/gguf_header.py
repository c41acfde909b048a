"""The header of a GGUF file: its key-value pairs, and where its tensors lie. No torch.

A tokenizer's arrays hold hundreds of thousands of strings; read straight from the mapped file they take a
few hundredths of a second, where the gguf package takes seconds. Layout: the GGUF specification, versions 2
and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ModelError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is in torch's order, `offset` in bytes from the start of the file."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class GgufHeader(NamedTuple):
    """`metadata` maps keys to numbers, booleans, strings, and lists of them."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def map_gguf(path: Path) -> mmap.mmap:
    """Map a file into memory; ModelError where that can't be done.

    Private and writable, never written: torch warns of read-only memory.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"can't read {path}: {error}") from error
    except ValueError:
        raise ModelError(f"{path} is not a GGUF file: it is empty") from None


def read_header(data: mmap.mmap, path: Path) -> GgufHeader:
    """Parse the header of a mapped file; `path` is for messages.

    Raises ModelError for a file that is damaged, cut off, or no GGUF of version 2 or 3.
    """
    if data[:4] != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file")
    try:
        return _Reader(data, path).header()
    except (struct.error, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} is damaged or cut off: its GGUF header can't be read") from error


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value pairs of a file. Raises ModelError as map_gguf and read_header do."""
    with map_gguf(path) as data:
        return read_header(data, path).metadata


class _Reader:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = len(_MAGIC)

    def header(self) -> GgufHeader:
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self._path} is GGUF version {version} (or big-endian); 2 and 3 are served")
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(pairs)}
        found = [(self._string(), self._tensor()) for _ in range(tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        return GgufHeader(metadata, {name: info._replace(offset=info.offset + start) for name, info in found})

    def _tensor(self) -> TensorInfo:
        shape = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return TensorInfo(tuple(reversed(shape)), self._scalar("I"), self._scalar("Q"))

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
        return self._scalar(self._code(kind))

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        layout = struct.Struct(f"<{count}{self._code(kind)}")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return list(values)

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelError(f"{self._path} is damaged: value type {kind} is not part of GGUF")
        return _SCALARS[kind]
