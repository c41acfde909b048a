"""The reference executor against an independent implementation of the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from check_bits_lab import Case, Session

from engine.config import EngineConfig
from engine.runner import Runner
from engine.text import TextCodec
from engine.types import SamplingParams
from tests.engine.models.models_oracle import rounded_to_bf16
from tests.engine.models.smollm2_oracle import smollm2_oracle

TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three primary colours are",
    "Q: What is 12 times 12?\nA:",
    "Dear Sir or Madam,\n",
    "List of planets:\n1. Mercury\n2.",
    "In 1969, the first man",
    "import numpy as np\n\n",
    "To make a good soup, you first",
    "SELECT name FROM users WHERE",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "Roses are red,",
    "A cat and a dog",
    "The Pythagorean theorem states that",
    "Monday, Tuesday,",
    "<html>\n<head>\n",
    "It was a dark and stormy night;",
]


@pytest.fixture(scope="module")
def runner(smollm2: Path) -> Runner:
    return Runner.load(EngineConfig(model=str(smollm2), executor="reference", dtype="bfloat16", kv_gb=0.2))


def test_greedy_output_equals_transformers(runner: Runner, smollm2: Path) -> None:
    """20 prompts, 64 tokens each: id for id as transformers in fp32, from the same bf16-rounded weights."""
    codec = TextCodec.load(smollm2)
    prompts = [tuple(codec.encode(text)) for text in PROMPTS]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    session = Session(runner, 256, max_running=len(prompts))
    ours = [output.ids for output in session.run([Case(p, params) for p in prompts])]
    oracle = rounded_to_bf16(smollm2_oracle(smollm2))
    for prompt, got in zip(prompts, ours, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + got])).logits[0]
        # Greedy by induction: each token is the likeliest one after those before it.
        assert got == tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()), codec.decode(prompt)
