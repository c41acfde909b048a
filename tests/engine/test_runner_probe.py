"""The start-up probe finds rows that depend on their company, raises the padding, or says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import costs, probe
from engine.attention.base import KvShape
from engine.attention.cpu import CpuAttention
from engine.models.loader import load_model
from engine.pipeline import Padding, Pipeline, finite_rows
from engine.plan import StepCosts
from engine.sampling.sampler import Sampler


@pytest.fixture
def pipeline(tiny_model: Path) -> Pipeline:
    """The tiny model's first layer, on as many pages as the probe asks for."""
    decoder = load_model(tiny_model, torch.float32).shallow(1)
    config = decoder.config
    pages = probe.pages_needed(16, 64, config.context_length)
    shape = KvShape(1, pages, 16, config.num_heads, config.num_kv_heads, config.head_dim)
    return Pipeline(decoder, CpuAttention(shape, torch.float32, tile=64), Sampler(config.vocab_size))


def disturb(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Pass what attention gives through `change`, which sees how many rows run."""
    attend = pipeline.attention.attend
    monkeypatch.setattr(pipeline.attention, "attend", lambda *args: change(attend(*args)))


def test_rows_that_keep_their_bits_pass(pipeline: Pipeline) -> None:
    assert probe.probe(pipeline) == probe.Verdict(Padding(), True)


def test_rows_that_need_padding_get_it(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that rounds otherwise unless rows come in eights."""
    disturb(pipeline, monkeypatch, lambda out: out if len(out) % 8 == 0 else out * (1 + 2**-14))
    verdict = probe.probe(pipeline)
    assert verdict.bit_identical
    assert verdict.padding == Padding(rows=8, queries=16)
    assert pipeline.attention.row_multiple == 16
    assert "multiples of 8" in verdict.notes[0]


def test_rows_that_always_depend_on_their_company_are_reported(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(pipeline, monkeypatch, lambda out: out * (1 + 2**-20 * len(out)))
    verdict = probe.probe(pipeline)
    assert not verdict.bit_identical
    assert verdict.padding == probe.PADDINGS[-1]
    assert "with what runs beside them" in verdict.notes[0]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 16, 17, 33, 64, 100])
def test_a_difference_in_steps_of_one_size_is_found(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Every size of step that matters is really run: a fault in that one alone does not pass."""
    hidden = pipeline.hidden

    def wrong(plan: object) -> torch.Tensor:
        out = hidden(plan)  # type: ignore[arg-type]
        return out * (1 + 2**-20) if len(out) == size else out

    monkeypatch.setattr(pipeline, "hidden", wrong)
    assert not probe.probe(pipeline).bit_identical


def test_short_contexts_can_be_probed(tiny_model: Path) -> None:
    decoder = load_model(tiny_model, torch.float32, max_context=20).shallow(1)
    config = decoder.config
    shape = KvShape(
        1, probe.pages_needed(16, 256, 20), 16, config.num_heads, config.num_kv_heads, config.head_dim
    )
    pipeline = Pipeline(decoder, CpuAttention(shape, torch.float32), Sampler(config.vocab_size))
    assert probe.probe(pipeline).bit_identical


def test_padding_changes_no_bit(pipeline: Pipeline) -> None:
    """More padding than needed gives the same numbers."""
    results = []
    for padding in probe.PADDINGS:
        pipeline.pad(padding)
        sequences = probe._sequences(16, 64, 512, 320)
        results.append(probe._run(pipeline, sequences).logits)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_costs_are_measured_and_leave_no_trace(pipeline: Pipeline) -> None:
    measured = costs.measure(pipeline, 512)
    assert measured.predict(1, 1) > 0
    assert measured.predict(512, 512 * 256) > measured.predict(1, 1)
    assert not pipeline.attention.memory.layers[0].any()  # type: ignore[attr-defined]


def test_costs_fit_what_was_measured() -> None:
    """base + rows * row + pairs * pair, from one row, many rows, and many rows under a long context."""
    true = StepCosts(base_ms=7.0, row_ms=0.25, pair_ms=0.001)
    pairs = 64 * 65 // 2
    fitted = costs._fit(
        64, 500, true.predict(1, 1), true.predict(64, pairs), true.predict(64, pairs + 64 * 500)
    )
    assert fitted.base_ms == pytest.approx(7.0)
    assert fitted.row_ms == pytest.approx(0.25)
    assert fitted.pair_ms == pytest.approx(0.001)


def test_finite_rows_sees_every_kind_of_number() -> None:
    """An overflowing or cancelling sum would err: inf beside -inf, and rows of huge but finite numbers."""
    rows = torch.full((6, 4), 3e38)
    rows[1, 2] = float("nan")
    rows[2, 0] = float("inf")
    rows[3, 1] = float("-inf")
    rows[4, :2] = torch.tensor([float("inf"), float("-inf")])
    for dtype in (torch.float32, torch.bfloat16):
        assert finite_rows(rows.to(dtype)).tolist() == [True, False, False, False, False, True]
