"""A schema's fields as rows of a table: name, type with its range, meaning."""

from __future__ import annotations

import json
from html import escape
from typing import Any

Json = dict[str, Any]
Row = tuple[str, str, str]

_LONGEST_ENUM = 12
# Lowest and highest, and of what.
_BOUNDS = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " items"),
    ("minProperties", "maxProperties", " entries"),
)


def resolve(document: Json, found: Json) -> Json:
    """Follow a reference, if it is one, to what it stands for."""
    while "$ref" in found:
        found = _at(document, found["$ref"])
    return found


def _at(document: Json, ref: str) -> Json:
    found: Any = document
    for key in ref.removeprefix("#/").split("/"):
        found = found[key]
    return dict(found)


def field_rows(document: Json, schema: Json) -> list[Row]:
    """Rows of an object's fields, the required ones first; none for what is no object."""
    required = set(schema.get("required", ()))
    names = sorted(schema.get("properties", {}), key=lambda name: name not in required)
    rows = []
    for name in names:
        field = schema["properties"][name]
        mark = " <em>required</em>" if name in required else ""
        rows.append((f"<code>{escape(name)}</code>{mark}", kind(field), _about(document, field)))
    return rows


def _about(document: Json, field: Json) -> str:
    words = escape(field.get("description", "") or _of_referred(document, field))
    default = field.get("default")
    if default is not None and default != [] and default != {}:
        words += f" Default: <code>{escape(json.dumps(default))}</code>"
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(words.split("`")))


def _of_referred(document: Json, field: Json) -> str:
    # A field without words of its own has those of what it holds, if that is one thing.
    refs = [choice for choice in [field, *field.get("anyOf", ())] if "$ref" in choice]
    return str(resolve(document, refs[0]).get("description", "")) if len(refs) == 1 else ""


def kind(schema: Json) -> str:
    """Say in HTML which values a schema allows, briefly: that null is allowed goes without saying."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f'<a href="#schema-{escape(name)}">{escape(name)}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " | ".join(dict.fromkeys(kind(choice) for choice in _not_null(schema[key])))
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if "enum" in schema:
        return _enum(schema["enum"])
    return _plain(schema)


def _not_null(choices: list[Json]) -> list[Json]:
    return [choice for choice in choices if choice.get("type") != "null"] or choices


def _enum(values: list[Any]) -> str:
    given = [value for value in values if value is not None] or values
    shown = [f"<code>{escape(json.dumps(value))}</code>" for value in given[:_LONGEST_ENUM]]
    return " | ".join(shown) + (" | …" if len(given) > _LONGEST_ENUM else "")


def _plain(schema: Json) -> str:
    found = schema.get("type", "any")
    words = found if isinstance(found, str) else " | ".join(found)
    if words == "array" and "items" in schema:
        words = f"array of ({kind(schema['items'])})"
    elif words == "object" and isinstance(schema.get("additionalProperties"), dict):
        words = f"object of ({kind(schema['additionalProperties'])})"
    elif words == "object" and schema.get("properties"):
        words += " with " + ", ".join(f"<code>{escape(name)}</code>" for name in schema["properties"])
    ranges = _ranges(schema)
    return words + (f" <small>{', '.join(ranges)}</small>" if ranges else "")


def _ranges(schema: Json) -> list[str]:
    found = [_range(schema.get(low), schema.get(high), unit) for low, high, unit in _BOUNDS]
    if "exclusiveMinimum" in schema:
        found.insert(0, f"above {_number(schema['exclusiveMinimum'])}")
    if "exclusiveMaximum" in schema:
        found.append(f"below {_number(schema['exclusiveMaximum'])}")
    return [text for text in found if text]


def _range(low: float | None, high: float | None, unit: str) -> str:
    if low is not None and high is not None:
        return f"{_number(low)} to {_number(high)}{unit}"
    if low is not None:
        return f"{_number(low)} or more{unit}"
    return "" if high is None else f"up to {_number(high)}{unit}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)
