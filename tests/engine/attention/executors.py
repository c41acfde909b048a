"""The CPU executors under test, each beside the oracle, over the same random KV pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from engine.attention.base import AttentionBackend, KvShape
from engine.attention.compiled import CompiledAttention
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.kernels.library import Library, load_library
from engine.plan import StepPlan
from tests.engine.attention.plans import Member, step_plan
from tests.kernels import has_kernel

# The compiled one as this CPU likes it, and built for CPUs with AVX2 alone.
EXECUTORS = ("torch", "compiled", "compiled-avx2") if has_kernel() else ("torch",)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# The pages that each can have.
PAGE_SIZES = {"torch": (1, 4, 16), "compiled": (16,), "compiled-avx2": (16,)}

Rows = Sequence[torch.Tensor]


def build(
    name: str, shape: KvShape, dtype: torch.dtype = torch.float32, tile: int = 256, threads: int = 2
) -> AttentionBackend:
    """An executor by name; `threads` binds only the one that counts them itself."""
    if name == "reference":
        return ReferenceAttention(shape, align=tile)
    if name == "torch":
        return CpuAttention(shape, dtype, tile=tile)
    return CompiledAttention(kernel(name), shape, dtype, tile=tile, threads=threads)


@cache
def kernel(name: str = "compiled") -> Library:
    """A build of the compiled kernel, made at most once a run."""
    return load_library("x86-64-v3" if name == "compiled-avx2" else "native")


def dtypes(name: str) -> list[torch.dtype]:
    """What an executor computes in on this machine."""
    if name.startswith("compiled"):
        return [dtype for dtype in (torch.bfloat16, torch.float32) if kernel(name).supports(dtype)]
    return [torch.bfloat16, torch.float32]


def all_slots(shape: KvShape) -> torch.Tensor:
    """Every slot but those of the zero page, int64."""
    return torch.arange(shape.page_size, shape.num_pages * shape.page_size)


class Bench:
    """Executors and the oracle over the same random KV, fed the same rows: by default one executor, at
    one and at two threads where it counts them itself."""

    def __init__(self, name: str, shape: KvShape, dtype: torch.dtype, tile: int, seed: int = 0) -> None:
        self.shape, self.dtype, self.tile = shape, dtype, tile
        threads = (1, 2) if name.startswith("compiled") else (1,)
        self.executors = [build(name, shape, dtype, tile, n) for n in threads]
        self.executor = self.executors[-1]
        self.reference = build("reference", shape, dtype, tile)
        self.random = torch.Generator().manual_seed(seed)
        slots = all_slots(shape)
        for layer in range(shape.num_layers):
            kv = self.draw(len(slots), 2, shape.num_kv_heads, shape.head_dim)
            for backend in (*self.executors, self.reference):
                backend.write_rows(layer, slots, kv)

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random).to(self.dtype)

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k, v of `count` rows; q is scaled up, so that some rows look at few tokens."""
        kv_heads, head_dim = self.shape.num_kv_heads, self.shape.head_dim
        scale = 1 + 3 * torch.rand(count, 1, 1, generator=self.random)
        q = self.draw(count, self.shape.num_heads, head_dim) * scale.to(self.dtype)
        return q, self.draw(count, kv_heads, head_dim), self.draw(count, kv_heads, head_dim)

    def execute(self, plan: StepPlan, qkv: Rows) -> torch.Tensor:
        """Run a plan; with several thread counts the bits must be the same."""
        outputs = []
        for backend in self.executors:
            backend.begin(plan)
            outputs.append(backend.attend(self.shape.num_layers - 1, *qkv))
        assert all(torch.equal(outputs[0], other) for other in outputs[1:]), "bits depend on the threads"
        return outputs[-1]

    def run(self, members: Sequence[Member], qkv: Rows) -> torch.Tensor:
        return self.execute(step_plan(members, self.shape.page_size, self.tile), qkv)

    def exact(self, plan: StepPlan, qkv: Rows) -> torch.Tensor:
        """What the oracle gives for a plan."""
        self.reference.begin(plan)
        return self.reference.attend(self.shape.num_layers - 1, *qkv)

    def assert_right(self, output: torch.Tensor, plan: StepPlan, qkv: Rows) -> None:
        """Within tolerance of the oracle."""
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(output, self.exact(plan, qkv), rtol=tolerance, atol=tolerance)


def rows_of(counts: Sequence[int]) -> list[slice]:
    """Which rows of a step are each sequence's, given how many each has."""
    at, found = 0, []
    for count in counts:
        found.append(slice(at, at + count))
        at += count
    return found
