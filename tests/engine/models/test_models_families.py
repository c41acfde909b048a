"""Every family gives the logits of transformers, whatever its switches and its rotary scaling."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models_oracle import SMALL, assert_same, ours, rounded_to_bf16, save, small_model, theirs, tokens
from safetensors.torch import load_file, save_file

from engine.errors import ModelError, UnsupportedModel
from engine.models.loader import load_model

FAMILIES = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("llama", {"attention_bias": True}, id="llama-bias"),
    pytest.param("llama", {"tie_word_embeddings": True}, id="llama-tied"),
    pytest.param("llama", {"num_key_value_heads": 4}, id="llama-no-gqa"),
    pytest.param("llama", {"num_key_value_heads": 1, "head_dim": 24}, id="llama-one-kv-head-own-size"),
    pytest.param("mistral", {"sliding_window": None}, id="mistral"),
    pytest.param("mistral", {"sliding_window": None, "head_dim": 32}, id="mistral-head-dim"),
    pytest.param("qwen2", {}, id="qwen2"),
    pytest.param("qwen2", {"tie_word_embeddings": True}, id="qwen2-tied"),
    pytest.param("qwen3", {"head_dim": 32}, id="qwen3"),
    pytest.param(
        "qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}, id="qwen3-tied"
    ),
]


@pytest.mark.parametrize("arithmetic", ["packed", "plain"])
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_logits_agree_with_transformers(
    family: str, changes: dict[str, Any], arithmetic: Any, tmp_path: Path
) -> None:
    model = small_model(family, **changes)
    decoder = load_model(save(model, tmp_path), torch.float32, arithmetic=arithmetic)
    ids = tokens(45)
    assert_same(ours(decoder, ids), theirs(model, ids))


def test_bfloat16_stays_close_to_float32_of_the_same_rounded_weights(tmp_path: Path) -> None:
    model = small_model("qwen2")
    folder = save(model, tmp_path)
    ids = tokens(45)
    exact = ours(load_model(folder, torch.float32, round_to_bf16=True), ids)
    assert_same(exact, theirs(rounded_to_bf16(model), ids))
    rough = ours(load_model(folder, torch.bfloat16), ids)
    assert (rough - exact).abs().mean() < 0.02 * exact.std()


def test_sharded_folders_load(tmp_path: Path) -> None:
    model = small_model("llama")
    folder = save(model, tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ids = tokens(20)
    assert_same(ours(load_model(folder, torch.float32), ids), theirs(model, ids))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save(small_model("llama"), tmp_path, max_shard_size="60KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load_model(folder, torch.float32)


def test_half_precision_checkpoints_load(tmp_path: Path) -> None:
    model = small_model("llama").half()
    decoder = load_model(save(model, tmp_path), torch.float32)
    ids = tokens(20)
    unrounded = small_model("llama")
    for mine, half in zip(unrounded.parameters(), model.parameters(), strict=True):
        mine.data.copy_(half)
    assert_same(ours(decoder, ids), theirs(unrounded, ids))


# --- the output head -------------------------------------------------------------------------------------


def test_tied_models_use_the_embedding_as_head(tmp_path: Path) -> None:
    """O108: no head tensor, and the tie said at the top, only in a nested config, or not at all."""
    model = small_model("llama", tie_word_embeddings=True)
    ids = tokens(20)
    nested = {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": None}
    for name, changes in (("top", {}), ("nested", nested), ("unsaid", {"tie_word_embeddings": None})):
        folder = save(model, tmp_path / name, **changes)
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
        decoder = load_model(folder, torch.float32)
        assert decoder.config.tied is True
        assert_same(ours(decoder, ids), theirs(model, ids))


def test_a_head_that_is_missing_and_not_tied_is_refused_by_name(tmp_path: Path) -> None:
    """O108: the flag says untied, and the tensor is not there."""
    folder = save(small_model("llama", tie_word_embeddings=True), tmp_path, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_model(folder, torch.float32)


def test_a_tied_model_ignores_a_head_of_its_own(tmp_path: Path) -> None:
    """O108: the flag says tied, and a different head lies there: the flag counts."""
    model = small_model("llama", tie_word_embeddings=True)
    folder = save(model, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = tokens(20)
    assert_same(ours(load_model(folder, torch.float32), ids), theirs(model, ids))


def test_an_untied_head_is_used_where_the_config_says_nothing(tmp_path: Path) -> None:
    model = small_model("llama")
    folder = save(model, tmp_path, tie_word_embeddings=None)
    ids = tokens(20)
    assert_same(ours(load_model(folder, torch.float32), ids), theirs(model, ids))


# --- tensors that are not as the config says -------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.layers.2.self_attn.k_proj.weight"],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    folder = save(small_model("llama"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_model(folder, torch.float32)


def test_a_bias_that_the_config_does_not_explain_is_refused(tmp_path: Path) -> None:
    folder = save(small_model("llama", attention_bias=True), tmp_path, attention_bias=False)
    with pytest.raises(ModelError, match=r"proj\.bias"):
        load_model(folder, torch.float32)


def test_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    model = small_model("llama")
    folder = save(model, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, folder / "model.safetensors")
    ids = tokens(20)
    assert_same(ours(load_model(folder, torch.float32), ids), theirs(model, ids))


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = save(small_model("llama"), tmp_path, intermediate_size=120)
    with pytest.raises(ModelError, match=r"gate_proj.*\(112, 64\).*\(120, 64\)"):
        load_model(folder, torch.float32)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = save(small_model("llama"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.ones(112, 64, dtype=torch.int8)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="int8"):
        load_model(folder, torch.float32)


def test_a_damaged_folder_is_refused_in_words(tmp_path: Path) -> None:
    folder = save(small_model("llama"), tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"can't read .*model\.safetensors"):
        load_model(folder, torch.float32)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match=r"can't read .*config\.json"):
        load_model(folder, torch.float32)


# --- rotary scaling --------------------------------------------------------------------------------------

ORIGINAL = 32
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = [
    pytest.param("linear", {"factor": 4.0}, id="linear"),
    pytest.param("llama3", LLAMA3, id="llama3"),
    pytest.param("yarn", {"factor": 4.0}, id="yarn"),
    pytest.param("yarn", {"factor": 4.0, "attention_factor": 0.7}, id="yarn-attention-factor"),
    pytest.param(
        "yarn", {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, id="yarn-betas"
    ),
    pytest.param("yarn", {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3}, id="yarn-mscale"),
]
# transformers warns of keys that it does not know, and of lengths that do not match.
quiet = pytest.mark.filterwarnings("ignore::FutureWarning")


@quiet
@pytest.mark.parametrize("spelling", ["rope_parameters", "type", "rope_type", "original beside", "both"])
@pytest.mark.parametrize(("kind", "scaling"), SCALINGS)
def test_scaled_rope_is_read_whole_in_every_spelling(
    kind: str, scaling: dict[str, Any], spelling: str, tmp_path: Path
) -> None:
    """O109: positions beyond the original length agree with transformers, whichever keys say so."""
    own = {**scaling, "original_max_position_embeddings": ORIGINAL} if kind != "linear" else scaling
    model = small_model("llama", rope_parameters={"rope_type": kind, "rope_theta": 500.0, **own})
    changes: dict[str, Any] = {}
    if spelling in ("type", "rope_type", "original beside"):
        changes = {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": kind, **own}}
    if spelling == "rope_type":
        changes["rope_scaling"] = {"rope_type": kind, "type": "ignored", **own}
    if spelling == "both":  # a scaling added by hand beside the default that was saved
        default = {"rope_type": "default", "rope_theta": 500.0}
        changes = {"rope_parameters": default, "rope_scaling": {"type": kind, **own}}
    if spelling == "original beside":
        changes["rope_scaling"] = {"type": kind, **scaling}
        changes["original_max_position_embeddings"] = own.get("original_max_position_embeddings")
    decoder = load_model(save(model, tmp_path / "scaled", **changes), torch.float32)
    ids = tokens(110)
    reference = theirs(model, ids)
    assert_same(ours(decoder, ids), reference)

    unscaled = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_scaling": None}
    plain = load_model(save(model, tmp_path / "plain", **unscaled), torch.float32)
    assert (ours(plain, ids) - reference).abs().max() > 0.1, "the scaling must matter for this to test it"


@quiet
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_rope_is_served_up_to_the_original_context_only(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """O109: within the original length they agree with transformers; beyond it cached keys would lie."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0}
    if kind == "longrope":
        rope["short_factor"] = [1.0 + 0.1 * i for i in range(8)]
        rope["long_factor"] = [2.0 + 0.5 * i for i in range(8)]
        rope["original_max_position_embeddings"] = ORIGINAL
    context = ORIGINAL if kind == "longrope" else SMALL["max_position_embeddings"]
    model = small_model("llama", rope_parameters=rope)
    with caplog.at_level(logging.WARNING, logger="engine.models"):
        decoder = load_model(save(model, tmp_path), torch.float32)
    assert decoder.config.context_length == context
    assert f"original context only: {context} tokens" in caplog.text
    ids = tokens(context)
    assert_same(ours(decoder, ids), theirs(model, ids))


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_an_unknown_rope_type_is_refused_by_name(where: str, tmp_path: Path) -> None:
    """O109: a rope type that nobody here implements refuses to load, rather than being ignored."""
    folder = save(small_model("llama"), tmp_path, **{where: {"rope_type": "spiral", "factor": 2.0}})
    with pytest.raises(UnsupportedModel, match="spiral"):
        load_model(folder, torch.float32)


def test_yarn_beside_the_original_context_length_extends_it(tmp_path: Path) -> None:
    """O109: Qwen's way: max_position_embeddings stays the original, the scaling says how far it goes."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    folder = save(small_model("qwen2"), tmp_path, rope_parameters=None, rope_scaling=scaling)
    assert load_model(folder, torch.float32).config.context_length == 512
