"""A schema's fields as rows of a table: name, type with its range, meaning."""

from __future__ import annotations

import json
from html import escape
from typing import Any

Json = dict[str, Any]
Row = tuple[str, str, str]

_LONGEST_ENUM = 12
_RANGES = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "more than {}"),
    ("maximum", "at most {}"),
    ("exclusiveMaximum", "less than {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
    ("minProperties", "at least {} entries"),
    ("maxProperties", "at most {} entries"),
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
    words = escape(field.get("description", ""))
    default = field.get("default")
    if default is not None and default != [] and default != {}:
        words += f" Default: <code>{escape(json.dumps(default))}</code>"
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(words.split("`")))


def kind(schema: Json) -> str:
    """Say in HTML which values a schema allows, briefly."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f'<a href="#schema-{escape(name)}">{escape(name)}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " | ".join(dict.fromkeys(kind(choice) for choice in schema[key]))
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if "enum" in schema:
        return _enum(schema["enum"])
    return _plain(schema)


def _enum(values: list[Any]) -> str:
    shown = [f"<code>{escape(json.dumps(value))}</code>" for value in values[:_LONGEST_ENUM]]
    return " | ".join(shown) + (" | …" if len(values) > _LONGEST_ENUM else "")


def _plain(schema: Json) -> str:
    found = schema.get("type", "any")
    words = found if isinstance(found, str) else " | ".join(found)
    if words == "array" and "items" in schema:
        words = f"array of ({kind(schema['items'])})"
    elif words == "object" and isinstance(schema.get("additionalProperties"), dict):
        words = f"object of ({kind(schema['additionalProperties'])})"
    ranges = [text.format(schema[key]) for key, text in _RANGES if key in schema]
    return words + (f" <small>{', '.join(ranges)}</small>" if ranges else "")
