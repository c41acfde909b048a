"""The native decoder: the logits of every family, and the same bits for a row whatever runs beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_oracle import assert_same, save, small_model, theirs, tokens
from torch import Tensor

from engine.attention.base import KvShape
from engine.attention.reference import ReferenceAttention
from engine.config import EngineConfig
from engine.errors import KernelUnavailable
from engine.executors import load_decoder, make_pipeline
from engine.kernels.library import load_library
from engine.models import store
from engine.models.loader import load_model
from engine.models.native import NativeDecoder
from engine.pipeline import Padding, Pipeline
from engine.scratch import Chunk, flat_plan
from tests.kernels import needs_kernel

pytestmark = needs_kernel

FAMILIES = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("llama", {"attention_bias": True}, id="llama-bias"),
    pytest.param("llama", {"tie_word_embeddings": True, "vocab_size": 163}, id="llama-tied-odd-vocabulary"),
    pytest.param(
        "llama", {"num_key_value_heads": 1, "num_attention_heads": 7, "hidden_size": 448}, id="llama-7-to-1"
    ),
    pytest.param("mistral", {"sliding_window": None, "head_dim": 128}, id="mistral-head-dim"),
    pytest.param("qwen2", {}, id="qwen2"),
    pytest.param("qwen3", {"head_dim": 32}, id="qwen3"),
    pytest.param(
        "qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}, id="qwen3-tied"
    ),
]


def pipeline(folder: Path, dtype: str = "float32") -> Pipeline:
    config = EngineConfig(model=str(folder), dtype=dtype, executor="compiled", tile=32)  # type: ignore[arg-type]
    decoder, _ = load_decoder(config, store.resolve(str(folder)))
    assert isinstance(decoder, NativeDecoder)
    return make_pipeline(config, decoder, decoder.config.num_layers, 64)


def logits(native: Pipeline, ids: Tensor, chunk: int) -> Tensor:
    """fp32 logits of one sequence on pages from 1 on, run in chunks."""
    found = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk].tolist()
        hidden = native.hidden(flat_plan([Chunk(1, start, part)], 16, 32))
        found.append(native.logits(hidden, range(len(part))))
    return torch.cat(found)


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_logits_agree_with_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = small_model(family, **changes)
    native = pipeline(save(model, tmp_path))
    ids = tokens(75)
    whole = logits(native, ids, 75)
    assert_same(whole, theirs(model, ids), tolerance=3e-4)
    for chunk in (1, 16, 33):
        assert torch.equal(logits(native, ids, chunk), whole)


def test_bfloat16_stays_close_to_float32_of_the_same_rounded_weights(tmp_path: Path) -> None:
    folder = save(small_model("qwen2"), tmp_path)
    if not load_library().has_bf16:
        with pytest.raises(KernelUnavailable, match="bfloat16 is not native"):
            pipeline(folder, "bfloat16")
        return
    ids = tokens(45)
    rough = logits(pipeline(folder, "bfloat16"), ids, 45)
    exact = logits(pipeline(folder), ids, 45)
    assert (rough - exact).abs().mean() < 0.03 * exact.std()
    assert torch.equal(logits(pipeline(folder, "bfloat16"), ids, 7), rough)


def test_a_model_that_the_kernel_has_no_code_for_is_refused_in_words(tmp_path: Path) -> None:
    folder = save(small_model("llama", num_key_value_heads=1, head_dim=24), tmp_path)
    with pytest.raises(KernelUnavailable, match="head_dim 24 is not a multiple of 16"):
        load_model(
            folder,
            torch.float32,
            arithmetic="native",
            build=lambda *a, **k: NativeDecoder(*a, library=load_library(), **k),
        )


def test_tokens_and_positions_out_of_range_are_errors(tmp_path: Path) -> None:
    native = pipeline(save(small_model("llama"), tmp_path))
    with pytest.raises(IndexError, match="vocabulary"):
        native.hidden(flat_plan([Chunk(1, 0, [160])], 16, 32))
    with pytest.raises(IndexError, match="context"):
        native.hidden(flat_plan([Chunk(1, 128, [5])], 16, 32))


def test_it_runs_the_step_that_its_own_executor_has_begun_and_no_other(tmp_path: Path) -> None:
    native = pipeline(save(small_model("llama"), tmp_path))
    ids = torch.tensor([5, 6, 7])
    forward = native.decoder.forward
    with pytest.raises(RuntimeError, match=r"without a successful begin\(\)"):
        forward(ids, torch.arange(3), native.attention)
    native.attention.begin(flat_plan([Chunk(1, 0, ids.tolist())], 16, 32))
    with pytest.raises(ValueError, match="not those of the step of 3 rows"):
        forward(ids, torch.arange(1, 4), native.attention)
    with pytest.raises(ValueError, match="2 rows are not those"):
        forward(ids[:2], torch.arange(2), native.attention)
    reference = ReferenceAttention(KvShape(3, 64, 16, 4, 2, 16), align=32)
    with pytest.raises(TypeError, match="over the pages of CompiledAttention, not reference"):
        forward(ids, torch.arange(3), reference)


def test_padding_that_the_probe_may_ask_for_changes_no_bit(tmp_path: Path) -> None:
    native = pipeline(save(small_model("llama"), tmp_path))
    ids = tokens(5)
    exact = logits(native, ids, 5)
    native.pad(Padding(rows=8, queries=16))
    assert torch.equal(logits(native, ids, 5), exact)
    native.attention.begin(flat_plan([Chunk(1, 0, ids.tolist())], 16, 32))
    padded, positions = (torch.cat((x, x.new_zeros(3))) for x in (ids, torch.arange(5)))
    assert not native.decoder.forward(padded, positions, native.attention)[5:].any()
