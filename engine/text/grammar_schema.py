"""Checks a JSON schema before it becomes a grammar: its size, and that every keyword can be enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, NoReturn
from urllib.parse import unquote

from engine.errors import RequestError
from engine.text.grammar_patterns import without_nul

MAX_DEPTH = 64
MAX_VALUES = 50_000
MAX_ENUM = 5_000
_MAX_EXACT = 2**53  # larger numbers, and floats with more digits, become others in the matcher

# What has neither a plain spelling nor a short escape: the matcher leaves it out of a value without a word.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

# Without \u escapes (see grammar_source) the matcher takes this one character for nothing at all.
_DELETE = re.compile(r"\x7f|\\u007[fF]|\\x7[fF]|\\x\{0*7[fF]\}")

# Where a keyword holds schemas: in the value itself, in each value of a map, or in each of a list.
# What const and enum hold is data, which a reply must repeat.
_Place = Literal["schema", "map", "list", "data"]
_PLACES: dict[str, _Place] = {
    "additionalProperties": "schema",
    "additionalItems": "schema",
    "items": "schema",
    "properties": "map",
    "patternProperties": "map",
    "$defs": "map",
    "definitions": "map",
    "anyOf": "list",
    "oneOf": "list",
    "allOf": "list",
    "prefixItems": "list",
    "const": "data",
    "enum": "data",
}
# Assertions that no grammar here follows. What draft-03 knew is ignored by the matcher, so it is refused too.
_UNENFORCED = frozenset(
    """not if then else contains minContains maxContains dependentRequired dependentSchemas dependencies
    propertyNames unevaluatedItems unevaluatedProperties uniqueItems $dynamicRef $recursiveRef
    disallow extends divisibleBy""".split()  # noqa: SIM905
)
# Values with which a keyword asserts nothing.
_IDLE: dict[str, Any] = {
    "uniqueItems": False,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "then": True,
    "else": True,
}


class _Spot(NamedTuple):
    """A value in a schema, what it stands for (None is plain data), and where: path and depth."""

    value: Any
    place: _Place | None
    path: str
    depth: int


def read_schema(text: str, name: str = "the schema") -> dict[str, Any]:
    """Parse and check a schema; what asserts nothing is left out. Raises RequestError."""
    schema = _parse(text, name)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(f"{name} must be a JSON object, not {text[:100]}")
    queue = [_Spot(schema, "schema", "$", 0)]
    known: dict[int, Any] = {}  # by id; held, so that no id comes twice
    refs: list[tuple[str, str]] = []
    narrowed = nul = resources = False
    seen = 0
    while queue or refs:
        spot = queue.pop() if queue else _target(schema, refs.pop(), resources, name)
        if id(spot.value) in known and spot.place == "schema":
            continue
        seen += 1 + len(spot.value)
        if spot.depth > MAX_DEPTH:
            raise RequestError(f"{name} is nested more than {MAX_DEPTH} deep, at {spot.path[:200]}")
        if seen > MAX_VALUES:
            raise RequestError(f"{name} has more than {MAX_VALUES} values")
        if spot.place == "schema" and isinstance(spot.value, dict):
            known[id(spot.value)] = spot.value
            _check_keywords(spot, name)
            narrowed |= _rewrite_patterns(spot, name)
            resources |= spot.path != "$" and isinstance(spot.value.get("$id"), str)
            ref = spot.value.get("$ref")
            if isinstance(ref, str) and "#/" in ref:
                refs.append((ref, spot.path))
        elif spot.place == "data":
            for value in spot.value.values() if isinstance(spot.value, dict) else spot.value:
                _check_data(value, spot.path, name)
        nul = nul or _names_nul(spot)
        queue.extend(_inside(spot))
    if narrowed and nul:  # the patterns don't match that name any more
        raise RequestError(f"{name} names U+0000 beside patternProperties, which can't be enforced")
    schema.pop("x-guidance", None)  # the matcher's own options, which are ours to set
    return schema


def _parse(text: str, name: str) -> Any:
    if _DELETE.search(text):
        raise RequestError(f"{name} has the character U+007F, which can't be enforced")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise RequestError(f"{name} is nested more than {MAX_DEPTH} deep") from None
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds half of a surrogate pair, which is no character") from None
    except ValueError as error:
        raise RequestError(f"{name} is not valid JSON: {error}") from None
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _check_keywords(spot: _Spot, name: str) -> None:
    schema: dict[str, Any] = spot.value
    for keyword, idle in _IDLE.items():
        if schema.get(keyword) is idle:
            del schema[keyword]
    if "if" not in schema:  # alone they say nothing
        schema.pop("then", None)
        schema.pop("else", None)
    if bad := sorted(_UNENFORCED & schema.keys()):
        raise RequestError(f"{name} has {bad[0]!r} at {spot.path[:200]}, which can't be enforced")
    values = schema.get("enum")
    if isinstance(values, list) and len(values) > MAX_ENUM:
        raise RequestError(
            f"{name} has an enum of {len(values)} values at {spot.path[:200]}, over {MAX_ENUM}"
        )
    if "const" in schema:
        _check_data(schema["const"], f"{spot.path}.const", name)
    _narrow(schema)
    for keyword in _NUMBERS:
        _check_data(schema.get(keyword), f"{spot.path}.{keyword}", name)
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    # A grammar doesn't know that two free keys are the same one, so it can count on one of them only.
    if isinstance(least, (int, float)) and least > named + 1:
        raise RequestError(
            f"{name} has minProperties {least} at {spot.path[:200]}, which can't be enforced:"
            f" {named} properties are required there"
        )


def _narrow(schema: dict[str, Any]) -> None:
    """Hold an integer whose bounds are wider than exact numbers (those of 64 bits, say) to the exact ones.

    What such a grammar takes is valid by the schema's own bounds. A bound that only numbers beyond can meet
    stays as it is, and is refused.
    """
    if schema.get("type") != "integer":
        return
    for bound, exclusive, sign in (("maximum", "exclusiveMaximum", 1), ("minimum", "exclusiveMinimum", -1)):
        wide = [
            keyword
            for keyword in (bound, exclusive)
            if isinstance(value := schema.get(keyword), (int, float)) and sign * value > _MAX_EXACT
        ]
        for keyword in wide:
            del schema[keyword]
        if wide and bound not in schema:
            schema[bound] = sign * _MAX_EXACT


def _check_data(value: Any, path: str, name: str) -> None:
    """Refuse a number or string that the matcher would change; lists and objects are spots of their own."""
    if isinstance(value, str) and (found := _CONTROL.search(value)):
        raise RequestError(
            f"{name} has the character U+{ord(found[0]):04X} at {path[:200]}, which can't be enforced"
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if abs(value) > _MAX_EXACT:
            raise RequestError(
                f"{name} has the number {_shown(value)} at {path[:200]}, which can't be enforced:"
                " beyond 2**53 numbers aren't exact"
            )
        if isinstance(value, float) and not _survives(value):
            raise RequestError(
                f"{name} has the number {value!r} at {path[:200]}, which can't be enforced: it has too many"
                " digits"
            )


def _shown(value: float) -> str:
    """A number in words of any size; Python refuses to write very long integers."""
    if isinstance(value, int) and value.bit_length() > 300:
        return "of more than 90 digits"
    return repr(value)


def _survives(value: float) -> bool:
    """Whether the matcher, which scales the digits as one whole number, reads the same float."""
    digits, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = digits.partition(".")
    scale = int(exponent or 0) - len(fraction)
    if abs(scale) > 308:
        return False
    read = float(int(whole + fraction))
    return abs(value) == (read * float(f"1e{scale}") if scale >= 0 else read / float(f"1e{-scale}"))


def _rewrite_patterns(spot: _Spot, name: str) -> bool:
    """Write the patterns of a schema as the matcher needs them; whether those for names became others."""
    schema: dict[str, Any] = spot.value
    try:
        if isinstance(pattern := schema.get("pattern"), str):
            schema["pattern"] = without_nul(pattern)
        named = schema.get("patternProperties")
        if not isinstance(named, dict):
            return False
        patterns: dict[str, Any] = {}
        for pattern, below in named.items():
            key = without_nul(pattern)
            patterns[key] = {"allOf": [patterns[key], below]} if key in patterns else below
    except RequestError as error:
        raise RequestError(f"{name}: {error} at {spot.path[:200]}, which can't be enforced") from None
    schema["patternProperties"] = patterns
    return patterns.keys() != named.keys()


def _names_nul(spot: _Spot) -> bool:
    """Whether a property's name here has U+0000."""
    if not isinstance(spot.value, dict):
        return False
    required = spot.value.get("required")
    names = [*spot.value, *(required if isinstance(required, list) else ())]
    return any(isinstance(name, str) and "\0" in name for name in names)


def _target(schema: dict[str, Any], ref: tuple[str, str], resources: bool, name: str) -> _Spot:
    """What a $ref by path points to, which may stand where no schema is looked for.

    Where a part has an $id, paths may begin at it: only those that pass known places are taken then.
    """
    text, path = ref
    value: Any = schema
    place: _Place | None = "schema"
    for step in unquote(text.partition("#")[2]).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            place, value = _place(place, key, value[key]), value[key]
        elif isinstance(value, list) and key.isascii() and key.isdecimal() and int(key[:9]) < len(value):
            place, value = _item_place(place), value[int(key[:9])]
        else:
            raise RequestError(f"{name} has the $ref {text[:100]!r} at {path[:200]}, which does not exist")
    if place not in ("schema", None) or (place is None and resources):
        raise RequestError(f"{name} has the $ref {text[:100]!r} at {path[:200]}, which can't be enforced")
    return _Spot(value if isinstance(value, (dict, list)) else {}, "schema", f"{path}.$ref", 0)


def _inside(spot: _Spot) -> Iterator[_Spot]:
    """The objects and lists in a value, each with its place."""
    below = spot.depth + 1
    if isinstance(spot.value, dict):
        for key, value in spot.value.items():
            if isinstance(value, (dict, list)):
                yield _Spot(value, _place(spot.place, key, value), f"{spot.path}.{key}", below)
    else:
        for i, value in enumerate(spot.value):
            if isinstance(value, (dict, list)):
                yield _Spot(value, _item_place(spot.place), f"{spot.path}[{i}]", below)


def _place(outer: _Place | None, key: str, value: Any) -> _Place | None:
    """What a keyword's value, or a map's, stands for."""
    if outer == "map":
        return "schema"
    if outer == "data":
        return "data"
    place = _PLACES.get(key) if outer == "schema" else None
    return "list" if place and place != "data" and isinstance(value, list) else place


def _item_place(outer: _Place | None) -> _Place | None:
    """What an item of a list stands for."""
    return "schema" if outer == "list" else "data" if outer == "data" else None
