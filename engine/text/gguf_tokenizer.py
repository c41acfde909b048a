"""Builds a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from engine.errors import ModelError, UnsupportedModel
from engine.gguf_header import read_metadata
from engine.text.parts import DEFAULT_TEMPLATE, TokenizerParts
from engine.text.pretokenizers import IGNORE_MERGES, STARTS_WITH_BOS, normalizer, pre_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_KEY = "tokenizer.ggml."
_SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


def load_gguf(path: Path) -> TokenizerParts:
    """Read the tokenizer, its chat templates and its end tokens from a GGUF file.

    Where the file has no add_bos_token flag the documented defaults hold: SentencePiece models and the
    byte-level ones of the Llama 3 and Tekken kind start with BOS, the others don't. add_eos_token is
    false by default. Raises UnsupportedModel for a tokenizer kind not known here.
    """
    meta = read_metadata(path)
    if f"{_KEY}tokens" not in meta:
        raise ModelError(f"{path.name} holds no tokenizer ({_KEY}tokens is missing)")
    tokens: list[str] = meta[f"{_KEY}tokens"]
    types: list[int] = meta.get(f"{_KEY}token_type") or [_NORMAL] * len(tokens)
    kind = meta.get(f"{_KEY}model")
    if kind == "gpt2":
        pre = meta.get(f"{_KEY}pre", "default")
        tokenizer = _byte_level(path, tokens, meta.get(f"{_KEY}merges"), pre)
        starts_with_bos = pre in STARTS_WITH_BOS
    elif kind == "llama":
        meta = {f"{_KEY}bos_token_id": 1, f"{_KEY}eos_token_id": 2, f"{_KEY}unknown_token_id": 0} | meta
        tokenizer = _sentencepiece(tokens, types, meta)
        starts_with_bos = True
    else:
        raise UnsupportedModel(
            f"{path.name}: tokenizer model {kind!r} is not served, only gpt2 and llama are"
        )
    _add_tokens(tokenizer, tokens, types)
    bos, eos = _token_id(meta, "bos", tokens), _token_id(meta, "eos", tokens)
    ends = [_token_id(meta, name, tokens) for name in ("eos", "eot", "eom")]
    add_bos = meta.get(f"{_KEY}add_bos_token", starts_with_bos)
    add_eos = meta.get(f"{_KEY}add_eos_token", False)
    return TokenizerParts(
        tokenizer=tokenizer,
        vocab_size=len(tokens),
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        prefix=(bos,) if add_bos and bos is not None else (),
        suffix=(eos,) if add_eos and eos is not None else (),
        templates=_templates(meta),
        template_tokens=_named_tokens(meta, tokens),
        generation_defaults={
            name: meta[f"general.sampling.{key}"]
            for key, name in _SAMPLING.items()
            if f"general.sampling.{key}" in meta
        },
    )


def _byte_level(path: Path, tokens: Sequence[str], merges: Sequence[str] | None, pre: str) -> Tokenizer:
    if merges is None:
        raise ModelError(f"{path.name} holds no BPE merges ({_KEY}merges is missing)")
    # Never more than one space in a merge: the byte-level alphabet writes a space as another character.
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=pairs,
        ignore_merges=pre in IGNORE_MERGES,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer(pre, path.name)
    if (form := normalizer(pre)) is not None:
        tokenizer.normalizer = form
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: Sequence[str], types: Sequence[int], meta: dict[str, Any]) -> Tokenizer:
    scores: list[float] = meta.get(f"{_KEY}scores") or [-float(i) for i in range(len(tokens))]
    unknown = _token_id(meta, "unknown", tokens)
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=_merges_by_score(tokens, types, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefixed = meta.get(f"{_KEY}add_space_prefix", True)
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefixed else normalizers.Sequence([space])
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _merges_by_score(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to make a piece out of two pieces, likeliest piece first.

    SentencePiece merges the neighbours whose union scores best; a rank per pair says the same. Control,
    byte and user-defined pieces take no part: text must never merge into them.
    """
    ids = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL}
    ranked = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], i, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _token_id(meta: dict[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    found = meta.get(f"{_KEY}{name}_token_id")
    return found if isinstance(found, int) and 0 <= found < len(tokens) else None


def _named_tokens(meta: dict[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {name: _token_id(meta, key, tokens) for key, name in names.items()}
    return {name: tokens[i] for name, i in found.items() if i is not None}


def _templates(meta: dict[str, Any]) -> dict[str, str]:
    start = "tokenizer.chat_template"
    found = {key[len(start) + 1 :]: text for key, text in meta.items() if key.startswith(f"{start}.")}
    if start in meta:
        found[DEFAULT_TEMPLATE] = meta[start]
    return found
