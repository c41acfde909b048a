"""The check of 250 schemas: its cases are what the issue asks for, its judge and its bars can fail."""

from __future__ import annotations

import json
from typing import Any

import check_schemas
import jsonschema
import pytest
from check_schemas import judge, table, verdict
from check_schemas_cases import Case, cases

BOUNDED = [case for case in cases() if case.bounded]
RICH = ("$ref", "enum", "pattern", "patternProperties")


def keywords(schema: Any) -> set[str]:
    """Every key in a schema, at any depth."""
    if isinstance(schema, dict):
        return set(schema).union(*map(keywords, schema.values()))
    return set().union(*map(keywords, schema)) if isinstance(schema, list) else set()


def unbounded(schema: Any) -> bool:
    """Whether a schema has text, a list or free keys without a limit."""
    if isinstance(schema, list):
        return any(map(unbounded, schema))
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, (list, tuple)) else set()
    text = "string" in kinds and not {"maxLength", "enum", "pattern", "format"} & schema.keys()
    items = "array" in kinds and "maxItems" not in schema and schema.get("items") is not False
    keys = "object" in kinds and schema.get("additionalProperties", True) is not False
    return text or items or keys or any(map(unbounded, schema.values()))


def test_there_are_200_bounded_schemas_half_of_them_rich_and_50_unbounded() -> None:
    assert (len(BOUNDED), len(cases())) == (200, 250)
    assert len({json.dumps(case.schema, sort_keys=True) for case in cases()}) == 250
    nested = [c for c in BOUNDED if json.dumps(c.schema).count('"object"') > 1]
    rich = [c for c in BOUNDED if c in nested or set(RICH) & keywords(c.schema)]
    assert len(rich) >= 100
    for keyword in (*RICH, "anyOf", "oneOf", "allOf", "prefixItems", "const", "format", "multipleOf"):
        assert any(keyword in keywords(case.schema) for case in BOUNDED), keyword
    for case in cases():
        jsonschema.Draft202012Validator.check_schema(case.schema)
        assert unbounded(case.schema) is not case.bounded, case.name


@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        ('{"a": 1}', "stop", "valid"),
        ('{"a": "x"}', "stop", "wrong"),
        ('{"a": 1', "stop", "wrong"),
        ('{"a": 1', "length", "cut"),
        ('{"a": 1}', "error", "wrong"),
    ],
)
def test_a_reply_is_valid_cut_or_wrong(text: str, finish: str, expected: str) -> None:
    case = Case("x_flat", {"type": "object", "properties": {"a": {"type": "integer"}}}, "", True)
    outcome = judge(case, text, finish, tokens=5)
    assert outcome.verdict == expected
    assert bool(verdict([outcome] * 5)) is (expected != "valid")
    assert expected != "wrong" or outcome.why


def test_the_bars_are_every_reply_valid_and_four_in_five_ended() -> None:
    def outcomes(ended: int) -> list[check_schemas.Outcome]:
        whole = [judge(case, "", "length", 512) for case in BOUNDED]
        return [outcome._replace(verdict="valid") for outcome in whole[:ended]] + whole[ended:]

    assert verdict(outcomes(160)) == []
    assert verdict(outcomes(159)) == ["159 of 200 bounded replies ended, fewer than 80%"]
    cut = [judge(case, "", "length", 512) for case in cases() if not case.bounded]
    assert verdict([*outcomes(160), *cut]) == []
    assert verdict([*outcomes(200), cut[0]._replace(verdict="wrong", why="no")]) == ["book_open: no"]
    assert "open                 0    25      0     512, 512" in table(cut)
