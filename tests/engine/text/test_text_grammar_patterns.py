"""A pattern lets through what it matches, and no character that it excludes comes through escaped."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from grammar_rig import accepts, wander

from engine.errors import RequestError
from engine.text import CompiledGrammar, GrammarSpec, GrammarTool, TextCodec
from engine.text.call_formats import HERMES

ESCAPED = '"\\\b\t\n\f\r'
CHARACTERS = [*ESCAPED, *map(chr, range(0x20, 0x7F)), "é", "漢", "😀"]


@pytest.fixture(scope="module")
def compile(codec: TextCodec) -> Callable[[Any], CompiledGrammar]:
    return lambda schema: codec.grammars.compile(GrammarSpec("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "pattern",
    [
        r'^[^"]$',
        r"^[^\\]$",
        r'^[^"\n]$',
        r'^([^\n"]|\n)$',
        r'^(?:a|[^a"])$',
        r'^([^\x00"]|\x00)$',
        r'^[^\\/:*?"<>|]$',
        r"^[\x00-\x1f]$",
        "^[\0-\x1f]$",
        r"^([\x00-\x0f]|[\u0010-\x1f])$",
        r"^(\x00|[\x01-\x1f])$",
        r"^[\x00-!]$",
        r"^[\x01-\x05\t]$",
        r'^[^\x00-\x1f"]$',
        r'^[^\w"]$',
        r'(?i:^[^"K]$)',
        r"^[\s]$",
        r"^\S$",
        r"^[\S\n]$",
        r"^.$",
        r"^[\t\n]$",
        r"^[[]$",
        r"^[a[b&&c~~d]$",
        r"^[]^-]$",
        r"^[!--]$",
        r"^[^]a-]$",
        r"^[a\]\\-c]$",
    ],
)
@pytest.mark.filterwarnings("ignore:Possible")
def test_a_pattern_matches_the_same_characters_in_values_and_names(
    codec: TextCodec, compile: Callable[[Any], CompiledGrammar], pattern: str
) -> None:
    # ECMA 262's \w, \d are of ASCII
    right = [char for char in CHARACTERS if re.search(pattern, char, re.ASCII)]
    value = compile({"type": "string", "pattern": pattern})
    assert [char for char in CHARACTERS if accepts(value, codec, _written(char))] == right
    name = compile({"type": "object", "patternProperties": {pattern: {"const": 1}}})
    # A name that it does not match may have any value, so the other one shows it.
    found = [char for char in CHARACTERS if not accepts(name, codec, f"{{{_written(char)}: 2}}")]
    assert found == right


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": '^[^"]{5,12}$'},
        {"type": "string", "pattern": r"^[^\\]{2}$"},
        {"type": "string", "pattern": r"^[\x00-\x1f]{2}$"},
        {"type": "string", "pattern": '^(?:[^"]|"")*$', "maxLength": 9},
        {"allOf": [{"type": "string", "pattern": '^[^"]{3}$'}, {"pattern": r"^[^\\]*$"}]},
        {"$ref": "#/parts/quoteless", "parts": {"quoteless": {"type": "string", "pattern": '^[^"]{1,9}$'}}},
        {
            "type": "object",
            "patternProperties": {r"^[^\\]{1,3}$": {"const": 1}},
            "additionalProperties": False,
            "minProperties": 1,
        },
        {
            "type": "object",
            "patternProperties": {'^[^"]$': {"const": 1}, '^[^\\x00"]$': {"enum": [1, 2]}},
            "additionalProperties": {"const": 3},
            "minProperties": 1,
        },
    ],
)
def test_any_way_through_it_validates_under_the_schema_as_it_was_given(
    gguf_codec: Callable[..., TextCodec], compile: Callable[[Any], CompiledGrammar], schema: Any
) -> None:
    r"""Tokens that hold \" and \\ whole are taken wherever they are allowed."""
    tokens = ['\\"', "\\\\", 'a\\"', '\\"b', "\\\\\\\\", "\\n", "\\\\n"]
    codec = gguf_codec([("</s>", 3), *((token, 1) for token in tokens)], model="gpt2", eos_token_id=0)
    grammar = codec.grammars.compile(GrammarSpec("json_schema", json.dumps(schema)))
    judge = jsonschema.Draft202012Validator(schema)
    ended = 0
    for seed in range(8):
        choose = random.Random(seed)
        constraint, generated = grammar.start(), list[int]()
        while len(generated) < 80:
            mask = int.from_bytes(constraint.mask(generated), "little")
            ids = [i for i in range(mask.bit_length()) if mask >> i & 1]
            if 0 in ids:
                judge.validate(json.loads(codec.decode(generated)))
                ended += 1
                break
            escapes = [i for i in ids if i <= len(tokens)]
            generated.append(choose.choice(escapes if escapes and choose.random() < 0.7 else ids))
    codec.grammars.close()
    assert ended


def test_control_characters_in_names_are_kept_and_in_values_not(
    codec: TextCodec, compile: Callable[[Any], CompiledGrammar]
) -> None:
    """Names are spelled with \\u, the one way there is; short escapes do for values too."""
    named = {"type": "object", "properties": {"a\x01b": {"const": "\b\f\n\r\t"}}, "required": ["a\x01b"]}
    for schema in ({**named, "additionalProperties": False}, {"const": {"a\x01b": "\b\f\n\r\t"}}):
        grammar = compile(schema)
        assert accepts(grammar, codec, '{"a\\u0001b": "\\b\\f\\n\\r\\t"}')
        assert not accepts(grammar, codec, '{"ab": "\\b\\f\\n\\r\\t"}')
    tool = GrammarTool("f", {"type": "object", "properties": {"k": {"enum": ["on\x02off"]}}})
    with pytest.raises(RequestError, match=r"tool 'f' has the character U\+0002 at \$\.properties\.k\.enum"):
        codec.grammars.compile(GrammarSpec.for_calls([tool], HERMES, parallel=False))


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**53 - 1, 0.1, 0.30000000000000004, 1e-7, -2.5e3, 1.0])
def test_a_number_that_is_taken_comes_back_as_it_is(
    codec: TextCodec, compile: Callable[[Any], CompiledGrammar], number: float
) -> None:
    for schema in ({"const": number}, {"type": "number", "minimum": number, "maximum": number}):
        constraint = compile(schema).start()
        assert json.loads(codec.decode(wander(constraint, codec, seed=1))) == number


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 0, "maximum": 2**63 - 1},
        {"minimum": -(2**63), "exclusiveMaximum": 2**63},
        {"exclusiveMinimum": -1e19, "maximum": 2**64, "exclusiveMaximum": 10},
    ],
)
def test_an_integers_wide_bounds_hold_it_to_exact_numbers(
    codec: TextCodec, compile: Callable[[Any], CompiledGrammar], bounds: dict[str, float]
) -> None:
    """Schemas made from 64-bit types say so; what comes is exact, and within the schema's own bounds."""
    grammar = compile({"type": "integer", **bounds})
    low, high = bounds.get("minimum", -(2**53)), bounds.get("exclusiveMaximum", 2**53)
    for number in (7, max(-7, low), max(-(2**53), low), min(2**53, high - 1)):
        assert accepts(grammar, codec, str(int(number)))
    for number in (2**53 + 1, -(2**53) - 1, 2**63, high if high < 2**53 else 10**30):
        assert not accepts(grammar, codec, str(int(number)))


def _written(char: str) -> str:
    return json.dumps(char, ensure_ascii=False)
