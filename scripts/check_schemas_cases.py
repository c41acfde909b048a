"""JSON schemas as applications write them: 200 whose texts are bounded, and 50 whose texts are not.

Twenty-five subjects, each in eight bounded shapes (four flat, four with nesting, references, enums and
patterns) and two unbounded ones. Nothing is random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Schema = dict[str, Any]


class Case(NamedTuple):
    """A schema, what to ask the model for, and whether every text of the schema is of bounded length."""

    name: str
    schema: Schema
    ask: str
    bounded: bool


class _Subject(NamedTuple):
    """What a schema is about: names of its text, number and choice fields, and the choices."""

    noun: str
    texts: tuple[str, str]
    numbers: tuple[str, str]
    choice: str
    choices: tuple[str, ...]


_SUBJECTS = tuple(
    _Subject(noun, (texts[0], texts[1]), (numbers[0], numbers[1]), choice, tuple(choices))
    for noun, texts, numbers, choice, choices in (
        ("book", ("title", "author"), ("year", "pages"), "genre", ("novel", "poetry", "history")),
        ("person", ("name", "city"), ("age", "children"), "status", ("single", "married", "widowed")),
        ("film", ("film title", "director"), ("year", "minutes"), "rating", ("G", "PG", "PG-13", "R")),
        ("recipe", ("dish", "cuisine"), ("servings", "minutes"), "difficulty", ("easy", "medium", "hard")),
        ("order", ("customer", "product"), ("quantity", "total"), "state", ("new", "paid", "sent", "back")),
        ("flight", ("origin", "destination"), ("gate", "seats"), "cabin", ("economy", "business", "first")),
        ("invoice", ("company", "service"), ("amount", "days"), "currency", ("EUR", "USD", "GBP", "JPY")),
        ("patient", ("full name", "complaint"), ("age", "pulse"), "ward", ("surgery", "general", "children")),
        ("car", ("maker", "model"), ("year", "doors"), "fuel", ("petrol", "diesel", "electric")),
        ("song", ("title", "singer"), ("seconds", "plays"), "mood", ("happy", "sad", "calm", "angry")),
        ("city", ("name", "country"), ("people", "height"), "climate", ("dry", "mild", "cold", "tropical")),
        ("lesson", ("topic", "teacher"), ("room", "pupils"), "subject", ("maths", "music", "biology")),
        ("animal", ("species", "habitat"), ("legs", "weight"), "diet", ("plants", "meat", "everything")),
        ("ticket", ("summary", "reporter"), ("priority", "votes"), "state", ("open", "closed", "blocked")),
        ("house", ("street", "owner"), ("rooms", "floor"), "heating", ("gas", "wood", "heat pump")),
        ("job", ("role", "employer"), ("salary", "hours"), "contract", ("permanent", "temporary")),
        ("match", ("home team", "away team"), ("home goals", "away goals"), "sport", ("football", "hockey")),
        ("planet", ("name", "discoverer"), ("moons", "day length"), "kind", ("rocky", "gas", "ice")),
        ("email", ("subject", "sender"), ("size", "attachments"), "folder", ("inbox", "spam", "archive")),
        ("plant", ("species", "family"), ("height", "petals"), "light", ("shade", "half shade", "sun")),
        ("review", ("product", "comment"), ("stars", "helpful"), "tone", ("positive", "neutral", "negative")),
        ("event", ("title", "place"), ("guests", "hours"), "weekday", ("Mon", "Tue", "Wed", "Thu", "Fri")),
        ("server", ("hostname", "owner"), ("cores", "memory"), "system", ("linux", "bsd", "windows")),
        ("painting", ("title", "artist"), ("width", "height"), "style", ("cubist", "baroque", "modern")),
        ("règle", ("naïve name", "crème"), ("größe", "Zahl"), "couleur", ("bleu", "blanc", "noir é")),
    )
)


def _text(limit: int = 24) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": limit}


def _number(high: int = 5000) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": high}


def _object(properties: Schema, required: list[str] | None = None) -> Schema:
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def _fields(s: _Subject) -> Schema:
    return {
        s.texts[0]: _text(),
        s.texts[1]: _text(40),
        s.numbers[0]: _number(),
        s.choice: {"enum": list(s.choices)},
    }


def _flat(s: _Subject) -> Schema:
    """As a typed client writes it: titles, a description, everything required."""
    fields = {name: {"title": name.title(), **field} for name, field in _fields(s).items()}
    return {
        "title": s.noun,
        "description": f"One {s.noun}.",
        **_object({**fields, "ok": {"type": "boolean"}}),
    }


def _optional(s: _Subject) -> Schema:
    fields = {**_fields(s), s.numbers[1]: {"type": ["integer", "null"], "minimum": -9, "maximum": 99}}
    return _object(fields, required=[s.texts[0], s.numbers[1]])


def _listed(s: _Subject) -> Schema:
    words = {"type": "array", "items": _text(12), "minItems": 1, "maxItems": 4}
    numbers = {"type": "array", "items": _number(100), "maxItems": 5}
    return _object({s.texts[0]: _text(), "tags": words, s.numbers[0]: numbers})


def _various(s: _Subject) -> Schema:
    share = {"type": "number", "minimum": 0, "maximum": 1}
    either = {"anyOf": [_number(10), _text(10), {"type": "null"}]}
    row = {"type": "array", "prefixItems": [_text(8), _number(9)], "items": False, "minItems": 2}
    return _object({"kind": {"const": s.noun}, s.numbers[1]: either, "share": share, "row": row})


def _nested(s: _Subject) -> Schema:
    part = _object({s.texts[1]: _text(16), s.numbers[1]: _number(50)})
    details = _object({"parts": {"type": "array", "items": part, "minItems": 1, "maxItems": 3}, "main": part})
    return _object({s.texts[0]: _text(), "details": details})


def _referring(s: _Subject) -> Schema:
    one = {"$ref": "#/$defs/one"}
    definitions = {
        "choice": {"type": "string", "enum": list(s.choices)},
        "one": _object({s.texts[0]: _text(16), s.choice: {"$ref": "#/$defs/choice"}}),
    }
    items = {"type": "array", "items": one, "maxItems": 3}
    return {"$defs": definitions, **_object({"first": one, "others": items, "last": {"anyOf": [one, _NULL]}})}


def _patterned(s: _Subject) -> Schema:
    code = {"type": "string", "pattern": f"^{s.noun[:2].upper()}-[0-9]{{3,5}}(-[a-z]{{1,4}})?$"}
    clock = {"type": "string", "pattern": r"^([01]\d|2[0-3]):[0-5]\d$"}
    levels = {"type": "array", "items": {"enum": [1, 2.5, "x", None, True]}, "minItems": 2, "maxItems": 4}
    day = {"type": "string", "format": "date"}
    return _object(
        {"code": code, "at": clock, s.choice: {"enum": list(s.choices)}, "levels": levels, "day": day}
    )


def _combined(s: _Subject) -> Schema:
    first = _object({"type": {"const": "short"}, s.texts[0]: _text(12)})
    second = _object({"type": {"const": "long"}, s.texts[0]: _text(12), s.texts[1]: _text(30)})
    counts = {
        "type": "object",
        "patternProperties": {"^[a-d]{1,3}$": _number(20)},
        "additionalProperties": False,
        "maxProperties": 3,
    }
    narrowed = {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}, {"multipleOf": 4}]}
    return _object({s.noun: {"oneOf": [first, second]}, "counts": counts, s.numbers[1]: narrowed})


def _open(s: _Subject) -> Schema:
    """What most people write: no lengths, no closed objects."""
    words = {"type": "array", "items": {"type": "string"}}
    fields = {s.texts[0]: {"type": "string"}, s.numbers[0]: {"type": "number"}, "notes": words}
    return {"type": "object", "properties": fields, "required": list(fields)}


def _recursive(s: _Subject) -> Schema:
    again = {"type": "array", "items": {"$ref": "#/definitions/node"}}
    node = _object({s.texts[0]: {"type": "string"}, s.numbers[0]: {"type": "integer"}, "children": again})
    free = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
    return {"definitions": {"node": node}, **_object({"root": {"$ref": "#/definitions/node"}, "extra": free})}


_NULL: Schema = {"type": "null"}
_BOUNDED: tuple[Callable[[_Subject], Schema], ...] = (
    _flat,
    _optional,
    _listed,
    _various,
    _nested,
    _referring,
    _patterned,
    _combined,
)
_UNBOUNDED: tuple[Callable[[_Subject], Schema], ...] = (_open, _recursive)


def cases() -> list[Case]:
    """All of them, the bounded ones first."""
    return [
        Case(
            f"{subject.noun}{shape.__name__}",
            shape(subject),
            f"Describe a {subject.noun} of your choice as JSON.",
            shape in _BOUNDED,
        )
        for shapes in (_BOUNDED, _UNBOUNDED)
        for subject in _SUBJECTS
        for shape in shapes
    ]
