"""Whether the compiled kernel can be had here. Where it can, one that can't be built is a failure."""

from __future__ import annotations

import pytest

from engine import machine
from engine.errors import KernelUnavailable
from engine.kernels.build import find_compiler


def has_kernel() -> bool:
    """A CPU that the kernel is written for, and a compiler."""
    try:
        find_compiler()
    except KernelUnavailable:
        return False
    return "avx2" in machine.cpu_features()


needs_kernel = pytest.mark.skipif(not has_kernel(), reason="no C++ compiler here, or no AVX2")
