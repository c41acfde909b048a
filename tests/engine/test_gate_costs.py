"""What the gate weighs is measured through the executor's protocol, stored, and found at the next start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine import gate
from engine.attention.base import KvShape
from engine.attention.checks import check_plan
from engine.attention.cpu import CpuAttention
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.plan import GateCosts, flatten
from engine.runner import Runner

SHAPE = KvShape(2, 40, 16, 4, 2, 16)
CPU = torch.device("cpu")


def executor(pages: int = 40) -> CpuAttention:
    """Blocks are of 256 tokens: 16 pages, so this pool holds but the smaller batches."""
    return CpuAttention(SHAPE._replace(num_pages=pages), torch.float32, tile=32)


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path))
    return tmp_path / "gate"


@pytest.mark.parametrize("batch", gate.BATCHES)
def test_batches_are_plans_that_save_what_they_say(batch: gate.Batch) -> None:
    plan = gate.batch_plan(batch, 16, 32, 64)
    check_plan(plan, 16, 1 + batch.pages(4))
    check_plan(plan._replace(attention=flatten(plan.attention)), 16, 1 + batch.pages(4))
    read = sum(len(level.kv_indices) for level in plan.attention.levels)
    flat = len(flatten(plan.attention).levels[0].kv_indices)
    assert flat - read == batch.saved_blocks * 4
    assert (
        sum(np.count_nonzero(level.last_page_len) for level in plan.attention.levels[:-1]) == batch.segments
    )
    assert len(plan.attention.levels) - 1 == batch.levels


@pytest.mark.parametrize(
    "true",
    [
        GateCosts(0.003, 400.0, 900.0),
        GateCosts(0.02, 0.0, 12_000.0),
        GateCosts(0.1, 50.0, 0.0),
        GateCosts(0.0, 300.0, 0.0),
    ],
)
def test_costs_are_found_again_from_what_batches_gain(true: GateCosts) -> None:
    block_bytes = 196_608
    gains = [true.profit_ns(b.saved_blocks * block_bytes, b.segments, b.levels) for b in gate.BATCHES]
    found = gate.fit(gate.BATCHES, gains, block_bytes)
    assert found.byte_ns == pytest.approx(true.byte_ns, abs=1e-9)
    assert found.segment_ns == pytest.approx(true.segment_ns, abs=1e-3)
    assert found.level_ns == pytest.approx(true.level_ns, abs=1e-3)


def test_nothing_costs_less_than_nothing() -> None:
    """Cascades that lose on every batch: no byte is worth anything, so nothing opens."""
    found = gate.fit(gate.BATCHES, [-1000.0 * b.rows for b in gate.BATCHES], 1000)
    assert found.byte_ns == 0
    assert min(found.segment_ns, found.level_ns) >= 0


def test_measuring_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_QUIET", 1e9)  # a busy machine measures, too
    monkeypatch.setattr(gate, "_GIVE_UP", 1e9)
    attention = executor(600)
    with torch.inference_mode():
        costs = gate.measure(attention, attention.memory.shape, torch.float32, CPU)
    assert costs is not None
    assert min(costs.byte_ns, costs.segment_ns, costs.level_ns) >= 0
    assert not any(layer.any() for layer in attention.memory.layers)


def test_a_pool_too_small_to_measure_counts_sharing_as_free() -> None:
    assert gate.measure(executor(), SHAPE, torch.float32, CPU) == GateCosts()


def test_a_busy_machine_is_not_believed(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    """Runs that should agree and do not: sharing counts as free, and nothing is stored."""
    monkeypatch.setattr(gate, "_QUIET", -1.0)
    attention = executor(600)
    with torch.inference_mode():
        assert gate.load(attention, attention.memory.shape, torch.float32, CPU, "numerics") == GateCosts()
    assert not cache_dir.exists()


def test_what_was_measured_is_taken_up_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    measured = GateCosts(0.5, 7.0, 9.0)
    calls = []
    monkeypatch.setattr(gate, "measure", lambda *_: calls.append(1) or measured)
    for _ in range(2):
        assert gate.load(executor(), SHAPE, torch.float32, CPU, "numerics") == measured
    assert len(calls) == 1, "measured twice"
    gate.load(executor(), SHAPE._replace(num_pages=50), torch.float32, CPU, "numerics")
    assert len(calls) == 1, "the size of the pool does not matter"
    gate.load(executor(), SHAPE, torch.float32, CPU, "other numerics")
    gate.load(executor(), SHAPE._replace(head_dim=32), torch.float32, CPU, "numerics")
    assert len(calls) == 3, "another executor or model is measured on its own"

    for stored in cache_dir.iterdir():
        stored.write_bytes(b'{"byte_ns": "many"}')
    assert gate.load(executor(), SHAPE, torch.float32, CPU, "numerics") == measured
    assert len(calls) == 4, "a file that can't be read is measured again"


def test_a_folder_that_cannot_be_written_does_not_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gate").write_text("in the way")
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gate, "measure", lambda *_: GateCosts(0.5))
    assert gate.load(executor(), SHAPE, torch.float32, CPU, "numerics") == GateCosts(0.5)


def test_pinned_costs_are_used_and_nothing_is_measured(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "measure", None)
    config = EngineConfig(model=str(tiny_model), kv_gb=0.05, cascade_costs="byte_ns=0.25,level_ns=3")
    assert Runner.load(config).gate == GateCosts(0.25, 0.0, 3.0)


async def test_impossible_costs_stop_the_start_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="HEADWATER_CASCADE_COSTS='byte=1' is not allowed"):
        await Engine.start(EngineConfig(model="/nowhere", cascade_costs="byte=1"))
