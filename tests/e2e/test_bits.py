"""Promise 1 on the real model: the cache, batching, chunking, preemption and cascade change no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from check_bits import VARIANTS, make_cases, tree
from check_bits_lab import Lab

from engine.config import EngineConfig
from engine.models.linear import native_bf16
from engine.runner import Runner
from engine.text import TextCodec

LENGTHS = [1, 2, 11, 15, 16, 17, 31, 32, 33, 48, 100, 255, 257, 513, 530, 600]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def lab(request: pytest.FixtureRequest, smollm2: Path) -> Lab:
    """Cold solo runs of 16 prompts, at edges of pages and tiles, 3 of them over 512 tokens."""
    config = EngineConfig(model=str(smollm2), dtype=request.param, kv_gb=0.5)
    runner = Runner.load(config)
    if request.param == "bfloat16" and native_bf16():
        assert runner.info.dtype == "bfloat16"
    ids = TextCodec.load(smollm2).encode_plain((ROOT / "LICENSE").read_text(encoding="utf-8"))
    return Lab(runner, config.tile, make_cases(ids, LENGTHS, tokens=5))


def test_start_says_that_results_are_bit_identical(lab: Lab) -> None:
    assert lab.runner.info.bit_identical


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.__name__)
def test_no_bit_changes(lab: Lab, variant: object) -> None:
    """O001, O003, O019, O020, O025: ids and log-probabilities equal those of a cold solo run, to the bit."""
    assert callable(variant)
    before = sum(lab.compared.values())
    lab.failures.clear()
    variant(lab)
    assert sum(lab.compared.values()) > before
    assert lab.failures == []


def test_the_number_of_threads_changes_no_bit(lab: Lab, smollm2: Path) -> None:
    """Prompts with one thread: alone as with two, and flat, grouped or as a tree as alone."""
    threads = 1 if lab.runner.info.threads > 1 else 2
    config = EngineConfig(model=str(smollm2), dtype=lab.runner.info.dtype, kv_gb=0.2, threads=threads)
    chosen = [i for i, case in enumerate(lab.cases) if len(case.prompt) in (16, 530, 600)]
    try:
        other = Lab(Runner.load(config), config.tile, [lab.cases[i] for i in chosen])
        tree(other)
    finally:
        torch.set_num_threads(lab.runner.info.threads)
    assert other.failures == []
    assert all(one.same_bits(lab.solo[i]) for one, i in zip(other.solo, chosen, strict=True))
