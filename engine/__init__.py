"""Headwater's engine: token ids in, deltas out. What a server needs is exported here, lazily (PEP 562), so
that importing a part without torch imports no torch.

    engine = await Engine.start(EngineConfig())
    request = EngineRequest(request_id="1", prompt=ids, params=SamplingParams(max_tokens=8))
    async for delta in engine.submit(request):
        ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.errors import (
        ConfigError,
        ConstraintFailed,
        ContextLengthExceeded,
        EngineUnavailable,
        HeadwaterError,
        ModelError,
        Overloaded,
        RequestError,
        StepFailed,
        UnsupportedModel,
    )
    from engine.stream import RequestStream
    from engine.text import TextCodec
    from engine.types import (
        CacheReceipt,
        Constraint,
        Delta,
        EngineInfo,
        EngineRequest,
        EngineStats,
        FinishReason,
        Namespace,
        SamplingParams,
        TokenLogprob,
    )

_HOMES = {
    "Engine": "engine.engine",
    "RequestStream": "engine.stream",
    "EngineConfig": "engine.config",
    "TextCodec": "engine.text",
    "ConfigError": "engine.errors",
    "ConstraintFailed": "engine.errors",
    "ContextLengthExceeded": "engine.errors",
    "EngineUnavailable": "engine.errors",
    "HeadwaterError": "engine.errors",
    "ModelError": "engine.errors",
    "Overloaded": "engine.errors",
    "RequestError": "engine.errors",
    "StepFailed": "engine.errors",
    "UnsupportedModel": "engine.errors",
    "CacheReceipt": "engine.types",
    "Constraint": "engine.types",
    "Delta": "engine.types",
    "EngineInfo": "engine.types",
    "EngineRequest": "engine.types",
    "EngineStats": "engine.types",
    "FinishReason": "engine.types",
    "Namespace": "engine.types",
    "SamplingParams": "engine.types",
    "TokenLogprob": "engine.types",
}

__all__ = [
    "CacheReceipt",
    "ConfigError",
    "Constraint",
    "ConstraintFailed",
    "ContextLengthExceeded",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineInfo",
    "EngineRequest",
    "EngineStats",
    "EngineUnavailable",
    "FinishReason",
    "HeadwaterError",
    "ModelError",
    "Namespace",
    "Overloaded",
    "RequestError",
    "RequestStream",
    "SamplingParams",
    "StepFailed",
    "TextCodec",
    "TokenLogprob",
    "UnsupportedModel",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'engine' has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
