"""What can't be enforced, or takes too much, is refused in words; nothing else suffers from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from grammar_rig import accepts

from engine.errors import Overloaded, RequestError
from engine.text import GrammarSpec, GrammarTool, TextCodec
from engine.text.call_formats import HERMES
from engine.text.grammar_trial import Trial, TrialLimits
from engine.text.grammars import Grammars


@pytest.fixture
def small(gguf_codec: Callable[..., TextCodec]) -> Iterator[TextCodec]:
    """A vocabulary of single bytes: made, and tried in a child process, at once."""
    codec = gguf_codec([("</s>", 3)], model="gpt2", eos_token_id=0)
    yield codec
    codec.grammars.close()


@pytest.fixture(scope="module")
def strict(codec: TextCodec) -> Callable[[Any], str]:
    """Compile a schema and return the refusal, or "" where it is taken."""

    def compile(schema: Any) -> str:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            codec.grammars.compile(GrammarSpec("json_schema", text), param="response_format")
        except RequestError as error:
            return f"{'' if error.param == 'response_format' else 'no param: '}{error}"
        return ""

    return compile


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("not", {"type": "string"}),
        ("if", {"type": "string"}),
        ("contains", {"type": "string"}),
        ("minContains", 2),
        ("maxContains", 2),
        ("uniqueItems", True),
        ("dependentRequired", {"a": ["b"]}),
        ("dependentSchemas", {"a": {}}),
        ("dependencies", {"a": ["b"]}),
        ("propertyNames", {"maxLength": 3}),
        ("unevaluatedItems", False),
        ("unevaluatedProperties", False),
        ("$dynamicRef", "#x"),
        ("$recursiveRef", "#"),
        ("disallow", "string"),
        ("extends", {"type": "object"}),
        ("divisibleBy", 2),
    ],
)
def test_a_keyword_that_can_not_be_enforced_is_refused_by_name(
    strict: Callable[[Any], str], keyword: str, value: Any
) -> None:
    """O067: never a reply that ignores a part of the schema."""
    inner = {"type": ["array", "object"], keyword: value}
    for schema, path in (
        (inner, "$"),
        ({"type": "object", "properties": {"p": inner}}, "$.properties.p"),
        ({"$defs": {"d": inner}, "anyOf": [{"items": {"$ref": "#/$defs/d"}}]}, "$.$defs.d"),
        ({"allOf": [{"prefixItems": [inner]}]}, "$.allOf[0].prefixItems[0]"),
    ):
        assert strict(schema) == f"the schema has {keyword!r} at {path}, which can't be enforced"
    assert strict({"type": "object", "properties": {keyword: {"type": "integer"}}}) == ""
    assert strict({"const": {keyword: 1}}) == ""


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "pattern": "^(?!a)b$"}, "look-around"),
        ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
        ({"type": "string", "format": "uri-reference"}, "Unknown format: uri-reference"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf can't be enforced"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"$ref": "http://example.com/s"}, "example.com"),
        ({"$ref": "#/$defs/missing"}, "does not exist"),
        ({"$ref": "#"}, "no text satisfies it"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "greater than maxLength"),
        ({"type": "object", "minProperties": 2}, "minProperties 2"),
        ({"x-guidance": {"lenient": True}, "type": "string", "format": "nonsense"}, "Unknown format"),
        ({"const": "a\x7fb"}, "U+007F"),
        ({"type": "string", "pattern": r"^a\x7Fb$"}, "U+007F"),
        ('{"const": "\\ud800"}', "half of a surrogate pair"),
        ('{"maximum": 1e999}', "not valid JSON"),
        ({"const": "\x01"}, "U+0001 at $.const, which can't be enforced"),
        ({"enum": [1, "a\x00b"]}, "U+0000 at $.enum, which can't be enforced"),
        ({"properties": {"p": {"const": {"k": ["\x1f"]}}}}, "U+001F at $.properties.p.const.k"),
        ({"type": "string", "pattern": r"^\x00$"}, "Regex is empty"),
        ({"type": "string", "pattern": '(?x)^[^#"]$'}, "has the flags 'x' at $, which can't be enforced"),
        ({"properties": {"\0": {}}, "patternProperties": {'^[^"]$': {}}}, "names U+0000 beside"),
        ({"$ref": "#/const", "const": {"type": "null"}}, "'#/const' at $, which can't be enforced"),
        ("[1]", "must be a JSON object"),
        ("{", "not valid JSON"),
        ('{"minimum": NaN}', "not valid JSON"),
        ("false", "must be a JSON object"),
    ],
)
def test_a_schema_that_is_wrong_or_impossible_is_refused_in_words(
    strict: Callable[[Any], str], schema: Any, words: str
) -> None:
    """O067: no grammar, no reply; and the refusal speaks of the schema, not of our notation for it."""
    refusal = strict(schema)
    assert words in refusal
    assert "%json" not in refusal
    assert "whitespace" not in refusal
    assert len(refusal) < 400


@pytest.mark.parametrize("keyword", ["enum", "const", "minimum", "maximum", "exclusiveMinimum", "multipleOf"])
@pytest.mark.parametrize("number", [2**53 + 1, -(2**63), 10**30, 1e30, 123456789012345.67])
def test_a_number_that_would_become_another_one_is_refused(
    strict: Callable[[Any], str], keyword: str, number: float
) -> None:
    """The matcher's numbers are floats, read with less care than they need."""
    refusal = strict({"items": {keyword: [number] if keyword == "enum" else number}})
    assert f"the number {number} at $.items.{keyword}, which can't be enforced" in refusal
    assert strict({"properties": {keyword: {"default": number}}}) == ""
    if keyword in ("enum", "const"):
        inside = strict({keyword: [{"a": number}]})
        assert f"the number {number} at $.{keyword}[0], which can't be enforced" in inside


def test_a_bound_that_only_larger_numbers_meet_is_refused(strict: Callable[[Any], str]) -> None:
    assert "beyond 2**53" in strict({"type": "integer", "minimum": 2**60, "maximum": 2**63 - 1})
    assert "beyond 2**53" in strict({"type": "number", "maximum": 2**63 - 1})


def test_what_only_a_reference_reaches_is_checked_too(strict: Callable[[Any], str]) -> None:
    """O067: a path may lead to schemas that stand where nothing else looks for them."""
    hidden = {"components": {"a b": [{"type": "object", "minProperties": 2}]}}
    assert "minProperties 2 at $.items.$ref" in strict({"items": {"$ref": "#/components/a%20b/0"}, **hidden})
    assert "minProperties" in strict({"$ref": "#/x", "x": {"$ref": "#/components/a b/0"}, **hidden})
    assert strict({"$ref": "#/x", "x": {"type": "integer"}}) == ""


def test_keywords_that_assert_nothing_are_taken(codec: TextCodec, strict: Callable[[Any], str]) -> None:
    idle = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/thing",
        "title": "T",
        "description": "d",
        "default": 1,
        "examples": [2],
        "deprecated": True,
        "uniqueItems": False,
        "unevaluatedProperties": True,
        "then": {"type": "string"},
        "x-own": {"not": 1},
        "x-guidance": {"whitespace_pattern": " *"},
    }
    assert strict({"type": "array", "items": {"type": "integer"}, **idle}) == ""
    text = json.dumps({"type": "array", "items": {"type": "integer"}, **idle})
    grammar = codec.grammars.compile(GrammarSpec("json_schema", text))
    assert accepts(grammar, codec, "[1, 1]")
    assert not accepts(grammar, codec, "[1,  1]")


def test_limits_on_text_depth_and_lists_are_told(strict: Callable[[Any], str]) -> None:
    """O066: nesting is refused before any recursion, and a big enum before any compiling."""
    assert "bytes, more than" in strict({"enum": [f"value {i}" for i in range(200_000)]})
    assert "enum of 6000 values" in strict({"enum": list(range(6000))})
    assert "more than 50000 values" in strict('{"const": [' + "0," * 50_000 + "0]}")
    for text in ('{"items":' * 5000 + "{}" + "}" * 5000, "[" * 5000 + "]" * 5000):
        assert "nested more than 64 deep" in strict(text)
    deep: Any = {"type": "integer"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    assert "nested more than 64 deep" in strict(deep)
    assert "exceed the maximum number of nested" in strict(
        {"type": "string", "pattern": "(" * 400 + "a" + ")" * 400}
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"},
        {"allOf": [{"type": "string", "pattern": f"^.{{0,9}}{c}.*$"} for c in "abc"]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(10)]} for i in range(8)]},
        {"type": "array", "minItems": 100_000, "items": {"type": "integer"}},
    ],
    ids=["nested quantifiers", "crossed patterns", "itself", "product", "many items"],
)
def test_an_explosive_schema_is_followed_or_refused(strict: Callable[[Any], str], schema: Any) -> None:
    """O066: it is compiled where it can do no harm, and the next one is none the worse."""
    strict(schema)
    assert strict({"type": "integer"}) == ""


def test_a_runaway_compile_is_stopped_and_remembered(small: TextCodec) -> None:
    """O066: these patterns cross for minutes; the child process that tries them is ended."""
    patterns = [{"type": "string", "pattern": f".*a{i}.*b.{{1,40}}c.*"} for i in range(20)]
    spec = GrammarSpec("json_schema", json.dumps({"allOf": patterns}))
    grammars = Grammars(small._token_table, trial=TrialLimits(cpu=0.3))
    with pytest.raises(RequestError, match="more than the time or memory allowed"):
        grammars.compile(spec)
    assert grammars._trial._child is None
    with pytest.raises(RequestError, match="more than the time or memory allowed") as caught:
        grammars.compile(spec, param="tools")
    assert caught.value.param == "tools"
    assert grammars._trial._child is None  # no new one: the refusal was remembered
    assert grammars.compile(GrammarSpec("json_object")).start().mask([])
    grammars.close()


def test_what_overflows_a_stack_ends_the_child_only(small: TextCodec) -> None:
    """O066: a chain of rules is no nesting that can be counted in the text."""
    chain = "\n".join(f"r{i} ::= r{i + 1}" for i in range(1900))
    spec = GrammarSpec("gbnf", f'root ::= r0\n{chain}\nr1900 ::= "x"')
    with pytest.raises(RequestError, match="too complex"):
        small.grammars.compile(spec)
    assert small.grammars.compile(GrammarSpec("gbnf", 'root ::= "x"')).start().mask([])


def test_a_grammar_whose_tokens_cost_too_much_is_refused(codec: TextCodec) -> None:
    """A mask holds every running stream, so ambiguity has its limits."""
    for text in (
        'root ::= ((("a"){1,99}){1,99}){1,99}',
        "root ::= [a-z]* [a-z]* [a-z]* [a-z]* [a-z]* [a-z]*",
    ):
        with pytest.raises(RequestError, match="too complex to follow"):
            codec.grammars.compile(GrammarSpec("gbnf", text))


def test_a_child_that_died_of_itself_is_started_again(small: TextCodec) -> None:
    grammars = small.grammars
    grammars.warm()
    child = grammars._trial._child
    assert child is not None
    child.kill()
    child.wait()
    grammars.compile(GrammarSpec("gbnf", 'root ::= "a"'))
    again = grammars._trial._child
    assert again is not None
    assert again is not child
    grammars.close()
    assert again.poll() is not None


def test_where_too_many_wait_the_next_is_sent_away() -> None:
    trial = Trial(dict, TrialLimits(turn=0.01))
    with trial._lock, ThreadPoolExecutor(1) as pool, pytest.raises(Overloaded):
        pool.submit(trial.run, "", {}).result()


def test_parameters_of_a_tool_must_be_an_object_that_can_be_enforced(codec: TextCodec) -> None:
    def refusal(parameters: Any) -> str:
        spec = GrammarSpec.for_calls([GrammarTool("f", parameters)], HERMES, parallel=True)
        with pytest.raises(RequestError) as caught:
            codec.grammars.compile(spec, param="tools")
        assert caught.value.param == "tools"
        return str(caught.value)

    assert (
        refusal({"type": "string"})
        == "the parameters' schema of tool 'f' must have the type 'object', not \"string\""
    )
    assert "the parameters' schema of tool 'f' has 'not' at $" in refusal({"not": {}})
    assert "must be a JSON object" in refusal([1])
    with pytest.raises(RequestError, match="no tool"):
        codec.grammars.compile(GrammarSpec.for_calls([], HERMES, parallel=True))


def test_a_model_without_an_end_can_not_be_held_to_a_form(gguf_codec: Callable[..., TextCodec]) -> None:
    codec = gguf_codec([("<x>", 3)], model="gpt2")
    assert codec.eos_ids == ()
    with pytest.raises(RequestError, match="no token that ends a reply"):
        codec.grammars.compile(GrammarSpec("json_object"))
