"""A small model with random weights, for tests of the engine that need a real one but not a good one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

VOCAB = 320
CONTEXT = 512


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Llama, 2 layers, GQA 2, context 512, vocabulary 320; weights only."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
