"""The compiled kernel as Python sees it: C structures, and one method a function.

Callers pass contiguous tensors of the right dtype and keep them alive; sizes and indices have been checked
before they come here. Import torch first: both then share one OpenMP runtime, hence one team of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import KernelUnavailable
from engine.kernels.build import build

logger = logging.getLogger(__name__)

_HUGE_PAGE = 2 << 20
# Phases that the kernel times, in its order.
PHASES = ("norm", "linear", "rotate", "attention")


class Pool(Structure):
    """KvPool in attention.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("page_size", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("tile", c_int32),
        ("scale", c_float),
    )


class SegmentArrays(Structure):
    """Segments in work.h; all arrays int64."""

    _fields_ = (
        ("count", c_int64),
        ("first", c_void_p),
        ("rows", c_void_p),
        ("start", c_void_p),
        ("tokens", c_void_p),
        ("page_indptr", c_void_p),
        ("pages", c_void_p),
    )


class LinearWeights(Structure):
    """Linear in gemm.h."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("out", c_int32), ("in_", c_int32))


class LayerWeights(Structure):
    """Layer in decoder.h."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", LinearWeights),
        ("qk_norm", c_void_p),
        ("out", LinearWeights),
        ("mlp_norm", c_void_p),
        ("gate", LinearWeights),
        ("up", LinearWeights),
        ("down", LinearWeights),
    )


class ModelWeights(Structure):
    """Model in decoder.h."""

    _fields_ = (
        ("layers", c_int32),
        ("hidden", c_int32),
        ("wide", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("eps", c_float),
        ("embedding", c_void_p),
        ("rope", c_void_p),
        ("layer", POINTER(LayerWeights)),
        ("final_norm", c_void_p),
        ("head", LinearWeights),
    )


class Library:
    """The loaded kernel. `lanes` fp32 numbers make a vector; a panel is `panel` columns of a weight.

    `name` is one for each source, compiler and CPU: builds of equal names give equal bits.
    """

    def __init__(self, path: Path) -> None:
        """Raises KernelUnavailable where the file can't be loaded."""
        try:
            lib = ctypes.CDLL(str(path))
            self._declare(lib)
        except (OSError, AttributeError) as error:
            raise KernelUnavailable(f"can't load {path}: {error}") from None
        self.name = path.stem.rpartition("-")[0]

    def _declare(self, lib: ctypes.CDLL) -> None:
        self.lanes: int = lib.headwater_lanes()
        self.panel: int = lib.headwater_panel()
        self.has_bf16 = bool(lib.headwater_has_bf16())
        self.step_new = lib.headwater_step_new
        self.step_new.restype = c_void_p
        self.step_new.argtypes = (POINTER(Pool), c_int)
        self.step_free = _procedure(lib.headwater_step_free, c_void_p)
        self._seconds = _procedure(lib.headwater_step_seconds, c_void_p, POINTER(c_double))
        self.step_begin = _work(
            lib.headwater_step_begin, c_void_p, c_int, c_int64, c_void_p, c_void_p, c_void_p, c_int
        )
        rows = (POINTER(Pool), c_int, c_int, c_int64, c_void_p, c_void_p)
        self.write_rows = _procedure(lib.headwater_write_rows, *rows)
        self.read_rows = _procedure(lib.headwater_read_rows, *rows)
        self.copy_rows = _procedure(
            lib.headwater_copy_rows, POINTER(Pool), c_int, c_int, c_int64, c_void_p, c_void_p, c_void_p
        )
        strided = (c_void_p, c_int64)
        self.attend = _work(
            lib.headwater_attend, c_void_p, c_int, c_int, *strided, *strided, *strided, c_void_p
        )
        self.forward = _work(
            lib.headwater_forward, POINTER(ModelWeights), c_void_p, c_int, c_void_p, c_void_p
        )
        self.logits = _work(
            lib.headwater_logits,
            *(POINTER(ModelWeights), c_int, c_int, c_int64, c_void_p, c_void_p, c_void_p, c_int64),
        )
        self.linear = _work(
            lib.headwater_linear,
            *(POINTER(LinearWeights), c_int, c_int, c_int64, c_void_p, c_void_p, c_int64),
        )

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether this CPU computes in a dtype at full speed: bf16 needs AVX-512 BF16."""
        return dtype is torch.float32 or (dtype is torch.bfloat16 and self.has_bf16)

    def take_seconds(self, step: int) -> dict[str, float]:
        """Seconds a phase since the last call, of a step object."""
        seconds = (c_double * len(PHASES))()
        self._seconds(step, seconds)
        return dict(zip(PHASES, seconds, strict=True))


def load_library(architecture: str = "native") -> Library:
    """Compile if needed, and load; see build. A file that can't be loaded is compiled anew, once.

    Raises KernelUnavailable, in one line.
    """
    path = build(architecture)
    try:
        return Library(path)
    except KernelUnavailable as error:
        logger.warning("compiling the CPU kernel again: %s", error)
        path.unlink(missing_ok=True)
        return Library(build(architecture))


def huge_zeros(size: int) -> Tensor:
    """uint8 [size] zeros that take memory only when first written, in huge pages where the system has them.

    Weights and KV are streamed. With 4 KB pages a walk of the page tables comes every 64 lines, which on a
    virtual machine halves the bandwidth.
    """
    room = -(-max(size, 1) // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE
    memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % _HUGE_PAGE
    return whole[skip : skip + size]


def _work(function: ctypes._NamedFuncPointer, *arguments: type) -> ctypes._NamedFuncPointer:
    """A function that takes memory of its own: MemoryError where it can't."""

    def check(status: int, _function: object, _arguments: object) -> None:
        if status:
            raise MemoryError("no memory for a step of the compiled kernel")

    function.restype = c_int
    function.argtypes = arguments
    function.errcheck = check  # type: ignore[assignment]
    return function


def _procedure(function: ctypes._NamedFuncPointer, *arguments: type) -> ctypes._NamedFuncPointer:
    function.restype = None
    function.argtypes = arguments
    return function


__all__ = [
    "PHASES",
    "LayerWeights",
    "Library",
    "LinearWeights",
    "ModelWeights",
    "Pool",
    "SegmentArrays",
    "byref",
    "huge_zeros",
    "load_library",
]
