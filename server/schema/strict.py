"""Strict JSON: one meaning for every body, or a 400 that says what is wrong and where.

Python's decoder is used rather than a faster one because it alone lets duplicate keys be seen. What holds
many values is read by its scanner in Python: the native one keeps the interpreter's lock, and so the event
loop, from the first value to the last.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec

from engine import RequestError
from server.schema import counting
from server.schema.allowed import words_at

T = TypeVar("T", bound=msgspec.Struct)

SHOWN_CHARS = 100
# Of an error's text: its end tells where, and what it repeats of the body may be long.
_ERROR_CHARS = 1000

_WHERE = re.compile(r"(?P<what>.*) - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)


def loads(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises RequestError for anything else: duplicate keys, NaN, numbers beyond a double, bad UTF-8,
    half a surrogate pair, nesting too deep to walk, more values than a server should hold.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise RequestError(f"The body is not valid UTF-8: {exc.reason} at byte {exc.start}") from None
    if text.startswith("\ufeff"):
        raise RequestError("The body begins with a byte order mark (BOM); send UTF-8 without one")
    if not text or text.isspace():
        raise RequestError("The body is empty; send a JSON object")
    try:
        value = _decoder(many=counting.holds_many(body)).decode(text)
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
    refuse_unknown(fields, _names(struct), at=at)
    try:
        if counting.holds_huge(fields):
            # What is wrong with a text shows in its beginning, and errors may repeat all that is converted.
            msgspec.convert(counting.shortened(fields), struct)
        return msgspec.convert(fields, struct)
    except msgspec.ValidationError as exc:
        raise invalid(locate(fields, _shortened(str(exc))), struct, at=at) from None


class Fault(NamedTuple):
    """What a conversion found wrong, the steps to where it is, and the value there."""

    what: str
    steps: tuple[str, ...]
    value: Any

    @property
    def path(self) -> str:
        """The steps as messages show them."""
        return ".".join(self.steps)


def locate(fields: dict[str, Any], error: str) -> Fault:
    """Part a conversion's error into what is wrong and where.

    An unknown name can be spelled like the end of an error: it is one only if the name is really there.
    """
    if found := _WHERE.fullmatch(error):
        # Inside an object of any names the path goes no further than "[...]".
        path = found["path"].partition("[...]")[0]
        what, steps = found["what"], tuple(re.findall(r"[^.\[\]]+", path))
        value: Any = fields
        try:
            for step in steps:
                value = value[int(step)] if isinstance(value, list) else value[step]
            unknown = _UNKNOWN.fullmatch(what)
            if unknown is None or (isinstance(value, dict) and unknown["name"] in value):
                return Fault(what, steps, value)
        except (LookupError, TypeError, ValueError):
            pass
    return Fault(error, (), fields)


def invalid(fault: Fault, struct: type[msgspec.Struct], *, at: str = "") -> RequestError:
    """The error that says what is wrong: the field, its value, and where only some words may stand, those."""
    path = at + fault.path
    inside = path + "." if fault.steps else at
    if unknown := _UNKNOWN.fullmatch(fault.what):
        try:
            refuse_unknown({unknown["name"]: fault.value[unknown["name"]]}, frozenset(), at=inside)
        except RequestError as refused:
            return refused
    if missing := _MISSING.fullmatch(fault.what):
        name = inside + missing["name"]
        return RequestError(f"'{name}' is required", param=name)
    # Its own words for these repeat the value, however long it is.
    known = not fault.what.startswith(("Invalid enum value", "Invalid value"))
    what = fault.what[:1].lower() + fault.what[1:] if known else "none of the allowed values"
    if not known and (words := words_at(struct, fault.steps)):
        what += f" ({', '.join(words)})"
    return RequestError(f"Invalid value for '{path}': {what}; given: {shown(fault.value)}", param=path)


def refuse_unknown(fields: dict[str, Any], known: frozenset[str], *, at: str = "") -> None:
    """Raise RequestError for the first field that is not known."""
    for name, value in fields.items():
        if name not in known:
            field = clean(at + name)[:SHOWN_CHARS]
            # A fixed text that clients look for; the value is in Python's notation there.
            found = _cut(value, repr)
            raise RequestError(
                f"Extra inputs are not permitted, field: '{field}', value: {found}", param=field
            )


def shown(value: Any) -> str:
    """Show a value from a request in a message: as JSON, cut short."""
    return _cut(value, partial(json.dumps, ensure_ascii=False))


@lru_cache(maxsize=256)
def _names(struct: type[msgspec.Struct]) -> frozenset[str]:
    # What a struct's fields are called: slow to ask, and asked of the same few for each request.
    return frozenset(field.encode_name for field in msgspec.structs.fields(struct))


def _shortened(error: str) -> str:
    if len(error) <= _ERROR_CHARS:
        return error
    return error[: _ERROR_CHARS // 2] + "..." + error[-_ERROR_CHARS // 2 :]


def _cut(value: Any, write: Callable[[Any], str]) -> str:
    try:
        text = clean(write(counting.beginning(value, SHOWN_CHARS + 1)))
    except RecursionError:
        return "..."
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def clean(text: str) -> str:
    """Make text encodable as UTF-8, whatever it was made from."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _decoder(*, many: bool) -> json.JSONDecoder:
    kind = counting.CountingDecoder if many else json.JSONDecoder
    return kind(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant, strict=True)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise RequestError(f"The body has the key '{clean(name)[:SHOWN_CHARS]}' more than once")
            seen.add(name)
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
