"""The decoder of Llama, SmolLM, Mistral, Qwen2 and Qwen3: ragged rows in, hidden states out.

There is no padding between sequences and no batch dimension: a row is one token of some sequence, and
only the attention executor knows which. A row's result does not depend, to the bit, on which other rows run
beside it, provided that the rows are padded to `padded_rows` and that the executor keeps the same promise.

`Decoder` is what runs a step, however it computes: TorchDecoder in torch, native.NativeDecoder by the CPU
kernel, cuda.CudaDecoder on a GPU.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.models.config import ModelConfig
from engine.models.linear import Arithmetic, Linear, padded_rows
from engine.models.rope import rope_table

# How a decoder holds the weights of a linear.
Held = TypeVar("Held")


class Layer(NamedTuple, Generic[Held]):
    """Weights of one layer, prepared.

    `qkv` gives queries, keys and values of all heads side by side. `qk_norm` is [heads + kv_heads,
    head_dim], the query's weight for each query head and the key's for each KV head, or None.
    """

    attention_norm: Tensor
    qkv: Held
    qk_norm: Tensor | None
    out: Held
    mlp_norm: Tensor
    gate: Held
    up: Held
    down: Held


class Decoder(ABC):
    """A loaded model. Not thread-safe by promise: the compute thread owns it."""

    def __init__(
        self, config: ModelConfig, *, embedding: Tensor, final_norm: Tensor, arithmetic: Arithmetic
    ) -> None:
        """`embedding` [vocab, hidden] sets the dtype; `final_norm` [hidden] is fp32."""
        self.config = config
        self.dtype = embedding.dtype
        self.arithmetic = arithmetic
        self._embedding = embedding
        self._final_norm = final_norm
        self._rope = rope_table(config.rope, config.head_dim, config.context_length)

    @abstractmethod
    def padded_rows(self, n: int) -> int:
        """Rows to which a forward call of n rows must be padded (with token 0 at position 0)."""

    @abstractmethod
    def shallow(self, layers: int) -> Decoder:
        """The first layers alone, with the same embedding and head and no weight copied: for probing."""

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """Run every layer over int64 [rows] tokens at int64 [rows] absolute positions: those of the step
        that `attention` has begun, then padding up to `padded_rows` or more.

        Returns [rows, hidden] before the final norm. Raises IndexError for a token or a position out of
        range.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab] of n hidden rows as `forward` returns them; n is free, also 0."""


class TorchDecoder(Decoder):
    """The decoder in torch, over any executor on the CPU. Hidden rows are in `dtype`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: Iterable[Layer[Linear]],
        final_norm: Tensor,
        head: Linear,
        arithmetic: Arithmetic,
    ) -> None:
        """See Decoder; `head` is fp32."""
        super().__init__(config, embedding=embedding, final_norm=final_norm, arithmetic=arithmetic)
        self._layers = tuple(layers)
        self._head = head

    def padded_rows(self, n: int) -> int:
        return padded_rows(n, self.arithmetic)

    def shallow(self, layers: int) -> TorchDecoder:
        other = copy.copy(self)
        other._layers = self._layers[:layers]
        return other

    @torch.no_grad()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        config = self.config
        hidden = self._embedding.index_select(0, token_ids)
        cos, sin = self._rotation(positions)
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(
                hidden, (config.hidden_size,), layer.attention_norm, config.rms_norm_eps
            )
            q, k, v = self._qkv(layer, normed, cos, sin)
            hidden = layer.out.plus(attention.attend(index, q, k, v), hidden)
            normed = functional.rms_norm(hidden, (config.hidden_size,), layer.mlp_norm, config.rms_norm_eps)
            hidden = layer.down.plus(layer.up.times(normed, layer.gate.swish(normed)), hidden)
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        rows = hidden.shape[0]
        padding = padded_rows(rows, self.arithmetic) - rows
        wide = functional.pad(hidden.float(), (0, 0, 0, padding))
        normed = functional.rms_norm(
            wide, (self.config.hidden_size,), self._final_norm, self.config.rms_norm_eps
        )
        return self._head.apply(normed)[:rows]

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, fp32 [rows, 1, head_dim], such that x * cos + swapped halves * sin rotates."""
        cos, sin = self._rope.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _qkv(
        self, layer: Layer[Linear], x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        fused = layer.qkv.apply(x).view(-1, heads + 2 * kv_heads, head_dim)
        qk = fused[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            qk = functional.rms_norm(qk, (head_dim,), None, self.config.rms_norm_eps) * layer.qk_norm
        # Separate products and a sum: a fused multiply-add would round vector bodies and tails apart.
        rotated = torch.mul(qk, cos).add_(torch.mul(qk.roll(head_dim // 2, -1), sin)).to(self.dtype)
        return rotated[:, :heads], rotated[:, heads:], fused[:, heads + kv_heads :]
