"""GGUF files: metadata and tensors, read through a memory map.

The format is at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here
because the gguf package takes seconds over a vocabulary; its dequantizers are used for what is rare.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import ModelError, UnsupportedModel

Bytes = npt.NDArray[np.uint8]

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is in torch's order, `offset` in bytes from the start of the file."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class GgufFile:
    """An open GGUF file. `metadata` maps keys to Python values, arrays to lists.

    Raises ModelError for a file that is missing, cut off or no GGUF of version 2 or 3.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Private and writable, never written: torch warns of read-only memory.
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"can't read {path}: {error}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._parse(_Cursor(self._bytes))
        except (struct.error, IndexError, KeyError, UnicodeDecodeError, MemoryError) as error:
            raise ModelError(f"{path} is damaged or cut off: its GGUF header can't be read") from error

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, dequantized to fp32. Raises KeyError where there is none, ModelError where
        the file ends too early, UnsupportedModel for a quantization nobody here can read."""
        info = self.tensors[name]
        kind, block, size = _layout(info.ggml_type, name)
        count = int(np.prod(info.shape, dtype=np.int64))
        length = count // block * size
        if count % block or info.offset + length > len(self._bytes):
            raise ModelError(f"{self.path} is damaged or cut off: tensor {name} does not fit in it")
        raw = np.frombuffer(self._bytes, dtype=np.uint8, count=length, offset=info.offset)
        return _dequantize(raw, kind, size).reshape(info.shape)

    def _parse(self, cursor: _Cursor) -> None:
        if self._bytes[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        cursor.position = 4
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise ModelError(f"{self.path} is GGUF version {version} (or big-endian); 2 and 3 are served")
        tensors, pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        found: list[tuple[str, TensorInfo]] = []
        for _ in range(tensors):
            name = cursor.string()
            dimensions = cursor.scalar("<I")
            shape = tuple(reversed([cursor.scalar("<Q") for _ in range(dimensions)]))
            found.append((name, TensorInfo(shape, cursor.scalar("<I"), cursor.scalar("<Q"))))
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        start = -(-cursor.position // alignment) * alignment
        self.tensors = {name: info._replace(offset=info.offset + start) for name, info in found}


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.position = 0
        self._data = data

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self._data):
            raise IndexError(self.position)
        return self._data[start : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        layout = f"<{count}{_SCALARS[kind][1]}"
        values = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return list(values)


def _layout(ggml_type: int, name: str) -> tuple[Any, int, int]:
    """(type, elements in a block, bytes of a block) of a ggml type number."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(ggml_type)
        block, size = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise UnsupportedModel(f"tensor {name} has the unknown ggml type {ggml_type}") from None
    return kind, block, size


def _dequantize(raw: Bytes, kind: Any, size: int) -> Tensor:
    """fp32 values, flat, of whole blocks. The common types by torch, on all threads; others by gguf."""
    own = _DEQUANTIZERS.get(kind.name)
    if own is not None:
        return own(torch.from_numpy(raw).view(-1, size)).reshape(-1)
    from gguf.quants import dequantize

    try:
        # gguf goes through rows sixteen at a time in Python: few long ones.
        values = dequantize(raw.reshape(1, -1), kind)
    except NotImplementedError:
        raise UnsupportedModel(f"GGUF quantization {kind.name} is not served") from None
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(-1)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The fp16 number at byte `start` of every block, as fp32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8) * _halves(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    packed = blocks[:, 2:]
    quants = torch.cat((packed & 15, packed >> 4), dim=1).view(torch.int8) - 8
    return quants * _halves(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    packed = blocks[:, 4:]
    quants = torch.cat((packed & 15, packed >> 4), dim=1)
    return (quants * _halves(blocks, 0)).add_(_halves(blocks, 2))


_DEQUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda blocks: blocks.view(torch.float32).clone(),
    "F16": lambda blocks: blocks.view(torch.float16).float(),
    "BF16": lambda blocks: blocks.view(torch.bfloat16).float(),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}
