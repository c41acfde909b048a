"""Driving grammars without a model: any token that is allowed will do."""

from __future__ import annotations

import random

from engine.errors import ConstraintFailed
from engine.text import CompiledGrammar, TextCodec
from engine.types import Constraint


def allowed(mask: bytes) -> list[int]:
    """The token ids that a mask lets through, ascending."""
    bits = int.from_bytes(mask, "little")
    return [i for i in range(bits.bit_length()) if bits >> i & 1] if bits.bit_count() > 64 else _few(bits)


def wander(constraint: Constraint, codec: TextCodec, seed: int, limit: int = 300) -> list[int]:
    """Tokens of a random way through a grammar, to where it may end or to `limit`; no end token."""
    choose = random.Random(seed)
    generated: list[int] = []
    ends = frozenset(codec.eos_ids)
    while len(generated) < limit:
        mask = constraint.mask(generated)
        if any(mask[end >> 3] >> (end & 7) & 1 for end in ends):
            break
        generated.append(_any(mask, choose))
    return generated


def accepts(grammar: CompiledGrammar, codec: TextCodec, text: str) -> bool:
    """Whether `text` is a whole reply that the grammar allows."""
    try:
        mask = grammar.start().mask(codec.encode_plain(text))
    except ConstraintFailed:
        return False
    return not set(codec.eos_ids).isdisjoint(allowed(mask))


def _few(bits: int) -> list[int]:
    found = []
    while bits:
        found.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return found


def _any(mask: bytes, choose: random.Random) -> int:
    """One of the tokens of a mask: the next one above a random place."""
    bits = int.from_bytes(mask, "little")
    place = choose.randrange(len(mask) * 8)
    above = bits >> place
    if above:
        return place + (above & -above).bit_length() - 1
    return (bits & -bits).bit_length() - 1
