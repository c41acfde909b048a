"""A small model with random weights, for tests of the engine that need a real one but not a good one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig
from tests.engine.engines import Start

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


@pytest.fixture
async def start(tiny_model: Path) -> AsyncIterator[Start]:
    """Start engines that are closed, and whose books are checked, at the end."""
    engines: list[Engine] = []

    async def go(**settings: object) -> Engine:
        fields = {"model": str(tiny_model), "dtype": "float32", "threads": 1, "kv_gb": 0.004, **settings}
        engines.append(await Engine.start(EngineConfig(**fields)))  # type: ignore[arg-type]
        return engines[-1]

    yield go
    for engine in engines:
        await engine.close()
        engine.check()
        stats = engine.stats()
        assert stats.pinned_pages == 0
        assert stats.free_pages + stats.evictable_pages == engine.info.num_pages - 1
