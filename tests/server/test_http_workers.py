"""What runs where: nothing in a request keeps the event loop from its other clients.

What is long runs in the threads "text" (requests), "replies" (replies) and "grammars", what is short right on
the loop.
Threads are watched, never the clock.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine import Engine, EngineConfig, EngineRequest, RequestError, TextCodec
from server import encoding, generate, lifecycle
from server.api import logprobs, order, reply
from server.api import stream as streams
from server.config import ServerConfig
from server.encoding import encode, encode_long
from server.schema import counting, strict
from server.schema.requests import read_chat
from server.schema.responses import (
    Completion,
    CompletionChoice,
    ContentLogprobs,
    LegacyLogprobs,
    TokenLogprobs,
    TopLogprob,
)
from tests.server.fakes import CHATML, MODEL, FakeEngine, byte_codec, chat_body, running, text_ids, until

LOOP, TEXT, REPLIES, GRAMMARS = "loop", "text", "replies", "grammars"
# Small thresholds, so that the tests' long requests are short.
CONFIG = ServerConfig(long_body_kb=1, long_prompt_bytes=300, long_reply_tokens=8)
TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


class Watch:
    """Where functions are called: the kinds of threads, by the functions' names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._loop = threading.current_thread()
        self.seen: dict[str, list[str]] = {}

    def on(self, owner: Any, *names: str) -> None:
        """Watch functions of a module, a class or an object."""
        for name in names:
            self._patch.setattr(owner, name, self._watched(name, getattr(owner, name)))
            self.seen[name] = []

    def take(self) -> dict[str, set[str]]:
        """Where they were called since the last time; those that were not are left out."""
        found = {name: set(where) for name, where in self.seen.items() if where}
        for where in self.seen.values():
            where.clear()
        return found

    def _watched(self, name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            thread = threading.current_thread()
            self.seen[name].append(LOOP if thread is self._loop else thread.name.partition("_")[0])
            return whole(*args, **kwargs)

        return call


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def turns(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


BODIES = {
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/chat/completions": lambda text: {"messages": turns(text)},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": turns(text), "max_tokens": 4},
    "/v1/messages/count_tokens": lambda text: {"messages": turns(text)},
    "/tokenize": lambda text: {"prompt": text},
}


@pytest.mark.parametrize("path", BODIES)
async def test_long_requests_are_read_rendered_and_tokenized_in_a_worker(path: str, watch: Watch) -> None:
    """O092, as far as a test can tell: bodies are decoded and prompts cut into tokens off the loop."""
    codec = byte_codec()
    watch.on(strict, "loads")
    watch.on(codec, "encode", "encode_chat")
    tokenizes = "encode" if path in ("/v1/completions", "/tokenize") else "encode_chat"
    async with running(FakeEngine("a", context=5000), CONFIG, codec) as client:
        for length, decoded, tokenized in ((10, LOOP, LOOP), (500, LOOP, TEXT), (1500, TEXT, TEXT)):
            body = {"model": MODEL, **BODIES[path]("x" * length)}
            assert (await client.post(path, body))[0] == 200
            assert watch.take() == {"loads": {decoded}, tokenizes: {tokenized}}, length


async def test_many_short_values_are_read_in_a_worker_too(watch: Watch) -> None:
    """A prompt of ids is no text to tokenize, but it is long to check."""
    watch.on(strict, "loads")
    watch.on(order, "read_stops")
    async with running(FakeEngine("a", context=5000), CONFIG) as client:
        await client.complete([1] * 1000)
        assert watch.take() == {"loads": {TEXT}, "read_stops": {TEXT}}
        await client.complete([1] * 10)
        assert watch.take() == {"loads": {LOOP}, "read_stops": {LOOP}}


async def test_schemas_and_tools_are_worked_on_in_a_worker_however_short_the_request(watch: Watch) -> None:
    codec = byte_codec(template=TOOLS_TEMPLATE)
    watch.on(codec.grammars, "compile")
    watch.on(codec, "encode_chat")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    engine = FakeEngine(lambda request: text_ids("{}"))
    async with running(engine, ServerConfig(), codec) as client:
        await client.chat("a")
        assert watch.take() == {"encode_chat": {LOOP}}
        await client.chat("a", tools=[tool])
        assert watch.take() == {"encode_chat": {TEXT}}
        await client.chat("a", response_format={"type": "json_object"})
        assert watch.take() == {"compile": {GRAMMARS}, "encode_chat": {TEXT}}
        await client.chat("a", tools=[tool], tool_choice="required", max_tokens=1)
        assert watch.take() == {"compile": {GRAMMARS}, "encode_chat": {TEXT}}
        await client.chat("a", response_format={"type": "json_object"})
        assert watch.take() == {"encode_chat": {TEXT}}, "what is compiled waits for no other"


async def test_grammars_wait_for_each_other_and_nobody_else_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """O066: a prompt is rendered while grammars are compiled; one too many is told to come later."""
    codec, gate = byte_codec(), threading.Event()
    compile, find, asked = codec.grammars.compile, codec.grammars.find, []
    monkeypatch.setattr(codec.grammars, "compile", lambda *a, **k: gate.wait(20) and compile(*a, **k))
    monkeypatch.setattr(codec.grammars, "find", lambda *a, **k: asked.append(1) or find(*a, **k))
    config = ServerConfig(max_compiling=2, long_prompt_bytes=10)
    async with running(FakeEngine("1"), config, codec) as client:

        def ask(number: int) -> asyncio.Task[Any]:
            form = {"type": "json_schema", "schema": {"const": number}}
            path, body = "/v1/chat/completions", chat_body(response_format=form)
            return asyncio.create_task(client.post(path, body))

        waiting = [ask(1), ask(2)]
        await until(lambda: len(asked) == 2)
        status, reply, headers = await ask(3)
        assert (status, reply["error"]["code"]) == (503, "server_is_overloaded")
        assert "Retry-After" in headers
        assert (await client.chat("a long one " * 10))["choices"]
        gate.set()
        assert [(await one)[0] for one in waiting] == [200, 200]
        assert (await ask(3))[0] == 200


async def test_many_choices_are_set_up_in_a_worker(watch: Watch) -> None:
    watch.on(order, "_build")
    watch.on(generate, "StopFilter")
    async with running(FakeEngine("a"), CONFIG) as client:
        for fields, where in (
            ({"n": generate.MANY}, LOOP),
            ({"n": generate.MANY + 1}, REPLIES),
            ({"best_of": generate.MANY + 1}, REPLIES),
            ({"prompt": ["a"] * (generate.MANY + 1)}, REPLIES),
        ):
            body = {"model": MODEL, "prompt": "a", "stop": ["zz"], **fields}
            assert (await client.post("/v1/completions", body))[0] == 200
            assert watch.take() == {"_build": {where}, "StopFilter": {where}}, fields


async def test_many_choices_are_submitted_a_few_at_a_time() -> None:
    """Others have their turn between them: here a task that counts the loop's turns."""
    engine, turns_of_submits, turn = FakeEngine("a"), list[int](), 0
    whole = engine.submit

    def submit(request: EngineRequest) -> Any:
        turns_of_submits.append(turn)
        return whole(request)

    engine.submit = submit  # type: ignore[method-assign]

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async with running(engine) as client:
        counting_turns = asyncio.create_task(count())
        await client.complete("a", n=50, max_tokens=1)
        counting_turns.cancel()
    assert len(turns_of_submits) == 50
    assert max(Counter(turns_of_submits).values()) <= generate.MANY


@pytest.mark.parametrize("form", [{"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}])
async def test_long_log_probabilities_are_written_in_a_worker(form: dict[str, Any], watch: Watch) -> None:
    watch.on(logprobs.LogprobsWriter, "write")
    watch.on(reply, "encode", "encode_long")
    async with running(FakeEngine("abcdefghijkl"), CONFIG) as client:
        await client.complete(max_tokens=8, **form)
        assert watch.take() == {"write": {LOOP}, "encode": {LOOP}}
        await client.complete(max_tokens=9, **form)
        assert watch.take() == {"write": {REPLIES}, "encode_long": {REPLIES}}


async def test_what_streams_say_at_once_is_written_in_a_worker_where_it_is_long(watch: Watch) -> None:
    """An echoed prompt comes in one piece; the tokens behind it one by one."""
    watch.on(logprobs.LogprobsWriter, "write")
    watch.on(streams, "encode_event")
    fields = {"model": MODEL, "logprobs": 1, "echo": True, "max_tokens": 3}
    async with running(FakeEngine("abc"), CONFIG) as client:
        short, _ = await client.stream("/v1/completions", {**fields, "prompt": "ab"})
        assert watch.take() == {"write": {LOOP}, "encode_event": {LOOP}}
        long, _ = await client.stream("/v1/completions", {**fields, "prompt": "ab" * 8})
        assert len(short) == len(long)
        assert watch.seen["write"][0] == watch.seen["encode_event"][0] == REPLIES
        assert LOOP in watch.seen["encode_event"]


@pytest.mark.parametrize("stream", [False, True])
async def test_raw_output_of_a_long_prompt_is_decoded_in_a_worker(watch: Watch, *, stream: bool) -> None:
    codec = byte_codec()
    watch.on(codec, "decode")
    config = ServerConfig(long_reply_tokens=8)
    async with running(FakeEngine("a", context=5000), config, codec) as client:
        for length, where in ((2, LOOP), (250, REPLIES)):
            body = {"model": MODEL, "prompt": "a" * length, "raw_output": True, "stream": stream}
            async with client.session.post(client.url + "/v1/completions", json=body) as response:
                assert response.status == 200
                await response.read()
            assert watch.take() == {"decode": {where}}, length


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_repeats_a_long_request_is_written_in_a_worker(
    watch: Watch, *, stream: bool
) -> None:
    """It holds the instructions and the tools once more; so do the first and the last event of a stream."""
    watch.on(streams, "encode_event")
    watch.on(reply, "encode", "encode_long")
    async with running(FakeEngine("a", context=5000), CONFIG) as client:
        for instructions, where in (("a", LOOP), ("a" * 400, REPLIES)):
            body = {"model": MODEL, "input": "a", "instructions": instructions, "stream": stream}
            async with client.session.post(client.url + "/v1/responses", json=body) as response:
                assert b"completed" in await response.read()
            if stream:
                assert watch.seen["encode_event"][0] == watch.seen["encode_event"][-1] == where
                watch.take()
            else:
                assert watch.take() == {"encode" if where == LOOP else "encode_long": {where}}


async def test_the_end_of_a_long_response_is_written_in_a_worker(watch: Watch) -> None:
    """It repeats all log-probabilities, which were short one by one."""
    watch.on(streams, "encode_event")
    body = {"model": MODEL, "input": "a", "include": ["message.output_text.logprobs"], "stream": True}
    async with (
        running(FakeEngine("abcdefghijkl"), CONFIG) as client,
        client.session.post(client.url + "/v1/responses", json=body) as response,
    ):
        assert b"response.completed" in await response.read()
    assert watch.seen["encode_event"][0] == LOOP
    assert watch.seen["encode_event"][-1] == REPLIES


async def test_the_start_makes_ready_what_grammars_wait_for_and_freezes_what_it_loaded(
    monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    codec, made = byte_codec(), []
    table = codec.grammars._make_table
    monkeypatch.setattr(codec.grammars, "_make_table", lambda: made.append(1) or table())
    watch.on(codec.grammars, "warm")

    async def start(config: EngineConfig) -> str:
        assert made == [1]
        return "engine"

    monkeypatch.setattr(lifecycle, "resolve", lambda model: type("Found", (), {"path": None}))
    monkeypatch.setattr(TextCodec, "load", lambda path: codec)
    monkeypatch.setattr(Engine, "start", start)
    try:
        assert await lifecycle._load(EngineConfig()) == ("engine", codec)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert watch.take()["warm"] != {LOOP}
    await asyncio.to_thread(codec.grammars.warm)
    assert made == [1]
    codec.grammars.close()


# ---------------------------------------------------------------- the interpreter's lock


def python_calls(call: Callable[[], Any]) -> int:
    """How often Python code is entered, where other threads can have their turn."""
    seen = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal seen
        seen += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("value", ["1", '"a"', "null", "[]", "1.5", "true"])
def test_others_have_their_turn_between_the_values_of_a_long_body(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "_FEW", 100)
    body = f'{{"a":[{",".join([value] * 300)}]}}'.encode()
    found: list[Any] = []
    assert python_calls(lambda: found.append(strict.loads(body))) >= 300
    assert found == [json.loads(body)]


@pytest.mark.parametrize(
    ("limit", "most", "holds"),
    [
        ("MAX_VALUES", 50, lambda n: [[1] * (n // 2), [2] * (n - n // 2 - 3)]),
        ("MAX_NESTS", 20, lambda n: [[] for _ in range(n - 2)]),
        ("MAX_KEYS", 30, lambda n: {str(i): 1 for i in range(n)}),
    ],
)
def test_a_body_may_hold_so_much_and_no_more(
    limit: str, most: int, holds: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "_FEW", 5)
    monkeypatch.setattr(counting, limit, most)
    fits, not_any_more = ({"a": holds(number)} for number in (most, most + 1))
    assert strict.loads(json.dumps(fits).encode()) == fits
    with pytest.raises(RequestError, match=f"more than {most}"):
        strict.loads(json.dumps(not_any_more).encode())


def test_what_a_message_shows_of_a_long_value_costs_no_more_than_what_it_shows() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for value in ({"a": {"b": [1] * 100_000}}, {str(i): i for i in range(100_000)}, ["x" * 100_000], deep):
        few = counting.beginning(value, 101)
        assert len(json.dumps(few)) < 1000
        assert strict.shown(value)[:100] == json.dumps(few)[:100]
    assert strict.shown({"a": [1, "b", None]}) == '{"a": [1, "b", null]}'


@pytest.mark.parametrize("inside", [False, True])
def test_an_error_about_a_huge_text_is_made_of_its_beginning(
    monkeypatch: pytest.MonkeyPatch, *, inside: bool
) -> None:
    errors: list[str] = []
    whole = strict._shortened
    monkeypatch.setattr(strict, "_shortened", lambda error: errors.append(error) or whole(error))
    huge = "x" * 200_000
    wrong = {"thinking": {"type": huge}} if inside else {"service_tier": huge}
    with pytest.raises(RequestError, match="none of the allowed values"):
        read_chat(json.dumps({**chat_body(), **wrong}).encode())
    assert len(errors[0]) < 2000


async def test_a_prompt_whose_bytes_alone_are_too_many_is_never_tokenized(watch: Watch) -> None:
    """O031: a prompt that can't fit costs no tokenization; and what counts is bytes, not characters."""
    codec = byte_codec()
    watch.on(codec, "encode", "encode_chat")
    async with running(FakeEngine(), CONFIG, codec) as client:
        # 4 for normalizers x 12 bytes of the longest token x 500 tokens of context.
        text = "\U0001f600" * 6001
        for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
            status, body, _ = await client.post(path, {"model": MODEL, **BODIES[path](text)})
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            assert body["error"]["param"] == field
    assert watch.take() == {}


def many_choices() -> Completion:
    """A reply whose lists are long, of every kind that there is."""
    entries = tuple(
        TokenLogprobs("é", -0.5 * i, None if i % 2 else (195, 169), (TopLogprob("b", -1.5, (98,), 98),), i, i)
        for i in range(40)
    )
    legacy = LegacyLogprobs(
        tokens=("a",) * 40,
        token_logprobs=(None, *[-0.25] * 39),
        top_logprobs=(None, *[{"a": -0.25, "b": -1.0}] * 39),
        text_offset=tuple(range(40)),
        token_ids=(97,) * 40,
    )
    told = [ContentLogprobs(entries), legacy, None]
    return Completion(
        id="cmpl-1",
        created=1,
        model=MODEL,
        system_fingerprint="fp",
        choices=tuple(CompletionChoice(index=i, text="\u2028", logprobs=told[i % 3]) for i in range(20)),
    )


def test_long_replies_are_the_same_to_the_byte_and_written_member_by_member() -> None:
    whole = many_choices()
    assert encode_long(whole) == encode(whole)
    tools = {"tools": ({"name": "a", "parameters": {"type": "object"}},) * 20, "n": (1, 2), "e": ()}
    for value in (tools, (), (tools,) * 20, whole.choices, None, [1]):
        assert encode_long(value) == encode(value)
    written: list[int] = []

    class Counting:
        def __init__(self, encoder: msgspec.json.Encoder) -> None:
            self._encoder = encoder

        def encode(self, value: Any) -> bytes:
            written.append(1)
            return self._encoder.encode(value)

    with pytest.MonkeyPatch.context() as patch:
        encoder = encoding._encoder
        patch.setattr(encoding, "_encoder", Counting(encoder))
        encode_long(whole)
    # Each choice by itself, and each token in it; the last call puts together what is written already.
    assert len(written) >= 20 + 14 * 40
