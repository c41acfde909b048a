"""What each token id stands for, in bytes."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

from engine.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Maps ids to bytes, for byte-level BPE and for SentencePiece with byte fallback.

    `special_ids` are control tokens. `silent_ids` give no text: the control tokens and whatever ends a
    reply. `leading_spaces` is how many spaces the decoder drops at the start of a whole text.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int], eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
        self._cache: dict[int, bytes] = {}
        self.special_ids = special_ids
        self.silent_ids = special_ids | frozenset(eos_ids)
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self._byte_of = _byte_alphabet() if "ByteLevel" in kinds else None
        if self._byte_of is None and not kinds & {"ByteFallback", "Metaspace"}:
            raise UnsupportedModel(
                f"the tokenizer decodes by {sorted(kinds) or 'nothing'}; served are byte-level and "
                "SentencePiece tokenizers"
            )
        self.leading_spaces = _leading_spaces(steps)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds inside a text; empty for an id that names no token."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._look_up(token_id)
        return found

    def spell(self, data: bytes) -> list[int] | None:
        """Ids of the single-byte tokens that spell `data`, or None where the vocabulary lacks one."""
        char_of = {byte: char for char, byte in (self._byte_of or {}).items()}
        tokens = [char_of.get(byte, f"<0x{byte:02X}>") for byte in data]
        ids = [i for token in tokens if (i := self._tokenizer.token_to_id(token)) is not None]
        return ids if len(ids) == len(data) else None

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_of is not None:
            codes = [self._byte_of.get(char) for char in token]
            # A token with a character outside the alphabet was never byte-encoded.
            return token.encode() if None in codes else bytes(c for c in codes if c is not None)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _leading_spaces(steps: list[dict[str, Any]]) -> int:
    for step in steps:
        if step["type"] == "Strip" and step["content"] == " ":
            return int(step["start"])
        if step["type"] == "Metaspace":
            return 0 if step.get("prepend_scheme") == "never" else 1
    return 0


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes stand for themselves, the rest are shifted above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(shifted)}
