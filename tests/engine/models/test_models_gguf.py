"""GGUF: the same logits as from the original weights, for each architecture and quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from models_oracle import assert_same, ours, small_model, theirs, tokens
from smollm2_oracle import smollm2_oracle
from torch import Tensor

from engine.errors import ModelError, UnsupportedModel
from engine.models.gguf import GgufFile
from engine.models.loader import load_model
from engine.models.sources import GgufSource

NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    for theirs_, ours_ in NAMES.items():
        name = name.replace(theirs_, ours_)
    return name


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """The converters' order of llama's rotary rows: the halves of each head shuffled into pairs."""
    return torch.cat([torch.stack(head.chunk(2), dim=1).flatten(0, 1) for head in weight.chunk(heads)])


def write(model: Any, path: Path, arch: str, without: str = "", **extra: Any) -> Path:
    """Write a transformers model the way the converters do; `extra` are further metadata or a tensor."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in extra.items():
        if key == "rope_freqs":
            writer.add_tensor("rope_freqs.weight", value)
        else:
            getattr(writer, f"add_{key}")(value)
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if (tied and name == "lm_head.weight") or (without and without in name):
            continue
        if arch == "llama" and "q_proj" in name:
            weight = interleaved(weight, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            weight = interleaved(weight, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "family", "changes"),
    [
        pytest.param("llama", "llama", {}, id="llama"),
        pytest.param("llama", "llama", {"tie_word_embeddings": True}, id="llama-tied"),
        pytest.param("llama", "llama", {"attention_bias": True}, id="llama-bias"),
        pytest.param("llama", "mistral", {"sliding_window": None, "head_dim": 32}, id="mistral"),
        pytest.param("qwen2", "qwen2", {}, id="qwen2"),
        pytest.param("qwen2", "qwen2", {"tie_word_embeddings": True}, id="qwen2-tied"),
        pytest.param("qwen3", "qwen3", {"head_dim": 32}, id="qwen3"),
    ],
)
def test_logits_are_those_of_the_original_model(
    arch: str, family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """O108: among them tied models, whose files have no output tensor."""
    model = small_model(family, **changes)
    decoder = load_model(write(model, tmp_path / "model.gguf", arch), torch.float32)
    assert decoder.config.tied is bool(changes.get("tie_word_embeddings"))
    ids = tokens(45)
    assert_same(ours(decoder, ids), theirs(model, ids))


def test_the_default_model_gives_the_logits_of_transformers(smollm2: Path) -> None:
    """Against transformers' Llama with the file's weights, read and expanded by the gguf package."""
    model = smollm2_oracle(smollm2)
    ids = tokens(40, 49152)
    decoder = load_model(smollm2, torch.float32)
    assert_same(ours(decoder, ids), theirs(model, ids), tolerance=1e-3)


def test_rope_factors_of_the_file_scale_the_frequencies(tmp_path: Path) -> None:
    """O109: converters write llama 3's scaling as a tensor of divisors and name no scaling type."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    model = small_model("llama", rope_parameters=rope)
    unscaled = 500.0 ** -(torch.arange(0, 16, 2) / 16)
    divisors = (unscaled / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    path = write(model, tmp_path / "model.gguf", "llama", rope_freqs=divisors)
    ids = tokens(110)
    assert_same(ours(load_model(path, torch.float32), ids), theirs(model, ids))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_read_from_the_metadata(kind: str, tmp_path: Path) -> None:
    """O109: positions beyond the original length agree with transformers."""
    rope = {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0}
    extra: dict[str, Any] = {"rope_scaling_type": gguf.RopeScalingType(kind), "rope_scaling_factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 32
        extra["rope_scaling_orig_ctx_len"] = 32
    model = small_model("qwen2", rope_parameters=rope)
    path = write(model, tmp_path / "model.gguf", "qwen2", **extra)
    ids = tokens(110)
    assert_same(ours(load_model(path, torch.float32), ids), theirs(model, ids))


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_tensors_are_expanded_to_the_bit(kind: str, tmp_path: Path) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    values = torch.randn(48, 256, generator=torch.Generator().manual_seed(2)).numpy()
    packed = quantize(values, quant)
    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    writer.add_tensor("x.weight", packed, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expanded = GgufFile(tmp_path / "t.gguf").tensor("x.weight")
    assert expanded.dtype is torch.float32
    assert torch.equal(expanded, torch.from_numpy(np.array(dequantize(packed, quant), dtype=np.float32)))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = small_model("llama")
    path = write(model, tmp_path / "model.gguf", "llama", without="layers.1.mlp.up_proj")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(path, torch.float32)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = write(small_model("llama"), tmp_path / "model.gguf", "gemma3")
    with pytest.raises(UnsupportedModel, match="'gemma3' is not served"):
        load_model(path, torch.float32)


def test_a_file_cut_off_anywhere_is_refused_in_words(tmp_path: Path) -> None:
    whole = write(small_model("llama"), tmp_path / "model.gguf", "llama").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 11, 23, 60, 400, 1500, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf|can't read"):
            load_model(path, torch.float32)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ModelError, match="is not a GGUF file"):
        load_model(path, torch.float32)


def test_metadata_is_what_the_gguf_package_reads(smollm2: Path) -> None:
    fields = gguf.GGUFReader(str(smollm2)).fields
    mine = GgufFile(smollm2).metadata
    assert mine == {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


def test_the_default_model_is_read_right(smollm2: Path) -> None:
    config = GgufSource(smollm2).config
    assert (config.family, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 30, 9, 3)
    assert (config.vocab_size, config.context_length, config.rope.theta) == (49152, 8192, 100000.0)
