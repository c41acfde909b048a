"""Which arithmetic runs is decided by the CPU at hand, at run time."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from models_oracle import assert_same, ours, rounded_to_bf16, save, small_model, theirs, tokens

from engine.errors import ModelError
from engine.models import linear
from engine.models.loader import load_model


def test_bf16_on_a_cpu_without_it_becomes_fp32_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """O116: a bf16 checkpoint, and bf16 asked for, on a CPU that lacks the instructions."""
    monkeypatch.setattr(linear, "native_bf16", lambda: False)
    model = rounded_to_bf16(small_model("llama"))
    folder = save(model, tmp_path)
    with caplog.at_level(logging.WARNING, logger="engine"):
        decoder = load_model(folder, torch.bfloat16)
    assert decoder.dtype is torch.float32
    assert [record.getMessage().count("float32") for record in caplog.records] == [1]
    ids = tokens(20)
    assert_same(ours(decoder, ids), theirs(model, ids))


def test_a_build_without_prepacked_linears_runs_plain_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O116: neither is a build flag believed: what is missing is not used."""
    monkeypatch.setattr(linear, "has_packed_linear", lambda: False)
    model = small_model("llama")
    decoder = load_model(save(model, tmp_path), torch.bfloat16)
    assert (decoder.dtype, decoder.arithmetic) == (torch.float32, "plain")
    ids = tokens(20)
    assert_same(ours(decoder, ids), theirs(model, ids))
    with pytest.raises(ModelError, match="prepacked"):
        load_model(tmp_path, torch.float32, arithmetic="packed")


def test_the_check_asks_the_cpu() -> None:
    """O116: what it says is what the kernel of this machine lists."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    assert linear.native_bf16() is bool(flags & {"avx512_bf16", "amx_bf16"})


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ModelError, match="float16"):
        linear.choose_arithmetic(torch.float16, "auto")
    with pytest.raises(ModelError, match="plain arithmetic is fp32"):
        linear.choose_arithmetic(torch.bfloat16, "plain")
