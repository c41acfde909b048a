"""An engine in memory with scripted tokens, a real TextCodec of 256 bytes, and a server around them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any, Literal

import msgspec
from aiohttp import ClientSession, web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine import (
    CacheReceipt,
    ContextLengthExceeded,
    Delta,
    EngineConfig,
    EngineInfo,
    EngineRequest,
    EngineStats,
    EngineUnavailable,
    Namespace,
    Overloaded,
    TextCodec,
    TokenLogprob,
)
from engine.text.parts import TokenizerParts
from server.app import create_app
from server.config import ServerConfig
from server.protocol import make_runner

MODEL = "tiny"
START, END = 256, 257
VOCAB = 258
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def text_ids(text: str, *, end: bool = True) -> list[int]:
    """Ids of a reply: its UTF-8 bytes, then the end token."""
    return [*text.encode(), *([END] if end else [])]


def byte_codec(*, template: str | None = CHATML, **defaults: float) -> TextCodec:
    """A TextCodec whose ids 0 to 255 are bytes."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    parts = TokenizerParts(
        tokenizer=tokenizer,
        vocab_size=VOCAB,
        bos_id=None,
        eos_ids=(END,),
        templates={} if template is None else {"default": template},
        generation_defaults=dict(defaults),
    )
    return TextCodec(parts)


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def logprob_of(token: int, top: int) -> TokenLogprob:
    """What FakeEngine says of a token: likelier the lower its id, the likeliest being the next ones below."""
    value = -(token + 1) / 1000
    best = [(token - i) % VOCAB for i in range(top)]
    return TokenLogprob(token, value, tuple((i, -(i + 1) / 1000) for i in best))


class FakeStream:
    """What FakeEngine.submit returns."""

    def __init__(self, engine: FakeEngine, request: EngineRequest) -> None:
        self.request = request
        self.receipt: CacheReceipt | None = None
        self.ending: str | None = None
        self._engine = engine
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._over = False

    def abort(self) -> None:
        if self.ending is None:
            self.ending = "abort"
            self._engine.wake.set()

    def stop(self) -> None:
        if self.ending is None:
            self.ending = "stop"
            self._engine.wake.set()

    def push(self, delta: Delta) -> None:
        self._deltas.put_nowait(delta)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Delta:
        if self._over:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._over = delta.finish_reason is not None
        return delta


class FakeEngine:
    """Replies what `reply` says, `per_delta` tokens a step, every sequence once a step.

    A prompt that ended is cached for its namespace. While `gate` is unset no step runs. `fail_after` ends
    a request with an error once it has generated so many tokens. With `max_running` the rest waits.
    """

    def __init__(
        self,
        reply: Callable[[EngineRequest], Sequence[int]] | str = "Hello world",
        *,
        context: int = 500,
        per_delta: int = 1,
        pace: float = 0.0,
        fail_after: int | Callable[[EngineRequest], int | None] | None = None,
        fault: Literal["step", "constraint"] = "step",
        max_running: int = 1000,
        max_waiting: int = 1000,
        model: str = MODEL,
    ) -> None:
        self.config = EngineConfig(max_waiting=max_waiting)
        self.reply = (lambda request: text_ids(reply)) if isinstance(reply, str) else reply
        self.per_delta, self.pace, self.fail_after = per_delta, pace, fail_after
        self.fault: Literal["step", "constraint"] = fault
        self.max_running = max_running
        self.info = EngineInfo(
            model=model,
            dtype="float32",
            executor="reference",
            threads=1,
            context_length=context,
            vocab_size=VOCAB,
            page_size=16,
            num_pages=100,
            kv_bytes=1000,
            fingerprint="fp-test",
            bit_identical=True,
        )
        self.submitted: list[EngineRequest] = []
        self.generated: dict[FakeStream, int] = {}
        self.finished: dict[str, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.wake = asyncio.Event()
        self.live: list[FakeStream] = []
        self.steps = 0
        self._cached: list[tuple[Namespace, tuple[int, ...]]] = []
        self._totals = [0, 0]
        self._draining = False
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())

    @property
    def ready(self) -> bool:
        return not self._draining and not self._failure.done()

    def submit(self, request: EngineRequest) -> FakeStream:
        if not self.ready:
            raise EngineUnavailable("the engine is shutting down")
        if len(request.prompt) >= self.info.context_length:
            raise ContextLengthExceeded("too long", param="prompt")
        if len(self.live) - self.max_running >= self.config.max_waiting:
            raise Overloaded("the queue is full")
        stream = FakeStream(self, request)
        self.submitted.append(request)
        self.generated[stream] = 0
        self.live.append(stream)
        self.wake.set()
        return stream

    def stats(self) -> EngineStats:
        running = min(len(self.live), self.max_running)
        fields = dict.fromkeys(EngineStats.__struct_fields__, 0) | {
            "running": running,
            "waiting": len(self.live) - running,
            "free_pages": self.info.num_pages - 1 - running,
            "pinned_pages": running,
            "requests": len(self.submitted),
            "prompt_tokens": self._totals[0],
            "cached_tokens": self._totals[1],
            "generated_tokens": sum(self.generated.values()),
            "steps": self.steps,
            "finished": dict(self.finished),
        }
        return EngineStats(**fields)

    async def drain(self) -> None:
        self._draining = True
        while self.live and not self._failure.done():
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        self._draining = True
        for stream in self.live:
            stream.abort()
        await asyncio.sleep(0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for stream in list(self.live):
            self._end(stream, stream.ending or "abort")

    async def failed(self) -> BaseException:
        return await asyncio.shield(self._failure)

    def die(self, error: BaseException) -> None:
        """Fail for good, as the real engine does after too many failed steps."""
        self._failure.set_result(error)
        for stream in list(self.live):
            self._end(stream, "error", error=f"the engine has failed: {error}")

    async def _run(self) -> None:
        while True:
            if not self.live:
                self.wake.clear()
                await self.wake.wait()
            self._sweep()
            if not self.gate.is_set():
                # Like the real loop between steps: what left the queue is noticed although no step runs.
                await asyncio.sleep(0.005)
                continue
            self.steps += 1
            for stream in self.live[: self.max_running]:
                self._step(stream)
            await asyncio.sleep(self.pace)

    def _sweep(self) -> None:
        for stream in [s for s in self.live if s.ending is not None]:
            self._end(stream, str(stream.ending))

    def _step(self, stream: FakeStream) -> None:
        request = stream.request
        if stream.receipt is None:
            stored = self._stored(request)
            cached = min(stored, len(request.prompt) - 1)
            if request.cache_max_len is not None:
                cached = min(cached, request.cache_max_len)
            stream.receipt = CacheReceipt(len(request.prompt), cached, len(request.prompt) - stored)
            self._totals[0] += stream.receipt.prompt_tokens
            self._totals[1] += stream.receipt.cached_tokens
        at = self.generated[stream]
        fail_after = self.fail_after(request) if callable(self.fail_after) else self.fail_after
        if fail_after is not None and at >= fail_after:
            self._end(stream, "error", error="the step that ran this request failed: boom")
            return
        room = request.params.max_tokens - at
        script = list(self.reply(request))
        ids = tuple(script[at : at + min(self.per_delta, room)])
        stops = () if request.params.ignore_eos else request.params.stop_token_ids
        end = next((i for i, token in enumerate(ids, start=1) if token in stops), None)
        ids, ended = ids[:end], end is not None
        self.generated[stream] = at + len(ids)
        if ended or at + len(ids) >= min(request.params.max_tokens, len(script)):
            self._end(stream, "stop" if ended else "length", ids)
        else:
            stream.push(self._delta(stream, ids, None, first=at == 0))

    def _end(
        self, stream: FakeStream, reason: Any, ids: tuple[int, ...] = (), *, error: str | None = None
    ) -> None:
        self.live.remove(stream)
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self._cached.append((stream.request.namespace, stream.request.prompt))
        first = self.generated[stream] == len(ids)
        stream.push(self._delta(stream, ids, reason, first=first, error=error))

    def _delta(
        self,
        stream: FakeStream,
        ids: tuple[int, ...],
        reason: Any,
        *,
        first: bool,
        error: str | None = None,
    ) -> Delta:
        params, request = stream.request.params, stream.request
        scored: tuple[TokenLogprob | None, ...] = ()
        if first and request.prompt_logprobs is not None:
            start, top = request.prompt_logprobs_from, request.prompt_logprobs
            scored = tuple(
                None if i == 0 else logprob_of(token, top)
                for i, token in enumerate(request.prompt)
                if i >= start
            )
        return Delta(
            token_ids=ids,
            logprobs=() if params.logprobs is None else tuple(logprob_of(i, params.logprobs) for i in ids),
            finish_reason=reason,
            receipt=stream.receipt if first or reason is not None else None,
            error=error,
            fault=self.fault,
            prompt_logprobs=scored,
        )

    def _stored(self, request: EngineRequest) -> int:
        best = 0
        for namespace, prompt in self._cached:
            if namespace == request.namespace:
                pairs = zip(prompt, request.prompt, strict=False)
                same = next(
                    (i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(request.prompt))
                )
                best = max(best, same)
        return best


class Client:
    """An HTTP client of one test server."""

    def __init__(self, url: str, session: ClientSession, engine: FakeEngine) -> None:
        self.url, self.session, self.engine = url, session, engine
        self.host, self.port = url.removeprefix("http://").split(":")[0], int(url.rsplit(":", 1)[1])

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """POST JSON (or raw bytes); return status, decoded body and headers."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        given = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        async with self.session.post(self.url + path, data=BytesIO(data), headers=given) as response:
            return response.status, json.loads(await response.read()), response.headers

    async def get(self, path: str) -> tuple[int, Any, Any]:
        """GET JSON."""
        async with self.session.get(self.url + path) as response:
            return response.status, json.loads(await response.read()), response.headers

    async def complete(self, prompt: Any = "abc", **fields: Any) -> Any:
        """Complete a prompt; return the reply's body."""
        status, body, _ = await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})
        assert status == 200, body
        return body

    async def chat(self, text: str = "hi", **fields: Any) -> Any:
        """Send one user turn; return the reply's body."""
        status, body, _ = await self.post("/v1/chat/completions", chat_body(text, **fields))
        assert status == 200, body
        return body

    async def stream(self, path: str, body: dict[str, Any]) -> tuple[list[Any], Any]:
        """Stream a reply; return its events, decoded but for [DONE], and the headers."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            text = await response.text()
            assert response.status == 200, text
            return events_of(text), response.headers


def chat_body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """Body of a chat with one user turn."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def events_of(text: str) -> list[Any]:
    """Decode an event stream by the letter: blocks, `data:` lines; comments are skipped."""
    found: list[Any] = []
    assert text == "" or text.endswith("\n\n")
    for block in text.split("\n\n")[:-1]:
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines), block
        if lines:
            (line,) = lines
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


@asynccontextmanager
async def running(
    engine: Any, config: ServerConfig | None = None, codec: TextCodec | None = None
) -> AsyncIterator[Client]:
    """Serve an engine on a real socket."""
    config = config or ServerConfig()
    runner = make_runner(create_app(engine, codec or byte_codec(), config), config)  # type: ignore[arg-type]
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with ClientSession() as session:
            yield Client(f"http://{host}:{port}", session, engine)
    finally:
        await runner.cleanup()
        await engine.close()


async def until(reached: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something is so; fail the test if it never is."""
    async with asyncio.timeout(seconds):
        while not reached():
            await asyncio.sleep(0.002)
