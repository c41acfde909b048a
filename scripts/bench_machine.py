"""What this machine can do at best, measured beside the benches: reading memory, and linears of 512 rows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from engine.models.config import ModelConfig
from engine.models.linear import Linear, make_linear

READ_BYTES = 256 << 20
LINEAR_ROWS = 512

# (out, in) of the linears of one layer of the default model: QKV, output, gate, up, down.
SMOLLM2_LINEARS = ((960, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))


def layer_linears(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(out, in) of the linears of one layer."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    return ((heads + 2 * kv, hidden), (hidden, heads), (wide, hidden), (wide, hidden), (hidden, wide))


class Reader:
    """Reads memory as torch does: the sum of a tensor far larger than the caches."""

    def __init__(self, size: int = READ_BYTES) -> None:
        self._memory = torch.ones(size // 4)
        self.bytes = self._memory.numel() * 4

    def seconds(self) -> float:
        began = time.perf_counter()
        self._memory.sum()
        return time.perf_counter() - began


class Linears:
    """The linears of some layers, with weights of their own, as the engine runs them in bf16 or fp32."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], layers: int, rows: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.rows = rows
        self._work: list[tuple[Linear, torch.Tensor]] = []
        inputs = {width: torch.randn(rows, width).to(dtype) for _, width in shapes}
        for _ in range(layers):
            for out, width in shapes:
                weight = torch.randn(out, width).to(dtype)
                self._work.append((make_linear(weight, None, "packed"), inputs[width]))
        self.flops = 2 * rows * layers * sum(out * width for out, width in shapes)

    def seconds(self) -> float:
        began = time.perf_counter()
        for linear, x in self._work:
            linear.apply(x)
        return time.perf_counter() - began


def rate_meter(dtype: torch.dtype = torch.bfloat16) -> Linears:
    """The linears whose FLOP rate is the yardstick: 512 rows, 6 layers of the default model."""
    return Linears(SMOLLM2_LINEARS, 6, LINEAR_ROWS, dtype)
