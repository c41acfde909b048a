"""FlashInfer for the tests that run its Python wrappers; they are skipped where it can't be installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def flashinfer_installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Skip where the package is not here; else keep what it writes at import out of the home folder."""
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed: the set-up script has said why")
    folder = tmp_path_factory.mktemp("flashinfer")
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(folder)
    return folder
