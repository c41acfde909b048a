"""Every kind of grammar lets through exactly what it says, and constraints repeat themselves to the bit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from check_schemas_cases import Case, cases
from grammar_rig import accepts, allowed, wander
from llguidance import LLMatcher, LLParserLimits

from engine.errors import ConstraintFailed
from engine.text import CompiledGrammar, GrammarSpec, GrammarTool, TextCodec
from engine.text.call_formats import HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, CallFormat
from engine.text.grammars import Grammars

ADD = GrammarTool(
    "add",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)
NOW = GrammarTool("now")


@pytest.fixture
def small(gguf_codec: Callable[..., TextCodec]) -> Iterator[TextCodec]:
    """A vocabulary of single bytes and few control tokens: made, and tried in a child process, at once."""
    codec = gguf_codec(
        [("</s>", 3), ("<|eot|>", 3), ("[TOOL_CALLS]", 3)], model="gpt2", eos_token_id=0, eot_token_id=1
    )
    yield codec
    codec.grammars.close()


def schema(codec: TextCodec, value: Any) -> CompiledGrammar:
    return codec.grammars.compile(GrammarSpec("json_schema", json.dumps(value)))


def calls(codec: TextCodec, form: CallFormat, *, parallel: bool = True) -> CompiledGrammar:
    return codec.grammars.compile(GrammarSpec.for_calls([ADD, NOW], form, parallel=parallel))


@pytest.mark.parametrize("case", cases()[::11], ids=lambda case: case.name)
def test_any_way_through_a_schema_gives_json_that_validates(codec: TextCodec, case: Case) -> None:
    grammar = schema(codec, case.schema)
    ended = 0
    for seed in range(3):
        constraint = grammar.start()
        text = codec.decode(tokens := wander(constraint, codec, seed))
        if len(tokens) < 300:
            jsonschema.Draft202012Validator(case.schema).validate(json.loads(text))
            assert constraint.complete(tokens)
            ended += 1
    assert ended or not case.bounded


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("{}", True),
        ('{"a": [1, {"b": null}], "c": "é"}', True),
        ('{\n  "a": 1\n}', True),
        ("[]", False),
        ('"a"', False),
        ('{"a": 1', False),
        ('{"a": 1}\n', False),
    ],
)
def test_a_json_object_is_any_object_and_nothing_else(codec: TextCodec, text: str, fits: bool) -> None:
    assert accepts(codec.grammars.compile(GrammarSpec("json_object")), codec, text) is fits


@pytest.mark.parametrize("gap", ["  ", "\n\n", "\t", "\n" + " " * 13, " \n", "\r\n"])
def test_no_white_space_can_be_repeated_between_tokens(codec: TextCodec, gap: str) -> None:
    """O069: a small model would write legal white space until it is cut."""
    for grammar in (
        codec.grammars.compile(GrammarSpec("json_object")),
        schema(codec, {"type": "object", "properties": {"a": {"type": "array"}}}),
    ):
        for text in ('{@"a": []}', '{"a"@: []}', '{"a":@[]}', '{"a": [@]}', '{"a": []@}'):
            assert accepts(grammar, codec, text.replace("@", ""))
            assert not accepts(grammar, codec, text.replace("@", gap))


def test_a_key_has_one_spelling_only(codec: TextCodec) -> None:
    """An escaped spelling of a named property would pass as a free one, of any type."""
    grammar = schema(codec, {"type": "object", "properties": {"a": {"type": "integer"}}})
    assert accepts(grammar, codec, '{"a": 1, "b": "x"}')
    for text in ('{"\\u0061": "x"}', '{"a": 1, "\\u0061": "x"}', '{"a": 1, "a": "x"}'):
        assert not accepts(grammar, codec, text)


@pytest.mark.parametrize(
    ("form", "one", "two"),
    [
        (
            HERMES,
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"a":1,"b":-2}}\n</tool_call>',
        ),
        (
            LLAMA3,
            '{"name": "add", "parameters": {"a": 1, "b": 2}}',
            '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "now", "parameters": {}}',
        ),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
            '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
        ),
        (
            MISTRAL_NAMED,
            '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
            '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
        ),
    ],
    ids=lambda value: value.name if isinstance(value, CallFormat) else "",
)
def test_calls_are_written_as_the_family_writes_them(
    codec: TextCodec, form: CallFormat, one: str, two: str
) -> None:
    several, single = calls(codec, form), calls(codec, form, parallel=False)
    assert accepts(several, codec, one)
    assert accepts(several, codec, two)
    assert accepts(single, codec, one)
    assert not accepts(single, codec, two)
    for wrong in (one.replace("add", "sub"), one.replace("2", '"2"'), one + " ", one[:-1], "I will call it."):
        assert not accepts(several, codec, wrong)


def test_a_control_token_that_opens_calls_is_demanded_by_its_id(small: TextCodec) -> None:
    grammar = small.grammars.compile(GrammarSpec.for_calls([NOW], MISTRAL, parallel=True))
    constraint = grammar.start()
    assert allowed(constraint.mask([])) == [2]
    ids = small.encode_plain(' [{"name": "now", "arguments": {}}]')
    assert small.eos_ids[0] in allowed(constraint.mask([2, *ids]))
    with pytest.raises(ConstraintFailed):
        grammar.start().mask(small.encode_plain("[TOOL_CALLS] ["))


def test_at_the_end_only_end_tokens_are_allowed(small: TextCodec) -> None:
    """Several ids may end a reply; none of them is allowed before, nor another control token at any time."""
    assert sorted(small.eos_ids) == [0, 1]
    constraint = small.grammars.compile(GrammarSpec("gbnf", 'root ::= "[TOOL_CALLS]" [a-c]')).start()
    ids = small.encode_plain("[TOOL_CALLS]b")
    for end in range(len(ids)):
        assert min(allowed(constraint.mask(ids[:end]))) > 2
        assert not constraint.complete(ids[:end])
    assert allowed(constraint.mask(ids)) == [0, 1]
    assert constraint.complete(ids)
    assert allowed(constraint.mask([*ids, 1])) == [0, 1]


def test_a_mask_names_no_token_beyond_the_vocabulary(codec: TextCodec) -> None:
    mask = codec.grammars.compile(GrammarSpec("gbnf", "root ::= .*")).start().mask([])
    assert len(mask) * 8 >= codec.vocab_size
    assert max(allowed(mask)) < codec.vocab_size


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_object"),
        GrammarSpec("json_schema", json.dumps(cases()[4].schema)),
        GrammarSpec("gbnf", 'root ::= ("a" | "b" [0-9]{1,3} "é")* "."'),
        GrammarSpec.for_calls([ADD, NOW], HERMES, parallel=True),
    ],
    ids=lambda spec: spec.kind,
)
def test_repeating_re_creating_and_forking_give_the_same_bytes(codec: TextCodec, spec: GrammarSpec) -> None:
    """A failed step asks again; a preempted or taken-over sequence starts anew from its source."""
    grammar = codec.grammars.compile(spec)
    first = grammar.start()
    tokens = wander(first, codec, seed=1, limit=40)
    ways = [tokens[:end] for end in range(len(tokens) + 1)]
    second = grammar.start()
    masks = [second.mask(way) for way in ways]
    third = codec.grammars.compile(GrammarSpec.parse(first.source)).start()
    assert [mask for way in ways for mask in (third.mask(way), third.mask(way))] == [
        mask for mask in masks for _ in range(2)
    ]
    for other in (grammar.start(), grammar.renewed().start()):
        assert other.mask(tokens) == masks[-1]


def test_tokens_that_are_not_the_ones_followed_fail(codec: TextCodec) -> None:
    grammar = codec.grammars.compile(GrammarSpec("json_object"))
    constraint = grammar.start()
    one, other = codec.encode_plain('{"a'), codec.encode_plain('{"b')
    constraint.mask(one)
    for generated in (other, one[:-1]):
        with pytest.raises(ConstraintFailed, match="not those"):
            constraint.mask(generated)
    with pytest.raises(ConstraintFailed, match="can't be followed"):
        grammar.start().mask(codec.encode_plain("]"))


class Told(list[int]):
    """Tokens that count how many of them were looked at."""

    looked = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.looked += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.looked += len(self)
        return super().__iter__()


def test_a_constraint_looks_at_new_tokens_only(codec: TextCodec) -> None:
    """However long the reply is, which may be told as one list that grows."""
    grammar = codec.grammars.compile(GrammarSpec("json_object"))
    tokens = wander(grammar.start(), codec, seed=1, limit=120)
    assert len(tokens) > 60
    one, each = grammar.start(), grammar.start()
    told = Told()
    for end, token in enumerate(tokens):
        assert one.mask(told) == each.mask(tokens[:end])
        told.append(token)
        assert one.complete(told) == each.complete(tokens[: end + 1])
    assert told.looked <= 4 * len(tokens)


def test_one_spec_is_compiled_once_whoever_asks(small: TextCodec) -> None:
    """At once or later; and sequences share what was compiled."""
    tables: list[int] = []

    def table() -> Any:
        tables.append(threading.get_ident())
        return small._token_table()

    grammars = Grammars(table)
    spec = GrammarSpec("json_schema", '{"type": "integer", "minimum": 7}')
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: grammars.compile(spec), range(16)))
    assert len(tables) == 1
    assert len({id(grammar) for grammar in [*found, grammars.compile(spec)]}) == 1
    starts = [found[0].start() for _ in range(1000)]
    assert {start.mask([]) for start in starts[::100]} == {starts[0].mask([])}
    grammars.close()


def test_what_is_kept_is_bounded_in_number_and_size(small: TextCodec) -> None:
    specs = [GrammarSpec("gbnf", f'root ::= "{i}"') for i in range(4)]
    few = Grammars(small._token_table, capacity=2)
    kept = [few.compile(spec) for spec in specs]
    assert few.compile(specs[3]) is kept[3]
    assert few.compile(specs[2]) is kept[2]
    assert few.compile(specs[0]) is not kept[0]
    few.close()
    small = Grammars(small._token_table, memory=100 << 10)  # less than two of them, more where one was slow
    first = small.compile(specs[0])
    assert small.compile(specs[0]) is first
    small.compile(specs[1])
    assert small.compile(specs[0]) is not first
    small.close()


def test_a_lexer_worn_by_others_fails_no_sequence(small: TextCodec) -> None:
    """The shared lexer has met its limit on other texts: who has not met it goes on alone."""
    _, tokenizer = small.grammars._tokenizer()
    limits = LLParserLimits(max_lexer_states=200, verbose_errors=False)

    def build() -> LLMatcher:
        return LLMatcher(tokenizer, "start: /[a-z]{1,500}/", limits=limits, log_level=0)

    grammar = CompiledGrammar("", build, small.eos_ids, size=0, seconds=0.0)
    early, fresh = grammar.start(), grammar.start()
    start = small.encode_plain("ab")
    mask = early.mask(start)
    with pytest.raises(ConstraintFailed, match="lexer"):
        grammar.start().mask(small.encode_plain("a" * 400))
    assert early.mask(start) == fresh.mask(start) == mask
    assert early.mask([*start, *start])
    assert grammar.worn
    assert not grammar.renewed().worn
    slow = CompiledGrammar("", build, small.eos_ids, size=0, seconds=1.0)
    late = slow.start()
    with pytest.raises(ConstraintFailed, match="lexer"):
        slow.start().mask(small.encode_plain("a" * 400))
    with pytest.raises(ConstraintFailed, match="lexer"):  # compiling it anew would hold every stream
        late.mask(start)
