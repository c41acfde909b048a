"""The GPU check's benchmark: decode attention by cascade against flat, by prefix length, batch and groups."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from gpu_check_cases import PAGE, Member, pages_of, shared_batch, step_plan
from torch import Tensor

from engine.attention.base import KvShape
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.flashinfer_levels import Kernel

# Milliseconds that a call takes; on a GPU measured there, not from the host.
Clock = Callable[[Callable[[], object]], float]

PREFIXES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (8, 32, 64, 128, 256)
GROUPS = (1, 4)
TAIL = 128
ROUNDS = 11
_LAYERS = 8
_ELEMENT = 2


class Cell(NamedTuple):
    """One step, attended flat and by cascade: medians in ms a layer, and KV bytes that a layer reads."""

    kernel: str
    prefix: int
    batch: int
    groups: int
    flat_ms: float
    cascade_ms: float
    flat_bytes: int
    cascade_bytes: int

    @property
    def speedup(self) -> float:
        return self.flat_ms / self.cascade_ms


class Sizes(NamedTuple):
    """What is measured: heads of Llama 3.1 8B by default."""

    prefixes: tuple[int, ...] = PREFIXES
    batches: tuple[int, ...] = BATCHES
    groups: tuple[int, ...] = GROUPS
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    rounds: int = ROUNDS
    layers: int = _LAYERS


def cuda_clock(call: Callable[[], object]) -> float:
    """Milliseconds between two events on the GPU around a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def copy_gb_per_s(device: str, clock: Clock, size: int = 1 << 30, rounds: int = ROUNDS) -> float:
    """What the memory moves when it is copied, bytes read and written counted, as a yardstick."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / (statistics.median(clock(lambda: target.copy_(source)) for _ in range(rounds)) * 1e6)


def cells(device: str, clock: Clock, kernel: Kernel, sizes: Sizes, until: float) -> Iterator[Cell]:
    """Measure all sizes, the interesting middle first, for as long as time.monotonic() is before `until`."""
    combined = [(p, b, g) for g in sizes.groups for b in sizes.batches for p in sizes.prefixes if g * 2 <= b]
    if not combined:
        return
    bench = _Bench(device, clock, kernel, sizes, max(pages_of(_members(*size)) for size in combined))
    for prefix, batch, groups in sorted(combined, key=lambda size: abs(size[0] - 4096)):
        if time.monotonic() > until:
            return
        yield bench.measure(prefix, batch, groups)


def _members(prefix: int, batch: int, groups: int) -> tuple[Member, ...]:
    return shared_batch(prefix, batch, groups, TAIL)


class _Bench:
    """One executor with several layers of KV, which are attended in turn so that caches do not flatter."""

    def __init__(self, device: str, clock: Clock, kernel: Kernel, sizes: Sizes, pages: int) -> None:
        shape = KvShape(sizes.layers, pages, PAGE, sizes.heads, sizes.kv_heads, sizes.head_dim)
        self._attention = FlashInferAttention(shape, torch.bfloat16, device=device, kernel=kernel)
        self._sizes, self._clock, self._kernel, self._device = sizes, clock, kernel, device
        self._fill(shape)

    def measure(self, prefix: int, batch: int, groups: int) -> Cell:
        """Alternate flat and cascade, so that what slows one round slows both."""
        members = _members(prefix, batch, groups)
        plans = [step_plan([m.flat() for m in members]), step_plan(members)]
        sizes = self._sizes
        q = self._draw(batch, sizes.heads, sizes.head_dim)
        k, v = (self._draw(batch, sizes.kv_heads, sizes.head_dim) for _ in range(2))
        times: tuple[list[float], list[float]] = ([], [])
        reads = [0, 0]
        for turn in range(sizes.rounds + 1):
            for i, plan in enumerate(plans):
                self._attention.begin(plan)
                reads[i] = sum(self._attention.kv_tokens_read)
                spent = self._clock(lambda: self._layers(q, k, v))
                if turn:  # the first one also builds and warms up
                    times[i].append(spent / sizes.layers)
        token_bytes = 2 * sizes.kv_heads * sizes.head_dim * _ELEMENT
        flat_ms, cascade_ms = map(statistics.median, times)
        return Cell(
            self._kernel,
            prefix,
            batch,
            groups,
            flat_ms,
            cascade_ms,
            reads[0] * token_bytes,
            reads[1] * token_bytes,
        )

    def _layers(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for layer in range(self._sizes.layers):
            self._attention.attend(layer, q, k, v)

    def _fill(self, shape: KvShape) -> None:
        """Random KV in every page but the zero page, a part at a time."""
        for layer in range(shape.num_layers):
            for slots in torch.arange(PAGE, shape.num_pages * PAGE).split(65536):
                kv = self._draw(len(slots), 2, shape.num_kv_heads, shape.head_dim)
                self._attention.write_rows(layer, slots, kv)

    def _draw(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self._device).to(torch.bfloat16)
