"""The decoder as one native call a step: weights packed for the CPU kernel, which runs all layers.

The same architecture as decoder.py, in the kernel's arithmetic: norms, RoPE, SiLU and the residual stream in
fp32, products of bf16 or fp32 numbers with fp32 sums, rounded once where they are stored. A row's result
depends on its own numbers only, whatever runs beside it, so rows need no padding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.compiled import CompiledAttention, heads_refusal
from engine.errors import KernelUnavailable
from engine.kernels.library import (
    LayerWeights,
    Library,
    LinearWeights,
    ModelWeights,
    byref,
    huge_zeros,
)
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, Layer
from engine.models.linear import Arithmetic, Linear, PlainLinear


class NativeLinear:
    """A weight [out, in] and bias [out], packed: panels of output columns, each streamed once."""

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None) -> None:
        self.out, self.width = weight.shape
        self.library = library
        self._element_size = weight.dtype.itemsize
        self._packed = _pack(weight, library.panel, 2 if weight.dtype is torch.bfloat16 else 1)
        self._bias = None
        if bias is not None:
            self._bias = torch.zeros(self.padded_out)
            self._bias[: self.out] = bias
        self.weights = LinearWeights(self._packed.data_ptr(), _address(self._bias), self.out, self.width)

    @property
    def padded_out(self) -> int:
        """Output columns, padded to whole panels."""
        return -(-self.out // self.library.panel) * self.library.panel

    def apply(self, x: Tensor) -> Tensor:
        """x W' + b in fp32, for x [rows, in] in the weight's dtype."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.padded_out)
        self.library.linear(
            byref(self.weights),
            torch.get_num_threads(),
            self._element_size,
            *(x.shape[0], x.data_ptr(), out.data_ptr(), self.padded_out),
        )
        return out[:, : self.out]


class NativeDecoder(Decoder):
    """A Decoder whose forward pass is one call of the kernel, over the pages of a CompiledAttention.

    Hidden rows are fp32 in every dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: Iterable[Layer[Linear]],
        final_norm: Tensor,
        head: Linear,
        arithmetic: Arithmetic,
        library: Library,
    ) -> None:
        """See TorchDecoder. The linears are PlainLinear; each layer is packed and dropped before the next is
        taken.

        Raises KernelUnavailable, before it takes any, for a model that the kernel has no code for.
        """
        problem = refusal(library, config, embedding.dtype)
        if problem:
            raise KernelUnavailable(problem)
        super().__init__(config, embedding=embedding, final_norm=final_norm, arithmetic=arithmetic)
        self.library = library
        self._layers = tuple(_packed(library, layer) for layer in layers)
        self._head = _pack_linear(library, head, self.dtype)
        self._table = (LayerWeights * len(self._layers))(*(_weights(layer) for layer in self._layers))
        self._model = self._weights(len(self._layers))

    def padded_rows(self, n: int) -> int:
        return n

    def shallow(self, layers: int) -> NativeDecoder:
        other = copy.copy(self)
        other._model = self._weights(layers)
        return other

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """See Decoder. Hidden rows of padding are zeros.

        The kernel takes positions from the step: ValueError for others. TypeError for an executor other than
        CompiledAttention, whose pages the kernel reads.
        """
        if not isinstance(attention, CompiledAttention):
            raise TypeError(f"the kernel runs over the pages of CompiledAttention, not {attention.name}")
        begun = attention.positions
        rows = len(begun)
        if len(token_ids) < rows or not np.array_equal(positions[:rows].numpy(), begun):
            raise ValueError(f"{len(token_ids)} rows are not those of the step of {rows} rows that has begun")
        _check_range("a token is out of the vocabulary", token_ids, self.config.vocab_size)
        _check_range("a position is out of the context", positions, self.config.context_length)
        hidden = torch.empty(len(token_ids), self.config.hidden_size)
        hidden[rows:] = 0
        self.library.forward(
            byref(self._model),
            attention.step,
            attention.element_size,
            token_ids.data_ptr(),
            hidden.data_ptr(),
        )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.float().contiguous()
        rows, padded = hidden.shape[0], self._head.padded_out
        normed = torch.empty(rows, self.config.hidden_size, dtype=self.dtype)
        out = torch.empty(rows, padded)
        if rows:
            self.library.logits(
                byref(self._model),
                torch.get_num_threads(),
                self.dtype.itemsize,
                *(rows, hidden.data_ptr(), normed.data_ptr(), out.data_ptr(), padded),
            )
        return out[:, : self.config.vocab_size]

    def _weights(self, layers: int) -> ModelWeights:
        config = self.config
        return ModelWeights(
            *(layers, config.hidden_size, config.intermediate_size),
            *(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps),
            *(self._embedding.data_ptr(), self._rope.data_ptr(), self._table),
            *(self._final_norm.data_ptr(), self._head.weights),
        )


def refusal(library: Library, config: ModelConfig, dtype: torch.dtype) -> str:
    """Why the kernel can't run a model natively, in words; empty if it can."""
    if not library.supports(dtype):
        return f"{str(dtype).removeprefix('torch.')} is not native to this CPU"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % library.lanes:
            return f"{name} {getattr(config, name)} is not a multiple of {library.lanes}"
    return heads_refusal(config.num_heads, config.num_kv_heads, config.head_dim)


def _pack(weight: Tensor, panel: int, pair: int) -> Tensor:
    """[out, in] to [panels, in / pair, panel, pair], the last panel padded with zeros, in huge pages."""
    out, width = weight.shape
    panels = -(-out // panel)
    packed = huge_zeros(panels * panel * width * weight.dtype.itemsize).view(weight.dtype)
    packed = packed.view(panels, width // pair, panel, pair)
    wide = torch.nn.functional.pad(weight, (0, 0, 0, panels * panel - out))
    packed.copy_(wide.view(panels, panel, width // pair, pair).permute(0, 2, 1, 3))
    return packed


def _packed(library: Library, layer: Layer[Linear]) -> Layer[NativeLinear]:
    """The same weights, the linears packed and the norms in fp32."""
    dtype = layer.attention_norm.dtype
    linears = {
        name: _pack_linear(library, getattr(layer, name), dtype)
        for name in ("qkv", "out", "gate", "up", "down")
    }
    return Layer(
        attention_norm=layer.attention_norm.float(),
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.float().contiguous(),
        mlp_norm=layer.mlp_norm.float(),
        **linears,
    )


def _pack_linear(library: Library, linear: Linear, dtype: torch.dtype) -> NativeLinear:
    assert isinstance(linear, PlainLinear)
    return NativeLinear(library, linear.weight.to(dtype), linear.bias)


def _check_range(problem: str, values: Tensor, end: int) -> None:
    array = values.numpy()
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < end:
        raise IndexError(problem)


def _weights(layer: Layer[NativeLinear]) -> LayerWeights:
    return LayerWeights(
        layer.attention_norm.data_ptr(),
        layer.qkv.weights,
        _address(layer.qk_norm),
        layer.out.weights,
        layer.mlp_norm.data_ptr(),
        *(layer.gate.weights, layer.up.weights, layer.down.weights),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
