"""Replies as JSON: short ones at one go, long ones piece by piece."""

from __future__ import annotations

from typing import Any

import msgspec

_FEW = 16

_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """Write a value as JSON."""
    return _encoder.encode(value)


def encode_long(value: Any) -> bytes:
    """Write what `encode` writes, but the members of long lists one by one.

    The encoder keeps the interpreter's lock while it works, so a reply of many megabytes at one go would
    stop the event loop from whatever thread it is written in.
    """
    return _encoder.encode(_pieces(value))


def _pieces(value: Any) -> Any:
    """The value with the members of long lists written already. Structs that hold no others stay whole."""
    if isinstance(value, msgspec.Struct) and value.__struct_config__.gc:
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        changed = {name: _pieces(field) for name, field in fields.items() if _may_be_long(field)}
        return msgspec.structs.replace(value, **changed)
    if isinstance(value, tuple) and _may_be_long(value[-1] if value else None):
        pieces = [_pieces(one) for one in value]
        return (
            tuple(pieces) if len(value) <= _FEW else tuple([msgspec.Raw(_encoder.encode(p)) for p in pieces])
        )
    return value


def _may_be_long(value: Any) -> bool:
    return isinstance(value, msgspec.Struct | tuple | dict)
