"""Reads a tokenizer and what belongs to it from a folder in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from engine.errors import ModelError, UnsupportedModel
from engine.text.parts import DEFAULT_TEMPLATE, TokenizerParts

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")


def load_folder(path: Path) -> TokenizerParts:
    """Read tokenizer.json and its companions; all but tokenizer.json may be missing.

    Raises ModelError for a missing or damaged file.
    """
    if not (path / "tokenizer.json").is_file():
        raise UnsupportedModel(f"{path} has no tokenizer.json; other tokenizer files are not served")
    settings = _json(path / "special_tokens_map.json") | _json(path / "tokenizer_config.json")
    config = _json(path / "config.json")
    generation = _json(path / "generation_config.json")
    tokenizer = _tokenizer(path / "tokenizer.json", settings)
    named = {name: text for name in _NAMED if (text := _content(settings.get(name))) is not None}
    bos, eos = _id(tokenizer, named.get("bos_token")), _id(tokenizer, named.get("eos_token"))
    if bos is None and isinstance(config.get("bos_token_id"), int):
        bos = config["bos_token_id"]
    prefix, suffix = _affixes(tokenizer)
    ends = [eos, *_ids(generation), *_ids(config), *_ids(config.get("text_config") or {})]
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return TokenizerParts(
        tokenizer=tokenizer,
        vocab_size=size,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        prefix=prefix,
        suffix=suffix,
        templates=_templates(path, settings),
        template_tokens=named,
        generation_defaults={k: generation[k] for k in _DEFAULTS if _is_number(generation.get(k))},
    )


def _tokenizer(path: Path, settings: dict[str, Any]) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"{path} can't be read: {error}") from None
    # A folder may have been saved with the training run's truncation and padding.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    declared = settings.get("added_tokens_decoder") or {}
    for key in sorted(declared, key=int):
        token = _added(declared[key])
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != int(key):
            raise ModelError(f"{path.parent}: tokenizer files disagree about the id of {token.content!r}")
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    names = (_content(token) for token in [*(settings.get(name) for name in _NAMED), *extra])
    tokenizer.add_special_tokens([n for n in names if n and tokenizer.token_to_id(n) is not None])
    return tokenizer


def _added(fields: dict[str, Any]) -> AddedToken:
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return AddedToken(fields["content"], **{f: bool(fields[f]) for f in flags if f in fields})


def _affixes(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts around raw text.

    add_bos_token and add_eos_token of tokenizer_config.json don't count beside a tokenizer.json: they
    are meant for tokenizers without one.
    """
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


def _templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for declared in (settings.get("chat_template"), _json(path / "chat_template.json").get("chat_template")):
        if isinstance(declared, str):
            found[DEFAULT_TEMPLATE] = declared
        elif isinstance(declared, list):
            found |= {entry["name"]: entry["template"] for entry in declared}
        elif isinstance(declared, dict):
            found |= declared
    if (path / "chat_template.jinja").is_file():
        found[DEFAULT_TEMPLATE] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    return found


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} should hold a JSON object")
    return found


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _id(tokenizer: Tokenizer, token: str | None) -> int | None:
    return None if token is None else tokenizer.token_to_id(token)


def _ids(config: dict[str, Any]) -> Iterable[int]:
    found = config.get("eos_token_id")
    return [i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
