"""Measure what shared segments gain and cost on this machine, once, for the scheduler's gate.

Flat and cascade attention of a few small batches are timed against each other, on pages that hold nothing
yet, through nothing but the executor's protocol. GateCosts is the model that is fitted to the differences.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from engine import machine
from engine.attention.base import AttentionBackend, KvShape
from engine.plan import CascadeLevel, CascadePlan, GateCosts, Int32, Int64, StepPlan, flatten

logger = logging.getLogger(__name__)

# Tokens of a block: enough to be worth sharing.
_BLOCK_TOKENS = {"cpu": 256, "cuda": 1024}
# Seconds after which nothing more is repeated.
_BUDGET = 0.4
# Seconds after which a machine counts as too busy.
_GIVE_UP = 1.2
_MOST_REPEATS = 15
# The quickest two runs of a batch differ by less than this where the machine is quiet.
_QUIET = 0.1
# Layers are used in turn until their scratch pages are larger than caches usually are.
_SCRATCH_BYTES = 64e6
_MOST_LAYERS = 16
# Part of the stored file's name: raise it when the model or the batches change.
_VERSION = "1"


Gains = list[float]
"""ns a layer that each batch's cascade takes less than flat attention."""


class Seconds(NamedTuple):
    """Time of what a step needs once, and of one layer."""

    begin: float
    layer: float


class Batch(NamedTuple):
    """`groups` groups of `members` decode rows; each group shares `blocks` blocks of tokens of its own, all
    have `root` blocks in common, which are a level of their own. A group of one saves nothing: it shows what
    a segment costs."""

    groups: int
    members: int
    blocks: int
    root: int = 0

    @property
    def rows(self) -> int:
        return self.groups * self.members

    @property
    def saved_blocks(self) -> int:
        return self.groups * (self.members - 1) * self.blocks + (self.rows - 1) * self.root

    @property
    def segments(self) -> int:
        return self.groups + (self.root > 0)

    @property
    def levels(self) -> int:
        return 1 + (self.root > 0)

    def pages(self, per_block: int) -> int:
        """Pages that it takes: the shared blocks, and one private page a row."""
        return (self.root + self.groups * self.blocks) * per_block + self.rows


BATCHES = (
    Batch(1, 16, 4),
    Batch(1, 2, 4),
    Batch(1, 2, 1),
    Batch(4, 4, 1),
    Batch(8, 2, 1),
    Batch(4, 4, 1, root=1),
    Batch(2, 1, 1),
    Batch(16, 1, 1),
)


def load(
    attention: AttentionBackend, shape: KvShape, dtype: torch.dtype, device: torch.device, fingerprint: str
) -> GateCosts:
    """The costs that were stored at an earlier start, else measured now, and stored if the machine was quiet.

    `fingerprint` is the numerics': executor, instruction set, tile, dtype, versions. Pages from 1 on must
    hold nothing; they are wiped.
    """
    sizes = (str(size) for size in shape._replace(num_pages=0))
    key = machine.fingerprint((_VERSION, fingerprint, str(torch.get_num_threads()), *sizes))
    path = machine.cache_dir() / "gate" / f"{key}.json"
    costs = _read(path)
    if costs is None:
        costs = measure(attention, shape, dtype, device)
        if costs is None:
            logger.warning("the machine is too busy to measure what shared prefixes cost: they count as free")
            return GateCosts()
        _write(path, costs)
    logger.info(
        "a shared prefix gains %.3f ns a kB and costs %.0f ns, and %.0f ns a level, in each layer",
        1000 * costs.byte_ns,
        costs.segment_ns,
        costs.level_ns,
    )
    return costs


def measure(
    attention: AttentionBackend, shape: KvShape, dtype: torch.dtype, device: torch.device
) -> GateCosts | None:
    """Time the batches that fit the pool; takes about a second. None where the machine is too busy to tell;
    the default where the pool is too small for most."""
    size, align = attention.page_size, attention.align
    block = -(-_BLOCK_TOKENS[device.type] // align) * align
    per_block = block // size
    batches = [b for b in BATCHES if b.pages(per_block) < attention.num_pages]
    if len(batches) < len(BATCHES) // 2:
        return GateCosts()
    pages = max(b.pages(per_block) for b in batches)
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    layers = int(max(1, min(shape.num_layers, _MOST_LAYERS, _SCRATCH_BYTES / (pages * size * token_bytes))))
    _fill(attention, shape, range(layers), pages, device)
    try:
        bench = _Bench(attention, shape, layers, dtype, device)
        gains = _gains(bench, [batch_plan(b, size, align, block) for b in batches])
    finally:
        attention.wipe(range(1, pages + 1))
    if gains is None:
        return None
    costs = fit(batches, gains, block * token_bytes)
    return costs if costs.byte_ns > 0 else None  # bytes that cost nothing to read were never read in peace


def batch_plan(batch: Batch, page_size: int, align: int, block: int) -> StepPlan:
    """The batch as a cascade over pages from 1 on, each row the last of a full private page. `block` is the
    tokens of a block, a multiple of `align`."""
    per_block = block // page_size
    rows, group_rows = batch.rows, np.arange(0, batch.rows + 1, batch.members)
    pages = np.arange(1, 1 + batch.pages(per_block))
    cuts = (batch.root * per_block, (batch.root + batch.groups * batch.blocks) * per_block)
    root, shared, private = np.split(pages, cuts)
    levels = [
        _level(np.array([0, rows]), root, page_size),
        _level(group_rows, shared, page_size),
        _level(np.arange(rows + 1), private, page_size),
    ]
    start = (batch.root + batch.blocks) * block
    attention = CascadePlan(
        align,
        tuple(levels[0 if batch.root else 1 :]),
        np.full(rows, start, np.int32),
        np.full(rows, start + page_size - 1, np.int32),
    )
    return StepPlan(
        step=0,
        sequence_ids=tuple(range(rows)),
        row_indptr=levels[-1].qo_indptr,
        token_ids=np.zeros(rows, np.int64),
        write_slots=private.astype(np.int64) * page_size + page_size - 1,
        attention=attention,
        samples=(),
        sample_sequences=(),
    )


def fit(batches: Sequence[Batch], gains_ns: Sequence[float], block_bytes: int) -> GateCosts:
    """Least squares for what each batch gains a layer by its cascade, no cost below 0.

    Each batch counts by what it reads, as what disturbs a time grows with it: a small batch, in which costs
    show, is measured as well as a large one.
    """
    weights = np.array([1 / (b.rows * (b.root + b.blocks)) for b in batches])
    table = np.array([[b.saved_blocks * block_bytes, -b.segments, -b.levels] for b in batches], float)
    table, gains = table * weights[:, None], np.asarray(gains_ns) * weights
    scale = np.abs(table).max(0)
    best, least = np.zeros(3), float((gains**2).sum())
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        part = table[:, chosen] / scale[list(chosen)]
        solution = np.linalg.lstsq(part, gains, rcond=None)[0]
        error = float(((part @ solution - gains) ** 2).sum())
        if (solution >= 0).all() and error < least * (1 - 1e-6):
            best, least = np.zeros(3), error
            best[list(chosen)] = solution / scale[list(chosen)]
    return GateCosts(*best.tolist())


class _Bench:
    """Attention of a plan, timed layer by layer."""

    def __init__(
        self,
        attention: AttentionBackend,
        shape: KvShape,
        layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._attention = attention
        self._layers = layers
        self.step_layers = shape.num_layers
        rows = max(b.rows for b in BATCHES)
        size = (rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        numbers = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        kv = shape.num_kv_heads
        self._q, self._k, self._v = numbers[:, : -2 * kv], numbers[:, -2 * kv : -kv], numbers[:, -kv:]
        self._device = device
        self._behind = device.type == "cuda"

    def seconds(self, plan: StepPlan) -> Seconds:
        """Time a step's attention. Of the layers, on a CPU the quickest counts, as other work on the machine
        only ever adds; on a GPU, which runs behind, the mean."""
        q, k, v = (x[: plan.rows].contiguous() for x in (self._q, self._k, self._v))
        self._wait()
        times = [time.perf_counter()]
        self._attention.begin(plan)
        self._wait()
        times.append(time.perf_counter())
        for layer in range(self._layers):
            self._attention.attend(layer, q, k, v)
            if not self._behind:
                times.append(time.perf_counter())
        self._wait()
        if self._behind:
            return Seconds(times[1] - times[0], (time.perf_counter() - times[1]) / self._layers)
        return Seconds(times[1] - times[0], min(b - a for a, b in itertools.pairwise(times[1:])))

    def _wait(self) -> None:
        if self._behind:
            torch.cuda.synchronize(self._device)


def _gains(bench: _Bench, plans: Sequence[StepPlan]) -> Gains | None:
    """What each plan takes less than the same rows flat, from alternating runs; None where runs that should
    agree do not, or take too long: something else keeps the machine busy."""
    pairs = [(plan._replace(attention=flatten(plan.attention)), plan) for plan in plans]
    times: list[tuple[list[Seconds], list[Seconds]]] = [([], []) for _ in pairs]
    started = time.perf_counter()
    for repeat in range(_MOST_REPEATS):
        for pair, samples in zip(pairs, times, strict=True):
            for j in (0, 1) if repeat % 2 else (1, 0):
                samples[j].append(bench.seconds(pair[j]))
            if time.perf_counter() - started > _GIVE_UP:
                return None
        if repeat >= 2 and time.perf_counter() - started > _BUDGET:
            break
    flat, cascade = (np.array([samples[j] for samples in times]) for j in (0, 1))  # [batches, repeats, 2]
    layers = np.sort(np.concatenate((flat, cascade))[:, :, 1], axis=1)
    if np.median(layers[:, 1] / layers[:, 0]) > 1 + _QUIET:
        return None
    begin, layer = 1e9 * (flat.min(1) - cascade.min(1)).T
    gains: Gains = (layer + begin / bench.step_layers).tolist()
    return gains


def _level(qo_indptr: Int64, pages: Int64, page_size: int) -> CascadeLevel:
    """Segments of equal length, all pages full."""
    segments = len(qo_indptr) - 1
    kv_indptr = np.arange(segments + 1) * (len(pages) // segments)
    full = np.full(segments, page_size if len(pages) else 0, np.int32)
    return CascadeLevel(_int32(qo_indptr), _int32(kv_indptr), _int32(pages), full)


def _fill(
    attention: AttentionBackend, shape: KvShape, layers: range, pages: int, device: torch.device
) -> None:
    """Give pages memory of their own: untouched ones may all be the same zeros, which caches hold."""
    size = (attention.page_size, 2, shape.num_kv_heads, shape.head_dim)
    page = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device)
    slots = torch.arange(attention.page_size, (1 + pages) * attention.page_size, device=device)
    kv = page.repeat(pages, 1, 1, 1)
    for layer in layers:
        attention.write_rows(layer, slots, kv)


def _read(path: Path) -> GateCosts | None:
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=GateCosts)
        return costs if costs.plausible else None
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, costs: GateCosts) -> None:
    """Store for the next start; a folder that can't be written only means measuring again then."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(costs))
        partial.replace(path)
    except OSError as error:
        logger.debug("the gate's costs are not stored: %s", error)


def _int32(values: Int64) -> Int32:
    return np.asarray(values, np.int32)
