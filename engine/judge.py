"""What can be said against settings before a model is loaded."""

from __future__ import annotations

from engine import machine
from engine.config import EngineConfig
from engine.errors import ConfigError, KernelUnavailable
from engine.kernels import build
from engine.plan import GateCosts


def judge(config: EngineConfig) -> None:
    """Raise ConfigError for settings that don't go together or with this machine; see Engine.judge."""
    if config.tile % config.page_size:
        raise ConfigError(
            f"HEADWATER_TILE={config.tile} and HEADWATER_PAGE_SIZE={config.page_size} don't go together:"
            " a tile must be whole pages"
        )
    if config.cascade_costs:
        GateCosts.parse(config.cascade_costs)
    if config.executor == "flashinfer":
        _judge_gpu(config)
    elif config.kv_gb * 1e9 > (limit := machine.memory_limit()):
        raise ConfigError(f"HEADWATER_KV_GB={config.kv_gb:g} is more than the memory, {limit / 1e9:.1f} GB")
    if config.executor == "compiled":
        _judge_kernel(config)


def _judge_gpu(config: EngineConfig) -> None:
    if config.dtype == "float32":
        raise ConfigError("HEADWATER_DTYPE=float32 is not served by the flashinfer executor: take bfloat16")
    machine.calm_openmp()
    from engine.attention.flashinfer_library import require_cuda  # torch comes with it

    require_cuda()


def _judge_kernel(config: EngineConfig) -> None:
    try:
        build.find_compiler()
        if config.page_size % 16:
            raise KernelUnavailable(f"pages of {config.page_size} tokens are not a multiple of 16")
    except KernelUnavailable as error:
        raise ConfigError(f"HEADWATER_EXECUTOR=compiled can't be had: {error}") from None
