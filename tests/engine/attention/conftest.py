"""FlashInfer for the tests that run its Python wrappers; they are skipped where it isn't offered."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.flashinfer_package import need_flashinfer


@pytest.fixture(scope="session")
def flashinfer_installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keep what it writes at import out of the home folder."""
    need_flashinfer()
    folder = tmp_path_factory.mktemp("flashinfer")
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(folder)
    return folder
