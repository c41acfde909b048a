"""The one door to FlashInfer: loaded when it is asked for, never before, and refused in plain words."""

from __future__ import annotations

from typing import Any

import torch

from engine.errors import ConfigError

# Versions whose signatures, index types and empty states this code was written for.
OLDEST = (0, 6, 18)


def load_flashinfer() -> Any:
    """The package `flashinfer`. ConfigError where it is missing, too old or does not load."""
    try:
        import flashinfer
    except ImportError as error:
        raise ConfigError(
            "HEADWATER_EXECUTOR=flashinfer needs FlashInfer, which does not load here"
            f" ({error}): install headwater[cuda]"
        ) from error
    version = str(flashinfer.__version__)
    if release(version) < OLDEST:
        raise ConfigError(
            f"HEADWATER_EXECUTOR=flashinfer needs FlashInfer {'.'.join(map(str, OLDEST))} or newer, and"
            f" {version} is installed: install headwater[cuda]"
        )
    return flashinfer


def require_cuda() -> None:
    """ConfigError where torch sees no NVIDIA GPU, or the package is missing."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "HEADWATER_EXECUTOR=flashinfer needs an NVIDIA GPU and a CUDA build of torch, and torch"
            f" {torch.__version__} sees none: take cpu"
        )
    load_flashinfer()


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 0.6.18.post1 gives (0, 6, 18)."""
    numbers: list[int] = []
    for part in version.split(".")[:3]:
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
