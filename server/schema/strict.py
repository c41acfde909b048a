"""Strict JSON: one meaning for every body, or a 400 that says what is wrong and where.

Python's decoder is used rather than a faster one because it alone lets duplicate keys be seen.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

import msgspec

from engine import RequestError

T = TypeVar("T", bound=msgspec.Struct)

SHOWN_CHARS = 100

_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)


def loads(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises RequestError for anything else: duplicate keys, NaN, numbers beyond a double, bad UTF-8,
    half a surrogate pair, nesting too deep to walk.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise RequestError(f"The body is not valid UTF-8: {exc.reason} at byte {exc.start}") from None
    if text.startswith("\ufeff"):
        raise RequestError("The body begins with a byte order mark (BOM); send UTF-8 without one")
    if not text.strip():
        raise RequestError("The body is empty; send a JSON object")
    try:
        value = _decoder().decode(text)
    except RequestError:
        raise
    except RecursionError:
        raise RequestError("The body is nested too deeply") from None
    except json.JSONDecodeError as exc:
        raise RequestError(f"The body is not valid JSON: {exc}") from None
    except ValueError:
        # The decoder's only other one: Python reads no integer of more than some thousand digits.
        raise RequestError("The body has a number that is too long") from None
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object")
    if "\\u" in text:
        _refuse_half_characters(value)
    return value


def convert(fields: dict[str, Any], struct: type[T], *, at: str = "") -> T:
    """Check `fields` against a struct: unknown names, types without coercion, ranges.

    `at` prefixes the names in messages. Raises RequestError that names the field.
    """
    refuse_unknown(fields, {f.encode_name for f in msgspec.structs.fields(struct)}, at=at)
    try:
        return msgspec.convert(fields, struct)
    except msgspec.ValidationError as exc:
        found = _WHERE.match(str(exc))
        assert found is not None
        path = at + (found["path"] or "")
        what = found["what"]
        if what.startswith("Object missing required field"):
            name = ".".join(filter(None, (path.rstrip("."), what.split("`")[1])))
            raise RequestError(f"'{name}' is required", param=name) from None
        if what.startswith("Object contains unknown field"):
            raise _unknown(".".join(filter(None, (path.rstrip("."), what.split("`")[1])))) from None
        root = re.split(r"[.\[]", found["path"] or "", maxsplit=1)[0]
        value = shown(fields.get(root))
        # Its own words for this repeat the value, however long it is.
        is_choice = what.startswith("Invalid enum value")
        what = "none of the allowed values" if is_choice else what[:1].lower() + what[1:]
        raise RequestError(f"Invalid value for '{path}': {what}; given: {value}", param=path) from None


def refuse_unknown(fields: dict[str, Any], known: set[str], *, at: str = "") -> None:
    """Raise RequestError for the first field that is not known."""
    for name, value in fields.items():
        if name not in known:
            # The value is in Python's notation there.
            raise _unknown(at + name, f", value: {_cut(value, repr)}")


def _unknown(name: str, value: str = "") -> RequestError:
    # A fixed text that clients look for.
    field = clean(name)[:SHOWN_CHARS]
    return RequestError(f"Extra inputs are not permitted, field: '{field}'{value}", param=field)


def shown(value: Any) -> str:
    """Show a value from a request in a message: as JSON, cut short."""
    return _cut(value, partial(json.dumps, ensure_ascii=False))


def _cut(value: Any, write: Callable[[Any], str]) -> str:
    if isinstance(value, list | str):
        value = value[: SHOWN_CHARS + 1]
    try:
        text = clean(write(value))
    except RecursionError:
        return "..."
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def clean(text: str) -> str:
    """Make text encodable as UTF-8, whatever it was made from."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_object, parse_float=_float, parse_constant=_constant, strict=True
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise RequestError(f"The body has the key '{clean(twice)[:SHOWN_CHARS]}' more than once")
    return found


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError(f"The body has a number out of range: {text[:SHOWN_CHARS]}")
    return value


def _constant(text: str) -> NoReturn:
    raise RequestError(f"The body is not valid JSON: {text} is not a JSON number")


def _refuse_half_characters(value: Any) -> None:
    # Only \u escapes can write half a surrogate pair; such a string has no UTF-8, so no tokens either.
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise RequestError("The body has a string with half a surrogate pair") from None
        elif isinstance(item, dict):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
