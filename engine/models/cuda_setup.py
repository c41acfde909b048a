"""What a start on an NVIDIA GPU does differently: loading, KV memory, graphs, and what to tell the user."""

from __future__ import annotations

from functools import partial

import torch

from engine.attention.base import KvShape
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.flashinfer_graph import GraphLimits
from engine.attention.flashinfer_library import load_flashinfer
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.cuda import Capture, CudaDecoder
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.models.store import ModelLocation

TOLERANCE_NOTE = (
    "on CUDA, results are equal within a tolerance only, whatever runs beside a row:"
    " HEADWATER_DETERMINISTIC=1 gives equal bits, and is slower"
)
# Of the memory that is free once the weights are loaded: workspaces and activations take the rest.
_KV_SHARE = 0.85
_MOST_CAPTURED_ROWS = 256
# 16 MiB a level: 128 flat sequences of half a million tokens, in pages of 16.
_MOST_INDICES = 4 << 20


def load_cuda_decoder(
    config: EngineConfig, location: ModelLocation, device: str = "cuda", capture: Capture | None = None
) -> Decoder:
    """Load a model in bfloat16 to the GPU; see CudaDecoder for `capture`. ConfigError for another dtype."""
    if config.dtype == "float32":
        raise ConfigError("HEADWATER_DTYPE=float32 is not served by the flashinfer executor: take bfloat16")
    return load_model(
        location,
        torch.bfloat16,
        arithmetic="cuda",
        max_context=config.max_context or None,
        device=device,
        build=partial(CudaDecoder, deterministic=config.deterministic, capture=capture),
    )


def make_cuda_attention(
    config: EngineConfig, shape: KvShape, dtype: torch.dtype, device: str = "cuda"
) -> FlashInferAttention:
    """KV memory and attention on the GPU; decode steps of all sequences that may run fit a graph."""
    rows = min(config.max_running, _MOST_CAPTURED_ROWS)
    return FlashInferAttention(
        shape,
        dtype,
        device=device,
        deterministic=config.deterministic,
        graphs=GraphLimits(rows, indices=min(rows * shape.num_pages, _MOST_INDICES)),
        tile=config.tile,
    )


def gpu_memory() -> tuple[float, float]:
    """(bytes of the GPU, bytes that KV may take now)."""
    free, total = torch.cuda.mem_get_info()
    return float(total), free * _KV_SHARE


def gpu_fingerprint() -> tuple[str, ...]:
    """What decides bits on a GPU, beside what the settings say."""
    return (
        torch.cuda.get_device_name(),
        str(torch.cuda.get_device_capability()),
        f"cuda {torch.version.cuda}",
        f"flashinfer {load_flashinfer().__version__}",
    )
