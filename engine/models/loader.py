"""Weights from a Hugging Face folder or a GGUF file into a Decoder.

Tensors are read one layer at a time, converted, fused, prepacked and dropped, so that loading needs
little more memory than the loaded model.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models import store
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, Layer
from engine.models.gguf import GgufFile
from engine.models.linear import Arithmetic, Linear, choose_arithmetic, make_linear
from engine.models.store import ModelLocation

logger = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_LINEARS = tuple(f"self_attn.{x}_proj" for x in "qkvo") + tuple(
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
)
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|masked_bias|attn\.bias)$")


class Source(Protocol):
    """Tensors by their Hugging Face name, in whatever dtype they are stored."""

    config: ModelConfig

    def names(self) -> set[str]:
        """Every tensor there is."""

    def read(self, name: str) -> Tensor:
        """One tensor; the name is one of `names()`."""


def load_model(
    location: ModelLocation | str | Path,
    dtype: torch.dtype,
    *,
    arithmetic: Arithmetic = "auto",
    max_context: int | None = None,
    round_to_bf16: bool = False,
) -> Decoder:
    """Load a model to run in `dtype` (bfloat16 or float32).

    bfloat16 becomes float32, with a warning, where the machine lacks it. `round_to_bf16` rounds every
    weight to bfloat16 first, so that a float32 decoder has the very weights of a bfloat16 one.
    `max_context` caps the context length. Raises ModelError for files that are missing, damaged or
    incomplete, UnsupportedModel for what can't be served rightly.
    """
    started = time.perf_counter()
    if not isinstance(location, ModelLocation):
        location = store.resolve(str(location))
    dtype, arithmetic = choose_arithmetic(dtype, arithmetic)
    source: Source = GgufSource(location.path) if location.kind == "gguf" else FolderSource(location.path)
    config = source.config.capped(max_context)
    with torch.inference_mode():
        decoder = _Builder(source, config, dtype, arithmetic, round_to_bf16).build()
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
        self, source: Source, config: ModelConfig, dtype: torch.dtype, arithmetic: Arithmetic, rounded: bool
    ) -> None:
        self._source = source
        self._config = config
        self._dtype = dtype
        self._arithmetic = arithmetic
        self._rounded = rounded
        self._names = source.names()
        self._used: set[str] = set()

    def build(self) -> Decoder:
        config = self._config
        embedding = self._tensor(_EMBEDDING, (config.vocab_size, config.hidden_size))
        layers = [self._layer(f"model.layers.{i}.") for i in range(config.num_layers)]
        final_norm = self._tensor("model.norm.weight", (config.hidden_size,), torch.float32)
        decoder = Decoder(
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
            weight = self._tensor(_HEAD, shape, torch.float32, rounded=self._dtype is torch.bfloat16)
        return make_linear(weight, None, self._arithmetic)

    def _layer(self, prefix: str) -> Layer:
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

    def _tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None, *, rounded: bool = False
    ) -> Tensor:
        if name not in self._names:
            raise ModelError(f"the model's files have no tensor {name}")
        self._used.add(name)
        stored = self._source.read(name)
        if tuple(stored.shape) != shape:
            raise ModelError(f"tensor {name} is {tuple(stored.shape)}, and the config asks for {shape}")
        if self._rounded or rounded:
            stored = stored.to(torch.bfloat16)
        return stored.to(dtype or self._dtype).contiguous()

    def _report_unused(self) -> None:
        """Weights that nobody used may mean that the model is another one: a bias is refused."""
        unused = sorted(name for name in self._names - self._used if not _BUFFERS.search(name))
        ignored = [name for name in unused if name.removesuffix(".bias").endswith(_LINEARS)]
        if ignored:
            raise ModelError(f"the model's files have a tensor {ignored[0]} that its config does not explain")
        if unused:
            logger.debug("tensors that are not used: %s", ", ".join(unused))


class FolderSource:
    """A Hugging Face folder: config.json and one or several .safetensors files."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"can't read {folder / 'config.json'}: {error}") from error
        self.config = ModelConfig.from_hf(raw)
        self._readers: dict[str, Callable[[str], Tensor]] = {}
        for path in _weight_files(folder):
            try:
                handle = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"can't read {path}: {error}") from error
            names = handle.keys()  # type: ignore[no-untyped-call]
            self._readers.update(dict.fromkeys(names, handle.get_tensor))

    def names(self) -> set[str]:
        return set(self._readers)

    def read(self, name: str) -> Tensor:
        return self._readers[name](name)


def _weight_files(folder: Path) -> list[Path]:
    """The shards that the index names, or the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"can't read {index}: {error!r}") from error
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {', '.join(missing)}, named by {index.name}")
        return [folder / name for name in named]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_ROPE_FACTORS = "rope_freqs.weight"


class GgufSource:
    """A GGUF file, under Hugging Face's tensor names and with its order of rotary dimensions."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._stored = {_hf_name(name): name for name in self._file.tensors}
        self.config = self._with_tensors(ModelConfig.from_gguf(self._file.metadata))

    def names(self) -> set[str]:
        return set(self._stored) - {_ROPE_FACTORS}

    def read(self, name: str) -> Tensor:
        tensor = self._file.tensor(self._stored[name])
        if self.config.family in ("llama", "mistral"):
            if ".q_proj." in name:
                return _halves_from_pairs(tensor, self.config.num_heads)
            if ".k_proj." in name:
                return _halves_from_pairs(tensor, self.config.num_kv_heads)
        return tensor

    def _with_tensors(self, config: ModelConfig) -> ModelConfig:
        """What the metadata leaves open and the tensors decide."""
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError("the model's files have no tensor token_embd.weight")
        rope = config.rope
        if _ROPE_FACTORS in self._file.tensors:
            divisors = self._file.tensor(_ROPE_FACTORS).tolist()
            if len(divisors) != config.head_dim // 2:
                raise ModelError(f"tensor {_ROPE_FACTORS} has {len(divisors)} values")
            rope = msgspec.structs.replace(rope, divisors=tuple(divisors))
        return msgspec.structs.replace(
            config,
            vocab_size=embedding.shape[0],
            qkv_bias="blk.0.attn_q.bias" in self._file.tensors,
            out_bias="blk.0.attn_output.bias" in self._file.tensors,
            rope=rope,
        )


def _hf_name(name: str) -> str:
    block = _GGUF_BLOCK.fullmatch(name)
    prefix, own = (f"model.layers.{block[1]}.", block[2]) if block else ("", name)
    stem, dot, suffix = own.rpartition(".")
    return prefix + _GGUF_NAMES[stem] + dot + suffix if stem in _GGUF_NAMES else name


def _halves_from_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Undo the GGUF order of llama's rotary rows: pairs (2i, 2i+1) become halves (i, i + D/2).

    `tensor` is [heads * head_dim, ...]: a weight or a bias.
    """
    shape = tensor.shape
    return tensor.reshape(heads, -1, 2, *shape[1:]).transpose(1, 2).reshape(shape)
