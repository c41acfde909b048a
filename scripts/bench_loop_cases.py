"""The worst requests that a server may be sent, for bench_loop.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

MB = 1_000_000
DONE, REFUSED, LARGE = (200,), (400,), (413,)
EITHER = (200, 400)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


class Model(NamedTuple):
    """What cases must know of the model: its name, context and vocabulary in tokens."""

    name: str
    context: int
    vocab: int


class Case(NamedTuple):
    """Requests of one kind: `path`, what makes the bodies, and the statuses that they may get.

    All bodies are sent at once. `chunked`: without saying how long they are.
    """

    name: str
    path: str
    bodies: Callable[[Model], Sequence[bytes]]
    statuses: tuple[int, ...]
    chunked: bool = False


def cases() -> Iterator[Case]:
    """All of them; bodies are made when they are asked for."""
    yield from _large_bodies()
    yield from _just_below()
    yield from _prompts()
    yield from _chats()
    yield from _grammars()
    yield from _replies()
    yield from _others()


def _one(**fields: Any) -> Callable[[Model], Sequence[bytes]]:
    """One body of these fields, those that are functions called with the model."""

    def make(model: Model) -> Sequence[bytes]:
        given = {name: field(model) if callable(field) else field for name, field in fields.items()}
        return [json.dumps({"model": model.name, **given}, ensure_ascii=False).encode()]

    return make


def _raw(before: bytes, filling: bytes, after: bytes, size: int) -> Callable[[Model], Sequence[bytes]]:
    """One body of `size` bytes, about, that holds `filling` again and again."""

    def make(model: Model) -> Sequence[bytes]:
        head = b'{"model":' + json.dumps(model.name).encode() + b"," + before
        return [head + filling * (size // len(filling)) + after]

    return make


def _large_bodies() -> Iterator[Case]:
    kinds = {
        "numbers": (b'"prompt":[', b"1,", b"1]}"),
        "texts": (b'"prompt":[', b'"",', b'""]}'),
        "lists": (b'"prompt":[', b"[],", b"1]}"),
        "objects": (b'"prompt":[', b'{"a":1},', b"1]}"),
        "nesting": (b'"prompt":', b"[", b""),
        "one text": (b'"prompt":"', b"text ", b'"}'),
        "escapes": (b'"prompt":"', b"\\n\\u00e9", b'"}'),
        "emoji": (b'"prompt":"', "\U0001f600".encode(), b'"}'),
        "blanks": (b'"prompt":', b" ", b"}"),
    }
    for name, (before, filling, after) in kinds.items():
        sizes = (1, 10, 30) if name in ("numbers", "lists", "one text") else (30,)
        for size in sizes:
            body = _raw(before, filling, after, size * MB)
            yield Case(f"body of {size} MB: {name}", COMPLETIONS, body, REFUSED)
    yield Case("30 MB where a word belongs", CHAT, _raw(b'"service_tier":"', b"a", b'"}', 30 * MB), REFUSED)
    yield Case("20 MB of an unknown field", CHAT, _raw(b'"x":{"y":[', b"1.5,", b"1]}}", 20 * MB), REFUSED)
    yield Case("10 MB of turns", CHAT, _raw(b'"messages":[', b'{"role":"user"},', b"1]}", 10 * MB), REFUSED)
    yield Case(
        "10 MB of stops", COMPLETIONS, _raw(b'"prompt":"a","stop":[', b'"a",', b'"a"]}', 10 * MB), REFUSED
    )
    pairs = ",".join(f'"k{i}":1' for i in range(150_000)).encode()
    twice = _raw(b'"logit_bias":{', pairs + b",", b'"k149999":1}}', len(pairs) + 1)
    yield Case("one of 150,000 keys twice", COMPLETIONS, twice, REFUSED)
    bias = {str(i): 1 for i in range(100_000)}
    yield Case("100,000 biases", COMPLETIONS, _one(prompt="a", logit_bias=bias), REFUSED)
    yield Case("40 MB", CHAT, _raw(b'"prompt":"', b"a", b'"}', 40 * MB), LARGE)
    yield Case("40 MB in chunks", CHAT, _raw(b'"prompt":"', b"a", b'"}', 40 * MB), LARGE, chunked=True)


def _just_below() -> Iterator[Case]:
    """What is still read on the loop itself."""
    below = 63_900
    kinds = {
        "numbers": (COMPLETIONS, b'"prompt":[', b"1,", b"1]}"),
        "turns": (CHAT, b'"messages":[', b'{"role":"user","content":"a"},', b'{"role":"user"}]}'),
        "turns of messages": (
            MESSAGES,
            b'"max_tokens":1,"messages":[',
            b'{"role":"user","content":"a"},',
            b'{"role":"user","content":"a"}]}',
        ),
        "blocks of messages": (
            MESSAGES,
            b'"max_tokens":1,"messages":[{"role":"user","content":[',
            b'{"type":"text","text":"a"},',
            b'{"type":"text","text":"a"}]}]}',
        ),
        "items of responses": (
            RESPONSES,
            b'"max_output_tokens":1,"input":[',
            b'{"role":"user","content":"a"},',
            b'{"role":"user","content":"a"}]}',
        ),
        "biases": (COMPLETIONS, b'"prompt":"a","logit_bias":{"1":1,', b'"99999999":1,', b'"2":1}}'),
    }
    for name, (path, before, filling, after) in kinds.items():
        yield Case(f"64 kB: {name}", path, _raw(before, filling, after, below), EITHER)
    small = _one(prompt="\U0001f600 " * 390, max_tokens=1)
    yield Case("2 kB of emoji", COMPLETIONS, small, EITHER)


def _random_text(characters: int) -> str:
    draw = random.Random(1)
    return "".join(
        chr(draw.choice((draw.randrange(32, 0xD800), draw.randrange(32, 127)))) for _ in range(characters)
    )


def _ids(count: int | Callable[[Model], int], seed: int = 1) -> Callable[[Model], list[int]]:
    def make(model: Model) -> list[int]:
        draw = random.Random(seed)
        number = count(model) if callable(count) else count
        return [draw.randrange(32, min(model.vocab, 250)) for _ in range(number)]

    return make


def _prompts() -> Iterator[Case]:
    texts = {
        "one letter": "a" * 200_000,
        "blanks": " " * 200_000,
        "line ends": "\n" * 200_000,
        "random characters": _random_text(90_000),
        "emoji": "\U0001f600" * 50_000,
        "digits": "1" * 200_000,
    }
    for name, text in texts.items():
        yield Case(f"200 kB of {name}", COMPLETIONS, _one(prompt=text, max_tokens=1), EITHER)
        turns = [{"role": "user", "content": text}]
        yield Case(f"a turn of 200 kB: {name}", CHAT, _one(messages=turns, max_tokens=1), EITHER)
    marks = [{"role": "user", "content": "<|im_start|>" * 16_000}]
    yield Case("a turn of 200 kB: marks", CHAT, _one(messages=marks, max_tokens=1), EITHER)
    yield Case("2.6 MB of emoji", COMPLETIONS, _one(prompt="\U0001f600" * 650_000, max_tokens=1), REFUSED)
    yield Case("30,000 ids", COMPLETIONS, _one(prompt=_ids(30_000), max_tokens=1), EITHER)
    longest = _ids(lambda model: model.context - 8)
    yield Case("as long as the context", COMPLETIONS, _one(prompt=longest, max_tokens=4), DONE)


def _turns(count: int, text: str = "word ") -> list[dict[str, Any]]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": f"{text}{i}"} for i in range(2 * (count // 2) + 1)
    ]


def _tool(number: int, properties: int) -> dict[str, Any]:
    fields = {f"field_{i}": {"type": "string", "description": "what it is " * 3} for i in range(properties)}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


def _calls(count: int) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    for i in range(count):
        function = {"name": "tool_0", "arguments": json.dumps({f"f{j}": "x" * 20 for j in range(40)})}
        call = {"id": f"call_{i}", "type": "function", "function": function}
        turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": f"call_{i}", "content": "y" * 500})
    return [*turns, {"role": "user", "content": "go on"}]


def _chats() -> Iterator[Case]:
    yield Case("5,000 turns", CHAT, _one(messages=_turns(5000), max_tokens=1), EITHER)
    cut = {"prompt_truncate_len": 1000, "max_tokens": 1}
    yield Case("5,000 turns, cut", CHAT, _one(messages=_turns(5000), **cut), DONE)
    marks = _turns(5000, "<|im_end|> ")
    yield Case("5,000 turns of marks, cut", CHAT, _one(messages=marks, **cut), DONE)
    ask = [{"role": "user", "content": "Go"}]
    wide = [_tool(i, 100) for i in range(128)]
    yield Case("128 wide tools", CHAT, _one(messages=ask, tools=wide, max_tokens=1), EITHER)
    narrow = [_tool(i, 6) for i in range(40)]
    forced = _one(messages=ask, tools=narrow, tool_choice="required", max_tokens=4)
    yield Case("40 tools, one to be called", CHAT, forced, EITHER)
    history = _one(messages=_calls(1000), tools=[_tool(0, 3)], **cut)
    yield Case("1,000 calls in the history, cut", CHAT, history, EITHER)
    metadata = {f"k{i}": "v" * 512 for i in range(16)}
    yield Case("metadata", CHAT, _one(messages=ask, metadata=metadata, max_tokens=1), DONE)
    large = {f"k{i}": "v" * 512 for i in range(20_000)}
    yield Case("20,000 pairs of metadata", CHAT, _one(messages=ask, metadata=large, max_tokens=1), REFUSED)


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _grammars() -> Iterator[Case]:
    ask = [{"role": "user", "content": "Go"}]
    anything = {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,50}x[0-9]{3,40}$"}, {"type": "integer"}]}
    wide = {"type": "object", "properties": {f"p{i}": anything for i in range(1200)}}
    yield Case(
        "a schema of 110 kB", CHAT, _one(messages=ask, response_format=_format(wide), max_tokens=8), EITHER
    )
    huge = {"type": "object", "properties": {f"p{i}": anything for i in range(60_000)}}
    yield Case("a schema of 5 MB", CHAT, _one(messages=ask, response_format=_format(huge)), REFUSED)
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    yield Case("a deep schema", CHAT, _one(messages=ask, response_format=_format(deep), max_tokens=8), EITHER)
    worst = {"type": "string", "pattern": "^(x|y)*a(x|y|a){40}$"}
    late = _one(messages=ask, response_format=_format(worst), max_tokens=40)
    yield Case("a pattern with many states", CHAT, late, (200, 400, 500))
    gbnf = "root ::= " + " ".join(f"r{i}" for i in range(500))
    rules = "\n".join(f'r{i} ::= ("a" | "b" | r{(i * 7 + 1) % 500}){{0,99}}' for i in range(500))
    recursive = {"type": "grammar", "grammar": f"{gbnf}\n{rules}\n"}
    yield Case("a tangled grammar", CHAT, _one(messages=ask, response_format=recursive, max_tokens=8), EITHER)

    def many(model: Model) -> Sequence[bytes]:
        schemas = [
            {"type": "object", "properties": {f"p{i}_{k}": anything for k in range(60)}} for i in range(24)
        ]
        return [_one(messages=ask, response_format=_format(s), max_tokens=16)(model)[0] for s in schemas]

    yield Case("24 schemas at once", CHAT, many, EITHER)


def _replies() -> Iterator[Case]:
    free = {"ignore_eos": True}
    longest = _ids(lambda model: model.context - 8, seed=2)
    scored = {"prompt": longest, "echo": True, "logprobs": 5, "max_tokens": 2}
    yield Case("echo with logprobs, whole", COMPLETIONS, _one(**scored), DONE)
    yield Case("echo with logprobs, streamed", COMPLETIONS, _one(**scored, stream=True), DONE)
    half = _ids(lambda model: model.context // 2, seed=3)
    yield Case(
        "128 choices of a long prompt", COMPLETIONS, _one(prompt=half, n=128, max_tokens=2, **free), DONE
    )

    def prompts(model: Model) -> list[list[int]]:
        return [_ids(64, seed=i)(model) for i in range(256)]

    yield Case("256 prompts", COMPLETIONS, _one(prompt=prompts, max_tokens=4, **free), DONE)
    same = {"prompt": _ids(400, seed=4), "n": 128, **free}
    stops = {"stop": [c + "ab" * 511 for c in "abcd"]}
    yield Case("128 choices, long stops", COMPLETIONS, _one(**same, **stops, max_tokens=24), DONE)
    top = {"logprobs": True, "top_logprobs": 20}
    yield Case("128 choices, top 20", COMPLETIONS, _one(**same, **top, max_tokens=24), DONE)
    yield Case(
        "128 choices, top 20, streamed", COMPLETIONS, _one(**same, **top, max_tokens=24, stream=True), DONE
    )
    yield Case(
        "128 choices, raw_output", COMPLETIONS, _one(**same, raw_output=True, echo=True, max_tokens=4), DONE
    )
    raw = {**same, "raw_output": True, "return_token_ids": True, "stream": True}
    yield Case("128 choices, raw_output, streamed", COMPLETIONS, _one(**raw, max_tokens=4), DONE)
    long = {"max_tokens": 1500, **free}
    yield Case("1,500 tokens, top 20", COMPLETIONS, _one(prompt="Go", n=4, **top, **long), DONE)
    yield Case(
        "1,500 tokens, top 20, streamed",
        COMPLETIONS,
        _one(prompt="Go", n=4, stream=True, **top, **long),
        DONE,
    )
    best = {"prompt": "Go", "n": 1, "best_of": 64, "max_tokens": 64, **free}
    yield Case("best of 64", COMPLETIONS, _one(**best), DONE)
    answer = {"input": "Go", "max_output_tokens": 600, "top_logprobs": 20}
    told = {"include": ["message.output_text.logprobs"]}
    yield Case("responses, top 20", RESPONSES, _one(**answer, **told), DONE)
    yield Case("responses, top 20, streamed", RESPONSES, _one(**answer, **told, stream=True), DONE)

    def streams(model: Model) -> Sequence[bytes]:
        return [_one(prompt=f"Stream {i}", stream=True, max_tokens=100, **free)(model)[0] for i in range(64)]

    yield Case("64 streams", COMPLETIONS, streams, DONE)


def _others() -> Iterator[Case]:
    items = [{"role": "user", "content": "word"}] * 3000
    yield Case("responses, 3,000 items", RESPONSES, _one(input=items, max_output_tokens=1), EITHER)
    echoed = {"instructions": "x" * 2 * MB, "input": "Go", "max_output_tokens": 1}
    yield Case("responses, 2 MB of instructions", RESPONSES, _one(**echoed, stream=True), REFUSED)
    tools = [{"type": "function", **_tool(i, 60)["function"]} for i in range(128)]
    small = {"input": "Go", "max_output_tokens": 1, "truncation": "auto"}
    yield Case("responses, 128 tools, streamed", RESPONSES, _one(**small, tools=tools, stream=True), EITHER)
    blocks = [{"type": "text", "text": "word"}] * 3000
    turns = [{"role": "user", "content": blocks}]
    yield Case("messages, 3,000 blocks", MESSAGES, _one(messages=turns, max_tokens=1), EITHER)
    yield Case("count_tokens, 5,000 turns", f"{MESSAGES}/count_tokens", _one(messages=_turns(5000)), DONE)
    long = [{"role": "user", "content": "a word " * 60_000}]
    yield Case("count_tokens, 400 kB", f"{MESSAGES}/count_tokens", _one(messages=long), EITHER)
    text = {"prompt": "a word " * 60_000, "return_token_strs": True}
    yield Case("tokenize, 400 kB", "/tokenize", _one(**text), EITHER)
    yield Case("detokenize, 60,000 ids", "/detokenize", _one(tokens=_ids(60_000)), EITHER)
