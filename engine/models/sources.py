"""The two ways a model's weights are stored, behind one protocol with Hugging Face's tensor names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch import Tensor

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.gguf import GgufFile


class Source(Protocol):
    """Tensors by their Hugging Face name, in whatever dtype they are stored."""

    config: ModelConfig

    def names(self) -> set[str]:
        """Every tensor there is."""

    def read(self, name: str) -> Tensor:
        """One tensor; the name is one of `names()`."""


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
