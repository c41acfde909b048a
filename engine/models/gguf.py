"""Tensors of GGUF files, read through a memory map. The gguf package dequantizes what is rare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import ModelError, UnsupportedModel
from engine.gguf_header import map_gguf, read_header

Bytes = npt.NDArray[np.uint8]


class GgufFile:
    """An open GGUF file. `metadata` maps keys to Python values, arrays to lists.

    Raises ModelError for a file that is missing, cut off or no GGUF of version 2 or 3.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = map_gguf(path)
        self.metadata, self.tensors = read_header(self._bytes, path)

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
