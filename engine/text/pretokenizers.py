"""How byte-level BPE models cut text into words before merging, by the name that GGUF files give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from engine.errors import UnsupportedModel

# Kinds whose tokenizer takes a whole word that is in the vocabulary without looking at the merges.
IGNORE_MERGES = frozenset({"llama-bpe", "llama-v3", "llama3", "tekken"})
# Kinds that put BOS in front of raw text where the file doesn't say.
STARTS_WITH_BOS = IGNORE_MERGES

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}|{_PUNCTUATION}[\r\n]*|{_TAIL}"
_TEKKEN = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}|{_PUNCTUATION}[\r\n/]*|{_TAIL}"
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_PUNCTUATION}|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def pre_tokenizer(name: str, model: str) -> Any:
    """Return the pre-tokenizer of the named kind. Raises UnsupportedModel for a name not known here."""
    if name not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise UnsupportedModel(
            f"{model}: pre-tokenizer {name!r} is not known, and guessing would tokenize wrongly "
            f"without a sign of it; known are {known}"
        )
    return _KINDS[name]()


def normalizer(name: str) -> Any | None:
    """Return the Unicode normalization of the named kind, or None."""
    return normalizers.NFC() if name == "qwen2" else None


def _splits(*patterns: str) -> Any:
    steps: list[Any] = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns]
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    # Every digit is a token of its own: forget it and numbers tokenize as the model never saw them.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_KINDS: dict[str, Callable[[], Any]] = {
    "default": lambda: _splits(*_DEFAULT),
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _splits(_LLAMA3),
    "llama-v3": lambda: _splits(_LLAMA3),
    "llama3": lambda: _splits(_LLAMA3),
    "qwen2": lambda: _splits(_QWEN2),
    "tekken": lambda: _splits(_TEKKEN),
}
