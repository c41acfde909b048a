"""What tests of several parts share."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

from engine import machine
from engine.models import store

machine.calm_openmp()  # before any test imports torch

# In CI a change must pass or fail for what it is, so examples are fixed; elsewhere each run draws new ones.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, fetched when it is missing."""
    return store.fetch(store.DEFAULT_MODEL).path
