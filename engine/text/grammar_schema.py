"""Checks a JSON schema before it becomes a grammar: its size, and that every keyword can be enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, NoReturn

from engine.errors import RequestError

MAX_DEPTH = 64
MAX_VALUES = 50_000
MAX_ENUM = 5_000

# Without \u escapes (see grammar_source) the matcher takes this one character for nothing at all.
_DELETE = re.compile(r"\x7f|\\u007[fF]|\\x7[fF]|\\x\{0*7[fF]\}")

# Where a keyword holds schemas: in the value itself, in each value of a map, or in each of a list.
_Place = Literal["schema", "map", "list"]
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
    seen = 0
    while queue:
        spot = queue.pop()
        seen += 1 + len(spot.value)
        if spot.depth > MAX_DEPTH:
            raise RequestError(f"{name} is nested more than {MAX_DEPTH} deep, at {spot.path[:200]}")
        if seen > MAX_VALUES:
            raise RequestError(f"{name} has more than {MAX_VALUES} values")
        if spot.place == "schema" and isinstance(spot.value, dict):
            _check_keywords(spot, name)
        queue.extend(_inside(spot))
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
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    # A grammar doesn't know that two free keys are the same one, so it can count on one of them only.
    if isinstance(least, (int, float)) and least > named + 1:
        raise RequestError(
            f"{name} has minProperties {least} at {spot.path[:200]}, which can't be enforced:"
            f" {named} properties are required there"
        )


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
                yield _Spot(value, "schema" if spot.place == "list" else None, f"{spot.path}[{i}]", below)


def _place(outer: _Place | None, key: str, value: Any) -> _Place | None:
    """What a keyword's value, or a map's, stands for."""
    if outer == "map":
        return "schema"
    place = _PLACES.get(key) if outer == "schema" else None
    return "list" if place and isinstance(value, list) else place
