"""What tests of several parts share."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import machine
from engine.models import store

machine.calm_openmp()  # before any test imports torch


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, fetched when it is missing."""
    return store.fetch(store.DEFAULT_MODEL).path
