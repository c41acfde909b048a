"""What a client may ask a reply to be, and the matcher's grammar for it.

A GrammarSpec is plain data, so that a request can go to another process; grammar_of turns it into text that
the matcher reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from engine.errors import RequestError
from engine.text.call_formats import HERMES, CallFormat
from engine.text.grammar_gbnf import to_lark
from engine.text.grammar_schema import read_schema

MAX_TEXT = 128 * 1024  # bytes
MAX_CALLS = 32  # in one reply: a model that repeats itself must come to an end

# Between two tokens of JSON: nothing, a blank, or one line end with its indentation. Models that may write
# any white space sometimes write nothing else.
_WHITE_SPACE = r" |\n {0,12}"

# Plain characters and short escapes only: with \u a key has more than one spelling, and a second spelling of
# a named property would pass as a free one.
_ESCAPES = 'nrbtf\\"'

_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": _WHITE_SPACE,
    "json_allowed_escapes": _ESCAPES,
    "lenient": False,
    "coerce_one_of": False,
}


# Keywords beside "properties" that say which names an object may have.
_MORE_NAMES = frozenset(
    ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "minProperties")
)


class Tool(msgspec.Struct, frozen=True):
    """A tool that may be called: its name and the JSON schema of its arguments (None: an empty object)."""

    name: str
    parameters: Any = None


class GrammarSpec(msgspec.Struct, frozen=True):
    """What a reply must be. Hashable plain data.

    `text` is the JSON schema ("json_schema"), the GBNF grammar ("gbnf"), the JSON list of tools ("calls", see
    `for_calls`), or empty ("json_object": any JSON object). `call_format` and `parallel` (whether several
    calls may stand in a reply) belong to "calls".
    """

    kind: Literal["json_object", "json_schema", "gbnf", "calls"]
    text: str = ""
    call_format: CallFormat = HERMES
    parallel: bool = True

    @classmethod
    def for_calls(cls, tools: Iterable[Tool], call_format: CallFormat, *, parallel: bool) -> GrammarSpec:
        """The reply is one or more calls of these tools, in the given format, and nothing else."""
        return cls("calls", msgspec.json.encode(list(tools)).decode(), call_format, parallel)

    @classmethod
    def parse(cls, source: str) -> GrammarSpec:
        """Read what `source` gave. Raises msgspec.ValidationError."""
        return msgspec.json.decode(source, type=cls)

    @property
    def source(self) -> str:
        """The spec as JSON."""
        return msgspec.json.encode(self).decode()


def grammar_of(spec: GrammarSpec, control_tokens: Mapping[str, int]) -> str:
    """Return the matcher's grammar. `control_tokens` maps spellings to ids.

    Raises RequestError where the text is too long, no JSON or GBNF, or asks what can't be enforced.
    """
    try:
        size = len(spec.text.encode())
    except UnicodeEncodeError:
        raise RequestError("the text holds half of a surrogate pair, which is no character") from None
    if size > MAX_TEXT:
        raise RequestError(f"the text has {size} bytes, more than the {MAX_TEXT} allowed")
    if spec.kind == "json_object":
        return _schema_grammar({"type": "object"})
    if spec.kind == "json_schema":
        return _schema_grammar(read_schema(spec.text))
    if spec.kind == "gbnf":
        return to_lark(spec.text)
    tools = msgspec.json.decode(spec.text, type=list[Tool])
    return _calls_grammar(tools, spec.call_format, spec.parallel, control_tokens)


def _schema_grammar(schema: dict[str, Any]) -> str:
    return f"%llguidance {{}}\nstart: %json {_with_options(schema)}\n"


def _with_options(schema: dict[str, Any]) -> str:
    return json.dumps({"x-guidance": _OPTIONS, **schema})


def _calls_grammar(
    tools: Sequence[Tool], form: CallFormat, parallel: bool, control_tokens: Mapping[str, int]
) -> str:
    if not tools:
        raise RequestError("there is no tool to call")

    def text(value: str) -> str:
        return _spelled(value, control_tokens)

    first, again = f"{text(form.opening)} call {text(form.closing)}", f"{text(form.between)} call"
    if form.repeats:
        again = f"{text(form.between)} {first}"
    further = f"({again}){{0,{MAX_CALLS - 1}}}" if parallel else ""
    if form.repeats:
        start = f"{first} {further}"
    else:
        start = f"{text(form.opening)} call {further} {text(form.closing)}"
    lines = [f"start: {start}", f"call: {' | '.join(f'c{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        head, tail = f'{{"name": {_quoted(tool.name)}, {_quoted(form.arguments_key)}: ', "}"
        if form.after_name is not None:
            head, tail = tool.name + form.after_name, ""
        lines.append(f"c{i}: {text(head)} %json {_with_options(_parameters(tool))} {text(tail)}")
    return "%llguidance {}\n" + "\n".join(lines) + "\n"


def _parameters(tool: Tool) -> dict[str, Any]:
    name = f"the parameters' schema of tool {tool.name!r}"
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = read_schema(json.dumps(tool.parameters), name)
    if schema.setdefault("type", "object") != "object":
        raise RequestError(f"{name} must have the type 'object', not {json.dumps(schema['type'])[:100]}")
    if _names_all(schema):
        # A function takes what it names. Many clients leave this out, and small models go on inventing names.
        schema["additionalProperties"] = False
    return schema


def _names_all(schema: dict[str, Any]) -> bool:
    """Whether its "properties" are plainly meant to be all that an object has."""
    named, required = schema.get("properties"), schema.get("required") or []
    if not isinstance(named, dict) or not isinstance(required, list) or schema.keys() & _MORE_NAMES:
        return False
    return bool(named) and named.keys() >= set(map(str, required))


def _spelled(text: str, control_tokens: Mapping[str, int]) -> str:
    """`text` in the matcher's notation, with control tokens by their ids."""
    if not text:
        return ""
    inside = sorted((token for token in control_tokens if token in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, inside))})", text) if inside else [text]
    return " ".join(f"<[{control_tokens[p]}]>" if p in inside else _quoted(p) for p in parts if p)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
