"""The decoder on an NVIDIA GPU: torch's matrix products, FlashInfer's norms, RoPE and activation.

Sampling stays the engine's own, on the CPU: a draw is keyed by (seed, prompt, choice, position) and made
from a stable sort, so it does not depend on the batch. FlashInfer's samplers take random numbers by (seed,
offset) for a whole call, and break ties between threads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.flashinfer_graph import GraphKey
from engine.attention.flashinfer_library import load_flashinfer
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, Layer
from engine.models.linear import Arithmetic, Linear, PlainLinear

# Rows of every matrix product in deterministic mode: one tile of rows, so that all of them are summed alike.
_TILE_ROWS = 16

# Runs a function that gives a tensor, and makes it repeatable: (replay, the tensor that replay refills).
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]


class _Block(NamedTuple):
    """Weights of one layer on the device; gate and up are one matrix, [2 * intermediate, hidden]."""

    attention_norm: Tensor
    qkv: PlainLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: PlainLinear
    mlp_norm: Tensor
    gate_up: PlainLinear
    down: PlainLinear


class _Captured(NamedTuple):
    """A captured forward pass: what replay reads, and what it refills."""

    token_ids: Tensor
    positions: Tensor
    replay: Callable[[], object]
    hidden: Tensor


# A capture holds the addresses of an executor's memory, so it is good for that one, and as long as it lives.
_Captures = WeakKeyDictionary[FlashInferAttention, dict[GraphKey, _Captured]]


class CudaDecoder(Decoder):
    """A Decoder whose weights lie on a GPU. Token ids and positions may be given on the CPU, hidden rows
    stay on the device, logits come back to the CPU.

    `deterministic` runs every matrix product with the same number of rows, so that no row's bits depend on
    what runs beside it. With `capture`, steps that FlashInferAttention plans in a graph's shapes are captured
    once and replayed. A token or position out of range is not reported as IndexError here.
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
        deterministic: bool = False,
        capture: Capture | None = None,
    ) -> None:
        """See TorchDecoder. All tensors on one device; the linears are PlainLinear. Raises ConfigError
        without FlashInfer."""
        super().__init__(config, embedding=embedding, final_norm=final_norm, arithmetic=arithmetic)
        self._head = _plain(head)
        self._flashinfer = load_flashinfer()
        self._device = embedding.device
        self._rope = self._rope.to(self._device)
        self._deterministic = deterministic
        self._blocks = tuple(_block(layer) for layer in layers)
        self._capture = capture
        self._captured = _Captures()

    def padded_rows(self, n: int) -> int:
        return -(-n // _TILE_ROWS) * _TILE_ROWS if self._deterministic else n

    def shallow(self, layers: int) -> CudaDecoder:
        other = copy.copy(self)
        other._blocks = self._blocks[:layers]
        other._captured = _Captures()
        return other

    @torch.no_grad()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """See Decoder. The result, in `dtype`, is overwritten by the next call."""
        if (
            self._capture is not None
            and isinstance(attention, FlashInferAttention)
            and attention.graph_key is not None
        ):
            return self._replay(self._capture, token_ids, positions, attention, attention.graph_key)
        return self._run(token_ids.to(self._device), positions.to(self._device), attention)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab] on the CPU, of n hidden rows on the device; n is free, also 0."""
        rows = hidden.shape[0]
        wide = hidden.float()
        if self._deterministic:
            wide = functional.pad(wide, (0, 0, 0, -rows % _TILE_ROWS))
        normed = functional.rms_norm(
            wide, (self.config.hidden_size,), self._final_norm, self.config.rms_norm_eps
        )
        return self._times(normed, self._head)[:rows].cpu()

    def _replay(
        self,
        capture: Capture,
        token_ids: Tensor,
        positions: Tensor,
        attention: FlashInferAttention,
        key: GraphKey,
    ) -> Tensor:
        """Run a step in the shapes of `key`, captured when it is first needed."""
        rows = len(token_ids)
        token_ids, positions = (functional.pad(x, (0, key.rows - rows)) for x in (token_ids, positions))
        captured = self._captured.setdefault(attention, {})
        found = captured.get(key)
        if found is None:
            tokens, places = (x.to(self._device, copy=True) for x in (token_ids, positions))
            replay, hidden = capture(lambda: self._run(tokens, places, attention))
            found = captured[key] = _Captured(tokens, places, replay, hidden)
        found.token_ids.copy_(token_ids)
        found.positions.copy_(positions)
        found.replay()
        return found.hidden[:rows]

    def _run(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        library, eps = self._flashinfer, self.config.rms_norm_eps
        residual = self._embedding.index_select(0, token_ids)
        normed = library.rmsnorm(residual, self._blocks[0].attention_norm, eps)
        for index, block in enumerate(self._blocks):
            q, k, v = self._qkv_of(block, normed, positions)
            normed = self._times(attention.attend(index, q, k, v), block.out)
            library.fused_add_rmsnorm(normed, residual, block.mlp_norm, eps)
            normed = self._times(library.silu_and_mul(self._times(normed, block.gate_up)), block.down)
            if index + 1 < len(self._blocks):
                library.fused_add_rmsnorm(normed, residual, self._blocks[index + 1].attention_norm, eps)
        return residual.add_(normed)

    def _qkv_of(self, block: _Block, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        fused = self._times(x, block.qkv).view(-1, heads + 2 * kv_heads, head_dim)
        q, k, v = torch.split(fused, [heads, kv_heads, kv_heads], 1)
        if block.q_norm is not None:
            q = self._flashinfer.rmsnorm(q, block.q_norm, config.rms_norm_eps)
            k = self._flashinfer.rmsnorm(k, block.k_norm, config.rms_norm_eps)
        # From our own table, so that every kind of RoPE is served; it holds the cosines, then the sines.
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions, q.view(len(q), -1), k.view(len(k), -1), head_dim, self._rope, is_neox=True
        )
        return q, k, v

    def _times(self, x: Tensor, linear: PlainLinear) -> Tensor:
        if not self._deterministic:
            return linear.apply(x)
        return torch.cat([linear.apply(part) for part in torch.split(x, _TILE_ROWS)])


class CudaCapture:
    """Capture by CUDA graphs, which share one memory pool: one runs at a time, and its result is used before
    the next."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        # On a stream of its own first, so that what is set up at first use is not captured.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = forward()
        return graph.replay, hidden


def _block(layer: Layer[Linear]) -> _Block:
    gate, up = _plain(layer.gate), _plain(layer.up)
    return _Block(
        layer.attention_norm,
        _plain(layer.qkv),
        None if layer.qk_norm is None else layer.qk_norm[0],
        None if layer.qk_norm is None else layer.qk_norm[-1],
        _plain(layer.out),
        layer.mlp_norm,
        PlainLinear(torch.cat((gate.weight, up.weight)), None),
        _plain(layer.down),
    )


def _plain(linear: Linear) -> PlainLinear:
    if not isinstance(linear, PlainLinear):
        raise TypeError(f"{type(linear).__name__} is not a plain linear: load with arithmetic cuda")
    return linear
