"""What tests over a real (tiny) engine share: requests, and what came back."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

from engine import Delta, Engine, EngineRequest, RequestStream, SamplingParams

Start = Callable[..., Awaitable[Engine]]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(320) for _ in range(length))


def request(ids: tuple[int, ...], max_tokens: int = 8, **fields: object) -> EngineRequest:
    """Greedy, with log-probabilities and two alternatives, unless `params` says otherwise."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    return EngineRequest(**{"request_id": "test", "prompt": ids, "params": params, **fields})  # type: ignore[arg-type]


class Result:
    """All that one stream gave."""

    def __init__(self, deltas: list[Delta]) -> None:
        self.deltas = deltas
        self.ids = tuple(t for d in deltas for t in d.token_ids)
        self.logprobs = tuple(p for d in deltas for p in d.logprobs)
        self.scores = tuple(p for d in deltas for p in d.prompt_logprobs)
        self.finish = deltas[-1].finish_reason
        self.receipt = deltas[-1].receipt
        self.error = deltas[-1].error

    @property
    def cached(self) -> int:
        assert self.receipt is not None
        return self.receipt.cached_tokens


async def collect(stream: RequestStream) -> Result:
    """Read a stream to its end."""
    deltas = [delta async for delta in stream]
    assert [d.finish_reason is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert not any(d.prompt_logprobs for d in deltas[1:])
    return Result(deltas)


async def run(engine: Engine, req: EngineRequest) -> Result:
    return await collect(engine.submit(req))
