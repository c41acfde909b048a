"""The oracle of the model tests: small random models of transformers, and a naive causal attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.decoder import Decoder

VOCAB = 160
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def small_model(family: str, **changes: Any) -> Any:
    """A transformers model of that family, every weight random, biases and norms too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.4 * parameter.shape[1] ** -0.5)
    return model


def rounded_to_bf16(model: Any) -> Any:
    """The model with its weights rounded, in place. (`.to(bfloat16)` would round rope's buffer as well.)"""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def save(model: Any, folder: Path, *, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """Save a model; `changes` then replace fields of its config.json, None removing them."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if changes:
        path = folder / "config.json"
        raw = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return folder


def tokens(count: int, vocab: int = VOCAB) -> Tensor:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(7))


class Causal:
    """Attention of one sequence whose row r stands at position r, in fp32, written out."""

    def attend(self, _layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, head_dim = q.shape
        group = heads // k.shape[1]
        keys, values = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
        scores = torch.einsum("rhd,shd->hrs", q.float(), keys) * head_dim**-0.5
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hrs,shd->rhd", weights, values).reshape(rows, -1).to(q.dtype)


def ours(decoder: Decoder, ids: Tensor) -> Tensor:
    """fp32 logits [n, vocab] of one sequence."""
    count = len(ids)
    padding = decoder.padded_rows(count) - count
    padded = torch.cat((ids, ids.new_zeros(padding)))
    positions = torch.cat((torch.arange(count), ids.new_zeros(padding)))
    return decoder.logits(decoder.forward(padded, positions, Causal())[:count])  # type: ignore[arg-type]


def theirs(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids[None]).logits[0].float()
    return logits


def assert_same(mine: Tensor, reference: Tensor, tolerance: float = 1e-4) -> None:
    assert reference.std() > 0.1, "logits this flat would agree whatever the model"
    torch.testing.assert_close(mine, reference, atol=tolerance, rtol=1e-4)
