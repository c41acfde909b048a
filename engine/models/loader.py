"""Weights from a Hugging Face folder or a GGUF file into a Decoder.

Tensors are read one layer at a time, converted, fused, prepacked and dropped, so that loading needs
little more memory than the loaded model.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.errors import ModelError, UnsupportedModel
from engine.models import store
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, Layer, TorchDecoder
from engine.models.linear import Arithmetic, Linear, choose_arithmetic, make_linear
from engine.models.sources import FolderSource, GgufSource, Source
from engine.models.store import ModelLocation

logger = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_LINEARS = tuple(f"self_attn.{x}_proj" for x in "qkvo") + tuple(
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
)
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|masked_bias|attn\.bias)$")


def load_model(
    location: ModelLocation | str | Path,
    dtype: torch.dtype,
    *,
    arithmetic: Arithmetic = "auto",
    max_context: int | None = None,
    round_to_bf16: bool = False,
    device: torch.device | str = "cpu",
    build: Callable[..., Decoder] = TorchDecoder,
) -> Decoder:
    """Load a model to run in `dtype` (bfloat16 or float32).

    bfloat16 becomes float32, with a warning, where the machine lacks it. `round_to_bf16` rounds every
    weight to bfloat16 first, so that a float32 decoder has the very weights of a bfloat16 one.
    `max_context` caps the context length. The weights go to `device`, and `build` makes the decoder of them
    (arithmetic "cuda" is for cuda.CudaDecoder, in bfloat16 or float16). Raises ModelError for files that are
    missing, damaged or incomplete, UnsupportedModel for what can't be served rightly.
    """
    started = time.perf_counter()
    if not isinstance(location, ModelLocation):
        location = store.resolve(str(location))
    dtype, arithmetic = choose_arithmetic(dtype, arithmetic)
    source: Source = GgufSource(location.path) if location.kind == "gguf" else FolderSource(location.path)
    config = source.config.capped(max_context)
    with torch.no_grad():
        builder = _Builder(source, config, dtype, arithmetic, round_to_bf16, torch.device(device))
        decoder = builder.build(build)
    logger.info(
        "loaded %s: %s, %d layers, %s, %s arithmetic, context %d, in %.1f s",
        location.name,
        config.family,
        config.num_layers,
        str(dtype).removeprefix("torch."),
        arithmetic,
        config.context_length,
        time.perf_counter() - started,
    )
    return decoder


class _Builder:
    """Turns a source's tensors into prepared weights. Lives during one load."""

    def __init__(
        self,
        source: Source,
        config: ModelConfig,
        dtype: torch.dtype,
        arithmetic: Arithmetic,
        rounded: bool,
        device: torch.device,
    ) -> None:
        self._source = source
        self._config = config
        self._dtype = dtype
        self._arithmetic = arithmetic
        self._device = device
        self._rounded = rounded or dtype is torch.bfloat16
        self._names = source.names()
        self._used: set[str] = set()

    def build(self, make: Callable[..., Decoder]) -> Decoder:
        config = self._config
        embedding = self._tensor(_EMBEDDING, (config.vocab_size, config.hidden_size))
        layers = (self._layer(f"model.layers.{i}.") for i in range(config.num_layers))
        final_norm = self._tensor("model.norm.weight", (config.hidden_size,), torch.float32)
        decoder = make(
            msgspec.structs.replace(config, tied=self._is_tied()),
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            head=self._head(embedding),
            arithmetic=self._arithmetic,
        )
        self._report_unused()
        return decoder

    def _is_tied(self) -> bool:
        """Tied by the config; where it says nothing, tied is a model that brings no head."""
        if self._config.tied is None:
            return _HEAD not in self._names
        return self._config.tied

    def _head(self, embedding: Tensor) -> Linear:
        """The output head in fp32, since logits are fp32 in every mode."""
        if self._is_tied():
            if _HEAD in self._names:
                self._used.add(_HEAD)
                logger.info("the model is tied: its %s is ignored, the embedding is used", _HEAD)
            weight = embedding.float()
        else:
            shape = (self._config.vocab_size, self._config.hidden_size)
            weight = self._tensor(_HEAD, shape, torch.float32)
        return make_linear(weight, None, self._arithmetic)

    def _layer(self, prefix: str) -> Layer[Linear]:
        config = self._config
        hidden, wide = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = ((attention + "q_proj", q), (attention + "k_proj", kv), (attention + "v_proj", kv))
        return Layer(
            attention_norm=self._tensor(prefix + "input_layernorm.weight", (hidden,)),
            qkv=self._linear(qkv, hidden, config.qkv_bias),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            out=self._linear(((attention + "o_proj", hidden),), q, config.out_bias),
            mlp_norm=self._tensor(prefix + "post_attention_layernorm.weight", (hidden,)),
            gate=self._linear(((mlp + "gate_proj", wide),), hidden, False),
            up=self._linear(((mlp + "up_proj", wide),), hidden, False),
            down=self._linear(((mlp + "down_proj", hidden),), wide, False),
        )

    def _qk_norm(self, attention: str) -> Tensor:
        config = self._config
        q = self._tensor(attention + "q_norm.weight", (config.head_dim,))
        k = self._tensor(attention + "k_norm.weight", (config.head_dim,))
        return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))

    def _linear(self, parts: tuple[tuple[str, int], ...], width: int, bias: bool) -> Linear:
        """One linear from weights [rows, width] stacked in order."""
        weights = [self._tensor(name + ".weight", (rows, width)) for name, rows in parts]
        biases = [self._tensor(name + ".bias", (rows,)) for name, rows in parts] if bias else []
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return make_linear(weight, torch.cat(biases) if biases else None, self._arithmetic)

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        if name not in self._names:
            raise ModelError(f"the model's files have no tensor {name}")
        self._used.add(name)
        stored = self._source.read(name)
        if tuple(stored.shape) != shape:
            raise ModelError(f"tensor {name} is {tuple(stored.shape)}, and the config asks for {shape}")
        if stored.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise UnsupportedModel(f"tensor {name} is stored as {stored.dtype}, which is not served")
        if self._rounded:
            stored = stored.to(torch.bfloat16)
        return stored.to(self._device, dtype or self._dtype).contiguous()

    def _report_unused(self) -> None:
        """Weights that nobody used may mean that the model is another one: a bias is refused."""
        unused = sorted(name for name in self._names - self._used if not _BUFFERS.search(name))
        ignored = [name for name in unused if name.removesuffix(".bias").endswith(_LINEARS)]
        if ignored:
            raise ModelError(f"the model's files have a tensor {ignored[0]} that its config does not explain")
        if unused:
            logger.debug("tensors that are not used: %s", ", ".join(unused))
