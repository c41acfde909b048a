"""Tokenizers for the tests of engine.text: the real model's, and small ones made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from text_tokenizers import BYTE_CHARS
from tokenizers import Tokenizer

from engine.text import TextCodec


@pytest.fixture(scope="session")
def codec(smollm2: Path) -> TextCodec:
    return TextCodec.load(smollm2)


@pytest.fixture
def gguf_codec(tmp_path: Path) -> Callable[..., TextCodec]:
    """Make a codec from a GGUF file with a small vocabulary and the given metadata.

    `tokens` are (text, token type) or (text, token type, score). Byte tokens come first, so that any
    text can be written.
    """

    def make(
        tokens: list[tuple[Any, ...]], *, model: str, merges: list[str] | None = None, **meta: Any
    ) -> TextCodec:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_tokenizer_model(model)
        if model == "gpt2":
            alphabet: list[tuple[Any, ...]] = [(token, 1) for token in [*sorted(BYTE_CHARS), "qx"]]
            writer.add_token_merges([*(merges or ()), "q x"])
        else:
            alphabet = [(f"<0x{byte:02X}>", 6) for byte in range(256)]
        everything = [*tokens, *alphabet]
        writer.add_token_list([token[0] for token in everything])
        writer.add_token_types([token[1] for token in everything])
        writer.add_token_scores([float(token[2]) if len(token) > 2 else 0.0 for token in everything])
        for key, value in meta.items():
            _add(writer, "tokenizer.chat_template" if key == "template" else f"tokenizer.ggml.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return TextCodec.load(path)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder in Hugging Face's layout around a tokenizer and return its path."""

    def make(tokenizer: Tokenizer, **files: Any) -> Path:
        path = tmp_path / f"folder{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        tokenizer.save(str(path / "tokenizer.json"))
        for name, content in files.items():
            if name == "chat_template":
                (path / "chat_template.jinja").write_text(content, encoding="utf-8")
            else:
                (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return path

    return make


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_string(key, value)
