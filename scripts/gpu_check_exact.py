"""Correctness checks of the GPU check: against the oracle, and bit for bit in deterministic mode."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_check_cases import PAGE, Case, Member, random_case, step_plan
from torch import Tensor

from engine import CacheReceipt, Engine, EngineConfig, EngineRequest, SamplingParams, TokenLogprob
from engine.attention.base import AttentionBackend, KvShape
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.flashinfer_graph import GraphLimits
from engine.attention.reference import ReferenceAttention
from engine.models import cuda_setup, store
from engine.pipeline import Pipeline
from engine.sampling.sampler import Sampler
from engine.scratch import Chunk, flat_plan

DTYPE = torch.bfloat16
# bf16 keeps 8 bits; a row's output is rounded once a level.
ABSOLUTE, RELATIVE = 1e-2, 1.6e-2
LOGPROB = 0.15
_GRAPHS = GraphLimits(rows=64, indices=20_000)
# A case of few rows that has a shared level.
_SMALL = 11


class Check(NamedTuple):
    """One thing that was compared, whether it held, and by how much."""

    name: str
    ok: bool
    detail: str


class Rows(NamedTuple):
    """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor

    def of(self, at: slice) -> Rows:
        return Rows(self.q[at], self.k[at], self.v[at])


class Executors:
    """Executors over the same random KV, which a case's rows are given to."""

    def __init__(self, shape: KvShape, device: str, seed: int) -> None:
        self.shape, self.device = shape, device
        self._random = torch.Generator().manual_seed(seed)
        self._slots = torch.arange(PAGE, shape.num_pages * PAGE)
        self._kv = self._draw(len(self._slots), 2, shape.num_kv_heads, shape.head_dim)

    def fill(self, backend: AttentionBackend) -> AttentionBackend:
        backend.write_rows(0, self._slots, self._kv)
        return backend

    def own(self, **options: bool | GraphLimits) -> AttentionBackend:
        return self.fill(FlashInferAttention(self.shape, DTYPE, device=self.device, **options))  # type: ignore[arg-type]

    def oracle(self) -> AttentionBackend:
        return self.fill(ReferenceAttention(self.shape, align=PAGE))

    def rows(self, count: int) -> Rows:
        heads, kv_heads, size = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        return Rows(*(self._draw(count, n, size) for n in (heads, kv_heads, kv_heads)))

    def run(self, backend: AttentionBackend, members: Sequence[Member], rows: Rows) -> Tensor:
        """The rows' outputs [rows, heads * head_dim], on the CPU."""
        backend.begin(step_plan(members))
        key = getattr(backend, "graph_key", None)
        padding = key.rows - len(rows.q) if key is not None else 0
        device = "cpu" if isinstance(backend, ReferenceAttention) else self.device
        padded = (torch.cat((x, x.new_ones(padding, *x.shape[1:]))).to(device) for x in rows)
        return backend.attend(0, *padded)[: len(rows.q)].cpu()

    def _draw(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._random).to(DTYPE)


def run_every_kernel(model: Path, device: str) -> None:
    """Run what the checks run, once and on little, so that FlashInfer compiles all of it."""
    for _ in attention_checks(device, [_SMALL]):
        pass
    config = EngineConfig(model=str(model))
    decoder = cuda_setup.load_cuda_decoder(config, store.resolve(str(model)), device)
    sizes = decoder.config
    shape = KvShape(sizes.num_layers, 8, PAGE, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
    attention = FlashInferAttention(shape, decoder.dtype, device=device)
    pipeline = Pipeline(decoder, attention, Sampler(sizes.vocab_size))
    pipeline.logits(pipeline.hidden(flat_plan([Chunk(1, 0, [1, 2, 3])], PAGE, PAGE)), [2])


def attention_checks(device: str, seeds: Sequence[int]) -> Iterator[Check]:
    """Trees, the same rows flat, and decode steps in a graph's shapes, against the oracle."""
    for seed in seeds:
        for head_dim in (64, 128):
            for decode in (False, True):
                yield from _attention_case(random_case(seed, head_dim, decode=decode), device, decode)


def _attention_case(case: Case, device: str, decode: bool) -> Iterator[Check]:
    executors = Executors(case.shape, device, seed=len(case.members))
    rows = executors.rows(case.rows)
    expected = executors.run(executors.oracle(), case.members, rows)
    own = executors.own()
    flat = [member.flat() for member in case.members]
    yield close(f"{case.name}, cascade", executors.run(own, case.members, rows), expected)
    yield close(f"{case.name}, flat", executors.run(own, flat, rows), expected)
    if decode:
        fixed = executors.own(graphs=_GRAPHS)
        yield close(f"{case.name}, graph shapes", executors.run(fixed, case.members, rows), expected)


def close(name: str, given: Tensor, expected: Tensor) -> Check:
    """Whether two results agree within what bf16 can keep."""
    wide, exact = given.float(), expected.float()
    excess = (wide - exact).abs() - (ABSOLUTE + RELATIVE * exact.abs())
    finite = bool(torch.isfinite(wide).all())
    return Check(
        name,
        finite and bool((excess <= 0).all()),
        f"largest difference {(wide - exact).abs().max():.4f}" if finite else "not finite",
    )


def deterministic_checks(device: str, seeds: Sequence[int]) -> Iterator[Check]:
    """Name the pairs whose bits are compared: what changes between the two is all that may not matter."""
    for seed in seeds:
        for head_dim in (64, 128):
            yield from _deterministic_case(random_case(seed, head_dim), device)


def _deterministic_case(case: Case, device: str) -> Iterator[Check]:
    executors = Executors(case.shape, device, seed=3)
    own = executors.own(deterministic=True)
    rows = executors.rows(case.rows)
    members = [member.flat() for member in case.members]
    places = _places(members)
    together = executors.run(own, members, rows)
    yield close(
        f"{case.name}, deterministic", together, executors.run(executors.oracle(), case.members, rows)
    )
    alone = [executors.run(own, [m], rows.of(at)) for m, at in zip(members, places, strict=True)]
    yield equal(f"{case.name}: batched, each alone", torch.cat(alone), together)

    chunked = [
        executors.run(
            own, [chunk], rows.of(slice(at.start + chunk.start - m.start, None)).of(slice(chunk.rows))
        )
        for m, at in zip(members, places, strict=True)
        for chunk in m.chunks(3)
    ]
    yield equal(f"{case.name}: whole, in chunks of 3 rows", torch.cat(chunked), together)

    order = list(range(len(members)))
    random.Random(1).shuffle(order)
    shuffled = Rows(*(torch.cat([x[places[i]] for i in order]) for x in rows))
    mixed = executors.run(own, [members[i] for i in order], shuffled)
    yield equal(
        f"{case.name}: in this order, in another",
        mixed,
        torch.cat([together[places[i]] for i in order]),
    )
    yield equal(f"{case.name}: once, again", executors.run(own, members, rows), together)


def _places(members: Sequence[Member]) -> list[slice]:
    found, at = [], 0
    for member in members:
        found.append(slice(at, at + member.rows))
        at += member.rows
    return found


def equal(name: str, given: Tensor, expected: Tensor) -> Check:
    """Whether two results are the same to the bit."""
    different = int((given != expected).any(1).sum())
    return Check(name, torch.equal(given, expected), f"{different} of {len(given)} rows differ")


class Reply(NamedTuple):
    """What one request gave."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    receipt: CacheReceipt | None
    error: str | None


async def replies(
    engine: Engine, prompts: Sequence[tuple[int, ...]], together: bool, max_tokens: int = 12
) -> list[Reply]:
    """Greedy replies with log-probabilities, all at once or one after the other."""

    async def one(prompt: tuple[int, ...]) -> Reply:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=1)
        deltas = [
            d async for d in engine.submit(EngineRequest(request_id="check", prompt=prompt, params=params))
        ]
        return Reply(
            tuple(t for d in deltas for t in d.token_ids),
            tuple(p for d in deltas for p in d.logprobs),
            deltas[-1].receipt,
            deltas[-1].error,
        )

    if together:
        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
    return [await one(prompt) for prompt in prompts]


def prompts_of(vocab: int) -> list[tuple[int, ...]]:
    """Eight prompts under two long beginnings, of which one lies under the other, and a short loner."""
    rng = random.Random(7)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(count))

    root, branch = draw(330), draw(170)
    return [
        *(root + draw(20 + i) for i in range(4)),
        *(root + branch + draw(9 + 5 * i) for i in range(3)),
        draw(5),
    ]


async def engine_checks(model: Path, executor: str, oracle: str = "reference") -> list[Check]:
    """The engine end to end: against another executor's, receipts to the token, and the cascade at work."""
    checks = []
    fields = {"model": str(model), "kv_gb": 0.2, "max_running": 16}
    reference = await Engine.start(EngineConfig(executor=oracle, **fields))  # type: ignore[arg-type]
    prompts = prompts_of(reference.info.vocab_size)
    expected = await replies(reference, prompts, together=True, max_tokens=1)
    await reference.close()

    engine = await Engine.start(EngineConfig(executor=executor, cascade="force", **fields))  # type: ignore[arg-type]
    cold = await replies(engine, prompts, together=True)
    warm = await replies(engine, prompts, together=True)
    stats = engine.stats()
    engine.check()
    await engine.close()
    errors = [reply.error for reply in (*cold, *warm) if reply.error]
    checks.append(Check("no request fails", not errors, f"{len(errors)} errors {errors[:1]}"))
    first = [_apart(given, exact) for given, exact in zip(cold, expected, strict=True)]
    checks.append(
        Check("first tokens' log-probabilities", max(first) < LOGPROB, f"largest difference {max(first):.4f}")
    )
    cached = [reply.receipt.cached_tokens if reply.receipt else -1 for reply in warm]
    wanted = [len(prompt) - 1 for prompt in prompts]
    checks.append(Check("a repeat is cached to the last token", cached == wanted, f"{cached}"))
    checks.append(
        Check(
            "shared prefixes are read as groups", stats.cascade_groups > 0, f"{stats.cascade_groups} groups"
        )
    )
    return checks


def _apart(given: Reply, exact: Reply) -> float:
    """How far the first log-probabilities are apart; ties may be broken either way."""
    if not given.logprobs or not exact.logprobs:
        return float("inf")
    return abs(given.logprobs[0].logprob - exact.logprobs[0].logprob)


async def deterministic_engine_checks(model: Path, executor: str) -> list[Check]:
    """Cold, warm, alone and batched: the same ids and the same log-probabilities to the bit."""
    config = EngineConfig(
        model=str(model),
        executor=executor,
        deterministic=True,
        kv_gb=0.2,
        max_running=16,  # type: ignore[arg-type]
    )
    runs = {}
    for name, together in (("alone", False), ("batched", True)):
        engine = await Engine.start(config)
        prompts = prompts_of(engine.info.vocab_size)
        runs[f"cold, {name}"] = await replies(engine, prompts, together)
        runs[f"warm, {name}"] = await replies(engine, prompts, together)
        promised = engine.info.bit_identical
        await engine.close()
    base = [(reply.tokens, reply.logprobs) for reply in runs["cold, alone"]]
    checks = [Check("deterministic engine: the start-up probe finds equal bits", promised, str(promised))]
    for name in ("warm, alone", "cold, batched", "warm, batched"):
        other = [(reply.tokens, reply.logprobs) for reply in runs[name]]
        same = sum(a == b for a, b in zip(base, other, strict=True))
        checks.append(
            Check(
                f"deterministic engine: cold, alone = {name}", base == other, f"{same} of {len(base)} replies"
            )
        )
    return checks
