"""The default model in transformers, its weights read and expanded by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def smollm2_oracle(path: Path) -> Any:
    """LlamaForCausalLM in fp32, ready to run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    weights: dict[str, Tensor] = {}
    for tensor in gguf.GGUFReader(str(path)).tensors:
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        _, block, part, _ = f".{tensor.name}".rsplit(".", 3) if "blk." in tensor.name else ("", "", "", "")
        if part in ("attn_q", "attn_k"):
            # The file shuffles the two halves of each head's rotary rows into pairs.
            weight = torch.cat([head[half::2] for head in weight.split(64) for half in (0, 1)])
        name = f"model.layers.{block}.{NAMES[part]}" if block else TOP[tensor.name.removesuffix(".weight")]
        weights[f"{name}.weight"] = weight
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model
