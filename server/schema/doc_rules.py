"""Brings the schemas of request bodies from what their types say to what the server takes.

msgspec's schemas know types and ranges. Added here: the limits of the served model, what lists of objects
hold, closed objects, the few values that fields of other servers may have, and rules across fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from server.schema.doc_across import rules_of
from server.schema.doc_dialects import ABSENT_OF_PARTS, BODIES, INNER, UNSAID, WORDS, Struct, Values
from server.schema.doc_shapes import Limits, shapes

Json = dict[str, Any]
# A description that begins so says which values are taken; the longest first.
_REFUSED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("Refused unless null or empty", (None, [])),
    ("Refused unless null", (None,)),
    ("Refused unless false", (None, False)),
)


def body_structs() -> list[Struct]:
    """List every struct that stands in a request's body, bodies first."""
    parts = [part for body in BODIES for _, part in body.parts]
    return list(dict.fromkeys([*(body.struct for body in BODIES), *parts, *INNER]))


def refine(schemas: Json, keys: Mapping[Struct, str], limits: Limits) -> None:
    """Refine the schemas in place. `keys` names the schema of each of `body_structs`."""
    found = shapes(limits, lambda struct: {"$ref": "#/components/schemas/" + keys[struct]})
    for struct in body_structs():
        schema = schemas[keys[struct]]
        _fields(schema, {**found.common, **found.of.get(struct, {})})
        schema["additionalProperties"] = False
        if rules := rules_of(struct, set(schema["properties"])):
            schema["allOf"] = rules
    for body in BODIES:
        for name, allowed in body.refused.items():
            about = body.words.get(name, UNSAID) + ". Taken where it asks for nothing."
            schemas[keys[body.struct]]["properties"][name] = {"enum": [*allowed, None], "description": about}
        _absent(schemas[keys[body.struct]]["properties"], body.absent, body.ignored, body.words)
    for struct, absent in ABSENT_OF_PARTS.items():
        _absent(schemas[keys[struct]]["properties"], absent, words=WORDS)
    schemas |= found.more


def _fields(schema: Json, values: Mapping[str, Json]) -> None:
    properties, required = schema["properties"], schema.get("required", ())
    for name, found in properties.items():
        about = {key: found[key] for key in ("description", "default") if key in found}
        for words, taken in _REFUSED:
            if about.get("description", "").startswith(words):
                properties[name] = {"enum": list(taken), **about}
                break
        else:
            if name in values:
                value = values[name] if name in required else _or_null(values[name])
                properties[name] = {**value, **about}


def _or_null(value: Json) -> Json:
    if set(value) == {"anyOf"}:
        return {"anyOf": [*value["anyOf"], {"type": "null"}]}
    return {"anyOf": [value, {"type": "null"}]}


def _absent(
    properties: Json,
    absent: Values,
    ignored: Iterable[str] = (),
    words: Mapping[str, str] = MappingProxyType({}),
) -> None:
    for name, allowed in absent.items():
        about = words.get(name, UNSAID) + ". Taken where it asks for nothing."
        properties.setdefault(name, {"enum": [*allowed, None], "description": about})
    for name in sorted(ignored):
        properties.setdefault(
            name, {"description": f"Accepted and ignored: {words.get(name, UNSAID).lower()}."}
        )
