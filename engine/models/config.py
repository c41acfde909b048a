"""What a decoder must know of a model, read from a Hugging Face config.json or from GGUF metadata.

Everything the decoder does not implement is refused here, by name: a config field that is silently
ignored gives a model that talks nonsense only later.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from engine.errors import ModelError, UnsupportedModel

logger = logging.getLogger(__name__)

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_OPTIONS = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding of a model; positions count in tokens, wavelengths too.

    `original_context` is the context before scaling. `attention_factor` multiplies cos and sin.
    `divisors`, one a frequency, divide the inverse frequencies (longrope's short factors, or the factors
    a GGUF file carries as a tensor).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    divisors: tuple[float, ...] = ()


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and switches of a decoder.

    `context_length` is the longest sequence, in tokens, that is served rightly. `tied`: the embedding is
    the output head, None where the config does not say (then the presence of a head tensor decides).
    `sliding_window` is set only where some layer uses one.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    tied: bool | None
    qkv_bias: bool = False
    qk_norm: bool = False
    out_bias: bool = False
    sliding_window: int | None = None
    rope: RopeConfig = RopeConfig()

    @classmethod
    def from_hf(cls, config_json: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json. Raises UnsupportedModel for what can't be served, ModelError for gaps."""
        try:
            return _from_hf(config_json)
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"the model's config.json is malformed: {error}") from error

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ModelConfig:
        """Read GGUF key-values. Raises UnsupportedModel for what can't be served, ModelError for gaps.

        `qkv_bias`, `qk_norm` and `tied` are not in the metadata: the loader sets them by the tensors.
        """
        try:
            return _from_gguf(metadata)
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"the model's GGUF metadata is malformed: {error}") from error

    def capped(self, max_context: int | None) -> ModelConfig:
        """This config with the context cut to `max_context` (None or 0: as it is), windows checked.

        Raises UnsupportedModel where a sliding window is shorter than the context that remains.
        """
        context = min(self.context_length, max_context) if max_context else self.context_length
        if self.sliding_window is not None and self.sliding_window < context:
            raise UnsupportedModel(
                f"the model uses a sliding window of {self.sliding_window} tokens, shorter than the "
                f"context of {context}; sliding windows are not served: set max_context to at most "
                f"{self.sliding_window}"
            )
        return msgspec.structs.replace(self, context_length=context)


def _from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    outer = raw
    if isinstance(raw.get("text_config"), Mapping):
        raw = {**raw, **raw["text_config"]}
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise UnsupportedModel(f"model_type {family!r} is not served; served are {', '.join(_FAMILIES)}")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {activation!r} is not served; only silu is")
    if raw.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias is not served")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise UnsupportedModel(f"weights quantized with {method!r} are not served from safetensors")
    hidden, heads = _int(raw, "hidden_size"), _int(raw, "num_attention_heads")
    head_dim = int(raw.get("head_dim") or hidden // heads)
    context = int(raw.get("max_position_embeddings") or 2048)
    rope, context = _hf_rope(raw, context)
    tied = raw.get("tie_word_embeddings", outer.get("tie_word_embeddings"))
    bias = family == "qwen2" or bool(raw.get("attention_bias", False))
    return _checked(
        ModelConfig(
            family=str(family),
            vocab_size=_int(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_int(raw, "intermediate_size"),
            num_layers=_int(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            context_length=context,
            tied=None if tied is None else bool(tied),
            qkv_bias=bias,
            qk_norm=family == "qwen3",
            out_bias=family != "qwen2" and bias,
            sliding_window=_hf_window(raw),
            rope=rope,
        )
    )


def _hf_window(raw: Mapping[str, Any]) -> int | None:
    """The sliding window, if any layer uses it."""
    window = raw.get("sliding_window")
    if not window or raw.get("use_sliding_window") is False:
        return None
    layer_types = raw.get("layer_types")
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if layer_types is None and raw.get("model_type") in ("qwen2", "qwen3"):
        # These use windows only where the switch is on, and only from layer max_window_layers on.
        if not raw.get("use_sliding_window"):
            return None
        if int(raw.get("max_window_layers", 0)) >= _int(raw, "num_hidden_layers"):
            return None
    return int(window)


def _hf_rope(raw: Mapping[str, Any], context: int) -> tuple[RopeConfig, int]:
    """RoPE in every spelling in use: `rope_scaling` or `rope_parameters`, `type` or `rope_type`, theta
    inside or beside, original length inside or beside. Returns it with the context that it allows."""
    by_hand, saved = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    scaling: dict[str, Any] = {**saved, **by_hand}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModel("rope parameters that differ between layer types are not served")
    kinds = [source.get(key) for source in (by_hand, saved) for key in ("rope_type", "type")]
    kind = next(filter(None, kinds), "default")
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial is not None and float(partial) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not served; only 1.0 is")
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    original = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    return _rope(kind, float(theta), scaling, int(original or 0), context)


def _rope(
    kind: Any, theta: float, scaling: Mapping[str, Any], original: int, context: int
) -> tuple[RopeConfig, int]:
    """Build and check a RopeConfig. `scaling` uses Hugging Face's key names."""
    if kind not in RopeKind.__args__:  # type: ignore[attr-defined]
        raise UnsupportedModel(
            f"rope type {kind!r} is not served; served are {', '.join(RopeKind.__args__)}"  # type: ignore[attr-defined]
        )
    factor = scaling.get("factor")
    if kind in ("linear", "llama3") and factor is None:
        raise ModelError(f"rope type {kind!r} needs a factor, and the config has none")
    if kind == "yarn" and factor is None and not original:
        raise ModelError("rope type 'yarn' needs a factor or the original context length")
    stated = original
    original = original or context
    if factor is None:
        factor = context / original
    divisors = tuple(float(x) for x in scaling.get("short_factor") or ())
    if kind == "longrope" and not divisors:
        raise ModelError("rope type 'longrope' needs short_factor, and the config has none")
    if kind in ("dynamic", "longrope"):
        # Beyond it the frequencies depend on the sequence's length, and cached keys would be wrong.
        limit = stated if kind == "longrope" and stated else original
        if limit < context or kind == "dynamic":
            logger.warning(
                "rope type %s is served up to the original context only: %d tokens", kind, min(limit, context)
            )
        context = min(limit, context)
    elif stated and kind in ("linear", "yarn"):
        # Many configs switch these on beside a max_position_embeddings that still is the original one.
        context = max(context, int(stated * factor))
    optional = {key: float(scaling[key]) for key in _ROPE_OPTIONS if scaling.get(key) is not None}
    rope = RopeConfig(
        kind=kind,
        theta=theta,
        factor=float(factor),
        original_context=original,
        truncate=bool(scaling.get("truncate", True)),
        divisors=divisors,
        **optional,
    )
    return rope, context


def _from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    family = meta.get("general.architecture")
    if family not in _FAMILIES:
        raise UnsupportedModel(
            f"GGUF architecture {family!r} is not served; served are {', '.join(_FAMILIES)}"
        )
    if meta.get(f"{family}.expert_count"):
        raise UnsupportedModel("mixture-of-experts models are not served")
    own = {key.removeprefix(f"{family}."): value for key, value in meta.items()}
    hidden, heads = _int(own, "embedding_length"), _int(own, "attention.head_count")
    head_dim = int(own.get("attention.key_length") or hidden // heads)
    if int(own.get("attention.value_length") or head_dim) != head_dim:
        raise UnsupportedModel("key and value heads of different sizes are not served")
    if int(own.get("rope.dimension_count") or head_dim) != head_dim:
        raise UnsupportedModel("rotary embedding over part of a head is not served")
    context = _int(own, "context_length")
    rope, context = _gguf_rope(own, context)
    tokens = meta.get("tokenizer.ggml.tokens")
    return _checked(
        ModelConfig(
            family=str(family),
            vocab_size=int(own.get("vocab_size") or (len(tokens) if tokens is not None else 0)),
            hidden_size=hidden,
            intermediate_size=_int(own, "feed_forward_length"),
            num_layers=_int(own, "block_count"),
            num_heads=heads,
            num_kv_heads=int(own.get("attention.head_count_kv") or heads),
            head_dim=head_dim,
            rms_norm_eps=float(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
            context_length=context,
            tied=None,
            qk_norm=family == "qwen3",
            sliding_window=int(own.get("attention.sliding_window") or 0) or None,
            rope=rope,
        )
    )


def _gguf_rope(own: Mapping[str, Any], context: int) -> tuple[RopeConfig, int]:
    found = {key.removeprefix("rope.scaling."): value for key, value in own.items()}
    kind = found.get("type") or ("linear" if own.get("rope.scale_linear") else "default")
    if kind == "longrope" or found.get("yarn_log_multiplier"):
        raise UnsupportedModel("longrope, and yarn with a log multiplier, are not served from GGUF")
    scaling = {
        "factor": found.get("factor") or own.get("rope.scale_linear"),
        "beta_fast": found.get("yarn_beta_fast"),
        "beta_slow": found.get("yarn_beta_slow"),
    }
    share = float(found.get("yarn_attn_factor") or found.get("attn_factor") or 1.0)
    if kind == "yarn" and share != 1.0:
        # GGUF's factor multiplies the paper's; Hugging Face's replaces it.
        scaling["attention_factor"] = share * (0.1 * math.log(float(scaling["factor"] or 1.0)) + 1.0)
    kind = "default" if kind == "none" else kind
    original = int(found.get("original_context_length") or 0)
    return _rope(kind, float(own.get("rope.freq_base") or 10000.0), scaling, original, context)


def _int(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value <= 0:
        raise ModelError(f"the model's config has no usable {key}: {value!r}")
    return int(value)


def _checked(config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{config.num_heads} query heads can't share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise UnsupportedModel(f"rotary embedding needs an even head size, not {config.head_dim}")
    if config.rope.divisors and len(config.rope.divisors) != config.head_dim // 2:
        raise ModelError(
            f"rope has {len(config.rope.divisors)} factors for {config.head_dim // 2} frequencies"
        )
    return config
