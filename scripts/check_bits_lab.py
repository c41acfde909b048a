"""What the bit check works with: cold results of some cases, and sessions to hold against them."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.cache.pool import PagePool
from engine.plan import StepPlan
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.types import EngineRequest, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from engine.runner import Runner

Prompt = tuple[int, ...]


class Output(NamedTuple):
    """What one request gave: token ids, their log-probabilities, how much came from the cache, and the
    prompt's log-probabilities."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    cached: int
    scores: tuple[TokenLogprob | None, ...] = ()

    def same_bits(self, other: Output) -> bool:
        return self._replace(cached=0) == other._replace(cached=0)


class Parts(NamedTuple):
    """What has come of an output."""

    ids: list[int]
    logprobs: list[TokenLogprob]
    cached: list[int]
    scores: list[TokenLogprob | None]


class Case(NamedTuple):
    """A prompt and how to sample from it."""

    prompt: Prompt
    params: SamplingParams


class Session:
    """A scheduler with an empty cache on a runner that is already loaded."""

    def __init__(self, runner: Runner, tile: int, **limits: Any) -> None:
        info = runner.info
        self.runner = runner
        self.scheduler = Scheduler(
            PagePool(info.num_pages, info.page_size),
            Limits(**{"context": info.context_length, "align": tile, "step_ms": 1e9, **limits}),
            runner.costs,
        )
        self.step_rows: set[int] = set()
        self.head_rows: set[int] = set()
        self._parts: dict[int, Parts] = {}

    def add(self, case: Case, namespace: Hashable = "bits", **fields: Any) -> int:
        request = EngineRequest(request_id="bits", prompt=case.prompt, params=case.params, **fields)
        id = self.scheduler.submit(request, namespace, case.params.seed or 0)
        self._parts[id] = Parts([], [], [], [])
        return id

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.step_rows.add(plan.rows)
            self.head_rows.add(len(plan.samples))
            self.scheduler.commit(plan, self.runner.run(plan))
        for id, delta in self.scheduler.take_events():
            parts = self._parts[id]
            parts.ids.extend(delta.token_ids)
            parts.logprobs.extend(delta.logprobs)
            parts.scores.extend(delta.prompt_logprobs)
            if delta.finish_reason == "error":
                raise RuntimeError(delta.error)
            if delta.receipt is not None:
                parts.cached.append(delta.receipt.cached_tokens)
        return plan

    def finish(self) -> None:
        while self.step() is not None:
            pass
        self.scheduler.check()

    def output(self, id: int) -> Output:
        parts = self._parts[id]
        return Output(tuple(parts.ids), tuple(parts.logprobs), parts.cached[0], tuple(parts.scores))

    def begun(self, id: int) -> bool:
        """Whether it has given a token."""
        return bool(self._parts[id].ids)

    def run(self, cases: Iterable[Case]) -> list[Output]:
        """Run all at once."""
        ids = [self.add(case) for case in cases]
        self.finish()
        return [self.output(id) for id in ids]

    def run_apart(self, cases: Iterable[tuple[int, Case]], **fields: Any) -> list[Output]:
        """Run all at once, each in the namespace of its number."""
        ids = [self.add(case, index, **fields) for index, case in cases]
        self.finish()
        return [self.output(id) for id in ids]

    def fill(self, cases: Iterable[tuple[Hashable, Case]]) -> None:
        """Compute prompts at once, each in a namespace, and nothing more."""
        for namespace, case in cases:
            self.add(case._replace(params=SamplingParams(max_tokens=0)), namespace)
        self.finish()


class Lab:
    """Cold solo results of some cases, and variants to hold against them.

    `failures` names variant and case of each result that differs, `compared` counts by variant.
    """

    def __init__(self, runner: Runner, tile: int, cases: Sequence[Case]) -> None:
        self.runner, self.tile, self.cases = runner, tile, cases
        self.cascade_rows = 0
        self.failures: list[str] = []
        self.compared: dict[str, int] = {}
        self.solo = [self._cold(case) for case in cases]

    def session(self, **limits: Any) -> Session:
        return Session(self.runner, self.tile, **limits)

    def batches(self) -> Iterator[list[tuple[int, Case]]]:
        """The cases with their numbers, sixteen at a time, long and short."""
        order = list(enumerate(self.cases))
        random.Random(7).shuffle(order)
        for at in range(0, len(order), 16):
            yield order[at : at + 16]

    def close(self, session: Session) -> None:
        """Take over what a session has seen."""
        self.cascade_rows += session.scheduler.counters.cascade_rows

    def _cold(self, case: Case) -> Output:
        session = self.session()
        (output,) = session.run([case])
        self.close(session)
        if output.cached:
            raise RuntimeError("the cold run was not cold")
        return output

    def check(self, variant: str, index: int, output: Output, cached: int | None = None) -> None:
        """Compare with the cold run; `cached` is how many tokens must have come from the cache."""
        self.compare(variant, index, self.solo[index], output, cached)

    def compare(self, variant: str, index: int, want: Output, output: Output, cached: int | None) -> None:
        self.compared[variant] = self.compared.get(variant, 0) + 1
        name = f"{variant}, prompt {index}"
        if not want.same_bits(output):
            first = next(
                (i for i, (a, b) in enumerate(zip(want.logprobs, output.logprobs, strict=False)) if a != b),
                "?",
            )
            self.failures.append(f"{name}: differs from the cold run at output token {first}")
        if cached is not None and output.cached != cached:
            self.failures.append(f"{name}: {output.cached} tokens cached, not {cached}")
