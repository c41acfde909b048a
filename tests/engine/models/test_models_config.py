"""Configs: what can't be served rightly is refused before any weight is read, and said in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_oracle import SMALL, assert_same, ours, save, small_model, theirs, tokens

from engine.errors import ModelError, UnsupportedModel
from engine.models.config import ModelConfig
from engine.models.loader import load_model


def hf(family: str = "llama", **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**SMALL, "model_type": family, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' is not served"),
        ({"model_type": None}, "None is not served"),
        ({"hidden_act": "gelu"}, "'gelu' is not served"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layer types"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope'"),
        ({"head_dim": 15}, "even head size"),
    ],
)
def test_features_that_are_not_served_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        hf(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "no usable hidden_size"),
        ({"vocab_size": -3}, "no usable vocab_size"),
        ({"num_hidden_layers": "three"}, "no usable num_hidden_layers"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs a factor"),
        ({"rope_scaling": {"type": "llama3"}}, "'llama3' needs a factor"),
        ({"rope_scaling": {"type": "yarn"}}, "'yarn' needs a factor"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "needs short_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "1 factors for 8 frequencies"),
        ({"rope_scaling": "yarn"}, "malformed"),
        ({"num_key_value_heads": 3}, "4 query heads can't share 3"),
    ],
)
def test_broken_configs_are_refused_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        hf(**changes)


def test_a_nested_text_config_is_read() -> None:
    outer = {"model_type": "wrapper", "tie_word_embeddings": True}
    config = ModelConfig.from_hf({**outer, "text_config": {**SMALL, "model_type": "qwen3", "head_dim": 16}})
    assert (config.family, config.qk_norm, config.tied) == ("qwen3", True, False)


# --- sliding windows ---------------------------------------------------------------------------------------

WINDOWED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 32}),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0, "head_dim": 16}),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3}),
]
UNUSED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 128}),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 0}),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3}),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "layer_types": ["full_attention"] * 3}),
]


@pytest.mark.parametrize(("family", "changes"), WINDOWED)
def test_a_sliding_window_shorter_than_the_context_is_refused_at_start(
    family: str, changes: dict[str, Any]
) -> None:
    """O117: the message names the window and the way out."""
    with pytest.raises(UnsupportedModel, match=r"window of 32 tokens.*max_context to at most 32"):
        hf(family, **changes).capped(None)
    with pytest.raises(UnsupportedModel, match="window of 32 tokens"):
        hf(family, **changes).capped(33)


@pytest.mark.parametrize(("family", "changes"), WINDOWED)
def test_a_sliding_window_is_right_where_the_context_fits_into_it(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """O117: capped to the window, the logits are those of transformers to the last position."""
    model = small_model(family, **changes)
    decoder = load_model(save(model, tmp_path), torch.float32, max_context=32)
    assert decoder.config.context_length == 32
    ids = tokens(32)
    assert_same(ours(decoder, ids), theirs(model, ids))


@pytest.mark.parametrize(("family", "changes"), UNUSED)
def test_a_sliding_window_that_no_layer_uses_is_no_obstacle(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """O117: nor one as long as the context: all positions are served, and right."""
    model = small_model(family, **changes)
    ids = tokens(120)
    assert_same(ours(load_model(save(model, tmp_path), torch.float32), ids), theirs(model, ids))


def test_max_context_caps_and_never_extends() -> None:
    assert hf().capped(100).context_length == 100
    assert hf().capped(1000).context_length == 128
    assert hf().capped(0).context_length == hf().capped(None).context_length == 128
