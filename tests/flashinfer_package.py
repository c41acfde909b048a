"""Whether FlashInfer's Python wrappers are here, for the tests that run them on the CPU."""

from __future__ import annotations

import importlib.util
import platform
import sys

import pytest


def need_flashinfer() -> None:
    """Skip where the package isn't offered; fail where it is and the set-up script could not install it."""
    if importlib.util.find_spec("flashinfer") is not None:
        return
    if sys.platform == "linux" and platform.machine() == "x86_64":
        pytest.fail("flashinfer is not installed: the set-up script has said why", pytrace=False)
    pytest.skip("flashinfer is not offered for this system")
