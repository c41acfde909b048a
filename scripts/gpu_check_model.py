"""A small model with random weights, written as a Hugging Face folder: for checks that need no good one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 512


def write_model(folder: Path, *, head_dim: int = 64, qk_norm: bool = True, layers: int = 2) -> Path:
    """Write a Qwen3 (with norms of queries and keys) or a Llama model, 4 query heads to 2 KV heads."""
    heads, kv_heads, hidden, wide = 4, 2, 256, 512
    config = {
        "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if qk_norm else "llama",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(11)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=random) * columns**-0.5).bfloat16()

    def norm(size: int) -> Tensor:
        return (1 + 0.1 * torch.randn(size, generator=random)).bfloat16()

    weights = {"model.embed_tokens.weight": matrix(VOCAB, hidden) * 8, "model.norm.weight": norm(hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        attention, mlp = at + "self_attn.", at + "mlp."
        weights |= {
            at + "input_layernorm.weight": norm(hidden),
            at + "post_attention_layernorm.weight": norm(hidden),
            attention + "q_proj.weight": matrix(heads * head_dim, hidden),
            attention + "k_proj.weight": matrix(kv_heads * head_dim, hidden),
            attention + "v_proj.weight": matrix(kv_heads * head_dim, hidden),
            attention + "o_proj.weight": matrix(hidden, heads * head_dim),
            mlp + "gate_proj.weight": matrix(wide, hidden),
            mlp + "up_proj.weight": matrix(wide, hidden),
            mlp + "down_proj.weight": matrix(hidden, wide),
        }
        if qk_norm:
            weights |= {
                attention + "q_norm.weight": norm(head_dim),
                attention + "k_norm.weight": norm(head_dim),
            }
    save_file(weights, folder / "model.safetensors")
    return folder
