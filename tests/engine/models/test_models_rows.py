"""Promise 1 in the decoder: a row's bits never depend on which rows run beside it, nor on how many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_oracle import save, small_model
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.linear import make_linear, native_bf16, padded_rows
from engine.models.loader import load_model

ROWS = 258
COMPANY = (1, 2, 3, 5, 9, 10, 11, 17, 33, 100, 257)
DTYPES = [torch.float32, *([torch.bfloat16] if native_bf16() else [])]


class Alone:
    """In place of attention: each row gives itself, so that rows meet in the model's own operations only."""

    def attend(self, _layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = torch.cat((k, v), dim=1).repeat(1, -(-q.shape[1] // (2 * k.shape[1])), 1)[:, : q.shape[1]]
        return (q + kv).reshape(q.shape[0], -1)


def run(decoder: Decoder, ids: Tensor, positions: Tensor) -> Tensor:
    padding = decoder.padded_rows(len(ids)) - len(ids)
    wide = [torch.cat((x, x.new_zeros(padding))) for x in (ids, positions)]
    return decoder.forward(wide[0], wide[1], Alone())[: len(ids)]  # type: ignore[arg-type]


def assert_rows_are_independent(decoder: Decoder) -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, decoder.config.vocab_size, (ROWS,), generator=generator)
    positions = torch.randint(0, decoder.config.context_length, (ROWS,), generator=generator)
    hidden = run(decoder, ids, positions)
    logits = decoder.logits(hidden)
    assert torch.isfinite(logits).all()
    assert logits.dtype is torch.float32
    for count in COMPANY:
        start = 7 * count % (ROWS - count + 1)
        rows = slice(start, start + count)
        again = run(decoder, ids[rows], positions[rows])
        assert torch.equal(again, hidden[rows]), f"hidden states of {count} rows from {start}"
        assert torch.equal(decoder.logits(again), logits[rows]), f"logits of {count} rows from {start}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_the_real_model_do_not_depend_on_their_company(smollm2: Path, dtype: torch.dtype) -> None:
    assert_rows_are_independent(load_model(smollm2, dtype))


SEVEN_TO_ONE = {"hidden_size": 224, "num_attention_heads": 7, "num_key_value_heads": 1}
SHAPES = [
    pytest.param("qwen3", {"head_dim": 32, "intermediate_size": 1536, "vocab_size": 1000}, id="qwen3"),
    pytest.param("qwen2", {**SEVEN_TO_ONE, "intermediate_size": 1216}, id="qwen2"),
    pytest.param("llama", {"tie_word_embeddings": True, "attention_bias": True}, id="llama"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "changes"), SHAPES)
def test_rows_of_other_families_do_not_depend_on_their_company(
    family: str, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    assert_rows_are_independent(load_model(save(small_model(family, **changes), tmp_path), dtype))


@pytest.mark.parametrize(("family", "changes"), SHAPES)
def test_plain_arithmetic_keeps_the_promise_too(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = save(small_model(family, **changes), tmp_path)
    assert_rows_are_independent(load_model(folder, torch.float32, arithmetic="plain"))


@pytest.mark.parametrize("arithmetic", ["packed", "plain"])
def test_wide_linears_with_activations_inside_keep_the_promise(arithmetic: Any) -> None:
    """The width at which torch's own SiLU begins to depend on the number of rows."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(4864, 64, generator=generator) / 8
    x = torch.randn(264, 64, generator=generator)
    other = torch.randn(264, 4864, generator=generator)
    linear = make_linear(weight, None, arithmetic)
    swish, times, plus = linear.swish(x), linear.times(x, other.clone()), linear.plus(x, other.clone())
    for count in COMPANY:
        rows = slice(0, padded_rows(count, arithmetic))
        assert torch.equal(linear.swish(x[rows]), swish[rows])
        assert torch.equal(linear.times(x[rows], other[rows].clone()), times[rows])
        assert torch.equal(linear.plus(x[rows], other[rows].clone()), plus[rows])


def test_row_counts_are_padded_as_the_arithmetic_needs() -> None:
    assert [padded_rows(n, "packed") for n in (0, 1, 3, 4, 5, 257)] == [4, 4, 4, 4, 5, 257]
    assert [padded_rows(n, "plain") for n in (0, 1, 8, 9, 257)] == [8, 8, 8, 16, 264]


def test_logits_of_no_rows_are_none(tmp_path: Path) -> None:
    decoder = load_model(save(small_model("llama"), tmp_path), torch.float32)
    assert decoder.logits(torch.zeros(0, 64)).shape == (0, 160)


def test_a_position_beyond_the_context_is_an_error(tmp_path: Path) -> None:
    decoder = load_model(save(small_model("llama"), tmp_path), torch.float32, max_context=16)
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        run(decoder, torch.tensor([3]), torch.tensor([16]))
