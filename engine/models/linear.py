"""The one way this engine multiplies by a weight matrix, so that a row's bits never depend on its
neighbours.

Packed: oneDNN with weights reordered once, bf16 or fp32, at least 4 rows a call. Plain: torch's fp32
linear with rows padded to a multiple of 8, where oneDNN is missing, and for the reference executor. Native
and cuda: plain weights, which native.NativeDecoder packs for the CPU kernel and cuda.CudaDecoder takes on
the device. A model uses one of them for everything: their bits differ.
"""

from __future__ import annotations

import logging
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import ModelError

logger = logging.getLogger(__name__)

Arithmetic = Literal["packed", "plain", "native", "cuda", "auto"]

_PACKED_MIN_ROWS = 4
_PLAIN_ROW_MULTIPLE = 8
# Half the size from which torch splits an elementwise op over threads: pieces of it run unsplit.
_SERIAL_ELEMENTS = 16384


class Linear(Protocol):
    """A weight [out, in] with an optional bias. `x` is [rows, in], the result [rows, out]."""

    def apply(self, x: Tensor) -> Tensor:
        """x W' + b"""

    def swish(self, x: Tensor) -> Tensor:
        """SiLU of x W' + b"""

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """(x W' + b) * other, `other` being [rows, out]; it may be overwritten"""

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """(x W' + b) + other, `other` being [rows, out]; it may be overwritten"""


class PackedLinear:
    """oneDNN with a prepacked weight; SiLU, product and sum run inside it, in fp32, rounded once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def apply(self, x: Tensor) -> Tensor:
        result: Tensor = self._unary(x, self._weight, self._bias, "none", [], "")
        return result

    def swish(self, x: Tensor) -> Tensor:
        result: Tensor = self._unary(x, self._weight, self._bias, "swish", [], "")
        return result

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        result: Tensor = self._binary(x, other, self._weight, self._bias, "mul")
        return result

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        result: Tensor = self._binary(x, other, self._weight, self._bias, "add")
        return result


class PlainLinear:
    """torch's fp32 linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def apply(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def swish(self, x: Tensor) -> Tensor:
        result = self.apply(x)
        # torch's vector and scalar SiLU differ in the last bit, and where it splits work over threads
        # decides which elements are scalar. Small pieces are not split, and with rows a multiple of 8
        # each is a whole number of vectors.
        for piece in torch.split(result.view(-1), _SERIAL_ELEMENTS):
            functional.silu(piece, inplace=True)
        return result

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self.apply(x).mul_(other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self.apply(x).add_(other)


def make_linear(weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic) -> Linear:
    """Prepare a weight [out, in] and bias [out] for repeated use by `arithmetic` (not "auto")."""
    if arithmetic == "packed":
        return PackedLinear(weight.contiguous(), bias)
    return PlainLinear(weight.contiguous(), bias)


def padded_rows(rows: int, arithmetic: Arithmetic) -> int:
    """The number of rows, `rows` or more, at which no row's bits depend on the count."""
    if arithmetic == "packed":
        return max(rows, _PACKED_MIN_ROWS)
    return -(-max(rows, 1) // _PLAIN_ROW_MULTIPLE) * _PLAIN_ROW_MULTIPLE


def has_packed_linear() -> bool:
    """Whether this torch build and CPU have oneDNN's prepacked linears."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def native_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX-512 BF16 or AMX), found at run time."""
    checks = (
        getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return any(check is not None and bool(check()) for check in checks)


def choose_arithmetic(dtype: torch.dtype, wanted: Arithmetic) -> tuple[torch.dtype, Arithmetic]:
    """The dtype and arithmetic this machine can run for what was asked.

    bf16 falls back to fp32 with one warning where the CPU or the build lacks it. Raises ModelError for a
    dtype other than these two, and for "packed" where it is missing.
    """
    if wanted in ("native", "cuda"):
        return dtype, wanted
    if dtype not in (torch.float32, torch.bfloat16):
        raise ModelError(f"dtype {dtype} is not served; bfloat16 and float32 are")
    if wanted == "packed" and not has_packed_linear():
        raise ModelError("prepacked linears were asked for, and this torch build has none")
    if wanted == "plain" and dtype is torch.bfloat16:
        raise ModelError("plain arithmetic is fp32; for the same weights use round_to_bf16")
    arithmetic: Arithmetic = wanted
    if wanted == "auto":
        arithmetic = "packed" if has_packed_linear() else "plain"
    if dtype is torch.bfloat16 and (arithmetic == "plain" or not native_bf16()):
        logger.warning("this machine has no native bfloat16: running in float32, with more memory and time")
        dtype = torch.float32
    return dtype, arithmetic
