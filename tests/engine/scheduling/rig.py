"""A scheduler, a fake runner and a stream reader for each request; all is checked after every call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from engine.cache.node import Match
from engine.cache.pool import PagePool
from engine.cache.tree import PrefixTree
from engine.plan import CascadeLevel, Int32, StepCosts, StepPlan
from engine.scheduling.cascade import CascadePlanner, Planned, Rules
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as Queued
from engine.types import (
    CacheReceipt,
    Constraint,
    Delta,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenLogprob,
)
from tests.engine.scheduling.fake_runner import FakeRunner, Truth
from tests.engine.scheduling.truth import STOP, alone, scores


class Stream:
    """What one client got, and what it should get. `ended_by` is what the test itself did to it."""

    def __init__(self, request: EngineRequest, seed: int, context: int) -> None:
        self.request = request
        self.expected, self.natural = alone(request, seed, context)
        self.expected_scores = scores(request)
        self.scores: tuple[TokenLogprob | None, ...] = ()
        self.error: str | None = None
        self.tokens: list[int] = []
        self.receipts: list[CacheReceipt | None] = []
        self.finish: FinishReason | None = None
        self.ended_by: set[FinishReason] = set()

    @property
    def receipt(self) -> CacheReceipt:
        receipt = self.receipts[-1]
        assert receipt is not None, "it never ran"
        return receipt

    @property
    def cached(self) -> int:
        return self.receipt.cached_tokens

    @property
    def written(self) -> int:
        return self.receipt.written_tokens

    @property
    def all_tokens(self) -> tuple[int, ...]:
        return self.request.prompt + tuple(self.tokens)


class CheckedPlanner(CascadePlanner):
    """Each plan must be what a planner that knows no earlier step gives, and leave the one before as it was.

    `reused` counts the plans that took over all shared levels of the one before.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.reused = 0
        self._shared: tuple[CascadeLevel, ...] = ()
        self._given: list[tuple[Int32, bytes]] = []

    def plan(self, tables: list[Sequence[int]], starts: list[int], rows: list[int]) -> Planned:
        planned = super().plan(tables, starts, rows)
        assert all(array.tobytes() == before for array, before in self._given), "an older plan was changed"
        fresh = CascadePlanner(self.rules).plan(tables, starts, rows)
        assert planned.order == fresh.order
        ours, theirs = planned.attention, fresh.attention
        assert ours._replace(levels=(), kv_start=0, positions=0) == theirs._replace(  # type: ignore[arg-type]
            levels=(), kv_start=0, positions=0
        )
        assert len(ours.levels) == len(theirs.levels)
        arrays = [*sum(ours.levels, ()), ours.kv_start, ours.positions]
        for one, other in zip(
            arrays, [*sum(theirs.levels, ()), theirs.kv_start, theirs.positions], strict=True
        ):
            assert one.dtype == other.dtype == np.int32
            assert np.array_equal(one, other), "not what a planner without memory gives"
        shared = ours.levels[:-1]
        self.reused += len(shared) > 0 and all(
            a is b for a, b in zip(sum(shared, ()), sum(self._shared, ()), strict=False)
        )
        self._shared, self._given = shared, [(array, array.tobytes()) for array in arrays]
        return planned


class CheckedScheduler(Scheduler):
    """What it says the cache holds of a prompt must be what a whole look finds."""

    def _stored(self, seq: Queued, match: Match) -> int:
        stored = super()._stored(seq, match)
        assert seq.tokens == list(seq.request.prompt), "it has begun before"
        assert stored == PrefixTree.match(self.tree, seq.namespace, seq.tokens, len(seq.tokens)).length
        return stored


class Rig:
    """Small pools by default: they make everything happen that large ones only do at night."""

    def __init__(
        self, pages: int = 64, page_size: int = 4, costs: StepCosts | None = None, **limits: object
    ) -> None:
        self.pool = PagePool(pages + 1, page_size)
        limits.setdefault("context", pages * page_size)
        limits.setdefault("align", page_size)
        self.scheduler = CheckedScheduler(self.pool, Limits(**limits), costs or StepCosts())  # type: ignore[arg-type]
        self.planner = CheckedPlanner(self.scheduler._planner.rules)
        self.scheduler._planner = self.planner
        self.runner = FakeRunner(pages + 1, page_size)
        self.streams: dict[int, Stream] = {}
        self.ended: list[int] = []
        self.in_flight: StepPlan | None = None

    # -- operations ------------------------------------------------------------------------------

    def submit(
        self,
        prompt: object,
        max_tokens: int = 1,
        *,
        namespace: Hashable = "",
        seed: int = 0,
        ignore_eos: bool = True,
        cache_max_len: int | None = None,
        prompt_logprobs: int | None = None,
        prompt_logprobs_from: int = 0,
        priority: int = 0,
        constraint: Constraint | None = None,
        **params: float,
    ) -> int:
        request = EngineRequest(
            request_id="same for all",
            prompt=tuple(prompt),
            params=SamplingParams(
                max_tokens=max_tokens, stop_token_ids=(STOP,), ignore_eos=ignore_eos, **params
            ),
            cache_max_len=cache_max_len,
            prompt_logprobs=prompt_logprobs,
            prompt_logprobs_from=prompt_logprobs_from,
            priority=priority,
            constraint=constraint,
        )
        id = self.scheduler.submit(request, namespace, seed)
        assert id not in self.streams, "an id is used twice"
        self.streams[id] = Stream(request, seed, self.scheduler.limits.context)
        self.runner.truth[id] = Truth(namespace, request, seed, list(request.prompt))
        self.audit()
        return id

    def plan(self) -> StepPlan | None:
        assert self.in_flight is None
        running, waiting = list(self.scheduler.roster.running), list(self.scheduler.roster.waiting)
        preemptions = self.scheduler.counters.preemptions
        self.in_flight = self.scheduler.plan()
        lost = self._check_order(running, waiting)
        assert self.scheduler.counters.preemptions - preemptions == lost, (
            "a place was lost and won again at once"
        )
        if self.in_flight is not None:
            assert self.in_flight.rows <= self.scheduler.limits.max_step_tokens
            assert self.scheduler.running <= self.scheduler.limits.max_running
        self.audit()
        return self.in_flight

    def commit(self, bad: frozenset[int] = frozenset()) -> None:
        """Run and commit the step in flight; `bad` are positions in the plan's sequences."""
        plan = self._landed()
        result = self.runner.run(plan, bad)
        for index in bad:
            self.streams[plan.sequence_ids[index]].ended_by.add("error")
        self.scheduler.commit(plan, result)
        self.audit()

    def fail(self, *, early: bool = False) -> None:
        """The step in flight raises."""
        plan = self._landed()
        self.runner.run_and_raise(plan, early=early)
        for id in plan.sequence_ids:
            self.streams[id].ended_by.add("error")
        self.scheduler.fail(plan, "the step raised")
        self.audit()

    def stop(self, id: int, reason: FinishReason = "abort") -> None:
        if self.streams[id].finish is None:
            self.streams[id].ended_by.add(reason)
        self.scheduler.stop(id, reason)
        self.audit()

    def shed(self, priority: int) -> int | None:
        """The queue is full for a request of `priority`; returns whom that cost his place."""
        begun = {id for id, s in self.streams.items() if s.receipts or s.finish is not None}
        begun |= {
            s.id
            for s in (*self.scheduler.roster.running, *self.scheduler.roster.waiting)
            if s.receipt is not None
        }
        queue = [(-s.request.priority, id) for id, s in self.streams.items() if id not in begun]
        last = max(queue, default=None)
        victim = last[1] if last is not None and -last[0] < priority else None
        if victim is not None:
            self.streams[victim].ended_by.add("shed")
        assert self.scheduler.shed(priority) == (victim is not None)
        self.audit()
        assert victim is None or self.streams[victim].finish == "shed"
        return victim

    def preempt(self, id: int) -> None:
        self.scheduler.preempt(id)
        self.audit()

    def clear(self) -> None:
        self.scheduler.tree.clear()
        assert self.scheduler.tree.evictable_pages == 0
        self.audit()

    def step(self) -> bool:
        """Plan, run and commit; False if there was nothing to run."""
        if self.plan() is None:
            return False
        self.commit()
        return True

    def drain(self) -> int:
        """Run until all have ended; returns the steps. A deadlock or livelock is an AssertionError."""
        if self.in_flight is not None:
            self.commit()
        steps, most = 0, self.most_steps()
        while not self.scheduler.idle:
            assert self.step(), "requests wait and nothing can run"
            steps += 1
            assert steps <= most, f"{most} steps and still no end"
        self.audit_idle()
        return steps

    def run(self, prompt: object, max_tokens: int = 1, **how: object) -> Stream:
        """Submit one request and run until all have ended."""
        id = self.submit(prompt, max_tokens, **how)  # type: ignore[arg-type]
        self.drain()
        return self.streams[id]

    def most_steps(self) -> int:
        """A generous bound: every step brings somebody on by a row, and whoever is oldest is never undone,
        so each request costs the others at most one start from the beginning."""
        live = [s for s in self.streams.values() if s.finish is None]
        rows = sum(len(s.request.prompt) + len(s.expected) + 1 for s in live)
        return 10 + rows * (len(live) + 1)

    def _landed(self) -> StepPlan:
        plan, self.in_flight = self.in_flight, None
        assert plan is not None
        return plan

    # -- checks ----------------------------------------------------------------------------------

    def _check_order(self, running: list[Queued], waiting: list[Queued]) -> int:
        """What a plan did for some it did for all before them: places are lost from the end of the order, and
        won from its beginning, but for those who wait for another's rows or for a new model. Returns how many
        were lost."""
        scheduler = self.scheduler
        lost = [s for s in running if s in scheduler.roster.waiting]
        kept = [s for s in running if s in scheduler.roster.running]
        assert all(k.rank < s.rank for k in kept for s in lost), "a place was lost out of order"
        assert not running or kept or not lost, "the first in order lost its place"
        won = [s for s in waiting if s in scheduler.roster.running]
        for seq in scheduler.roster.waiting:
            held_up = seq.waits_for is not None or (scheduler.paused and seq.receipt is None)
            assert held_up or all(s.rank < seq.rank for s in won), "a place was won out of turn"
        for queue in (scheduler.roster.running, scheduler.roster.waiting):
            assert queue == sorted(queue, key=lambda s: s.rank)
        return len(lost)

    def audit(self) -> None:
        """What must hold after every call."""
        scheduler, tree = self.scheduler, self.scheduler.tree
        self._read_streams()
        scheduler.check()
        private = len(list(scheduler.private_pages()))
        held = (self.pool.free_pages, tree.evictable_pages, tree.pinned_pages, private)
        assert min(held) >= 0, held
        assert sum(held) == self.pool.capacity, held
        assert scheduler.pinned_pages == tree.pinned_pages + private
        receipts = [s.receipts[-1] for s in self.streams.values() if s.receipts and s.receipts[-1]]
        counters = scheduler.counters
        if scheduler.idle:
            assert counters.requests == len(receipts), "a request was not counted once"
            assert counters.prompt_tokens == sum(r.prompt_tokens for r in receipts)
            assert counters.cached_tokens == sum(r.cached_tokens for r in receipts)
        assert counters.generated_tokens == sum(len(s.tokens) for s in self.streams.values())
        assert counters.computed_rows == self.runner.rows_run
        if self.in_flight is None:
            self.runner.forget(self.pool.free_set())

    def audit_idle(self) -> None:
        """At idle nothing is held, every request has ended, and every page is free or can be had."""
        self.audit()
        tree = self.scheduler.tree
        assert all(s.finish is not None for s in self.streams.values())
        assert (tree.pinned_pages, list(self.scheduler.private_pages())) == (0, [])
        assert self.pool.free_pages + tree.evictable_pages == self.pool.capacity
        assert (self.scheduler.running, self.scheduler.waiting) == (0, 0)
        assert sum(self.scheduler.counters.finished.values()) == len(self.streams)

    def _read_streams(self) -> None:
        for id, delta in self.scheduler.take_events():
            stream = self.streams[id]
            assert stream.finish is None, "something follows the end"
            if delta.receipt is not None or not stream.receipts:
                self._check_receipt(stream, delta.receipt, ended=delta.finish_reason is not None)
            self._check_scores(stream, delta)
            stream.tokens += delta.token_ids
            self.runner.truth[id].tokens.extend(delta.token_ids)
            assert stream.tokens == stream.expected[: len(stream.tokens)], "not what it gives alone"
            stream.finish, stream.error = delta.finish_reason, delta.error
            if delta.finish_reason is not None:
                self.ended.append(id)
                self._check_end(stream)
                assert (delta.error is not None) == (delta.finish_reason == "error")
            else:
                assert delta.token_ids
                assert delta.error is None

    def _check_receipt(self, stream: Stream, receipt: CacheReceipt | None, *, ended: bool) -> None:
        request = stream.request
        if receipt is None:
            assert ended
            assert not stream.tokens, "tokens without a receipt"
        else:
            cap = len(request.prompt) - 1
            if request.cache_max_len is not None:
                cap = min(cap, request.cache_max_len)
            if request.prompt_logprobs is not None and request.prompt_logprobs_from < len(request.prompt):
                cap = min(cap, max(request.prompt_logprobs_from - 1, 0))
            assert receipt.prompt_tokens == len(request.prompt)
            assert receipt.cached_tokens + receipt.computed_tokens == len(request.prompt)
            assert 0 <= receipt.cached_tokens <= cap
            assert 0 <= receipt.written_tokens <= receipt.computed_tokens
        assert all(r == receipt for r in stream.receipts), "the receipt changed"
        stream.receipts.append(receipt)

    def _check_scores(self, stream: Stream, delta: Delta) -> None:
        """Whole and right, with the first delta of a finished prefill, and never again."""
        if delta.prompt_logprobs:
            assert not stream.tokens, "log-probabilities of the prompt come late"
            assert delta.prompt_logprobs == stream.expected_scores
            stream.scores = delta.prompt_logprobs
        elif delta.token_ids or (delta.finish_reason == stream.natural and not stream.ended_by):
            assert stream.scores == stream.expected_scores, "log-probabilities of the prompt are missing"

    def _check_end(self, stream: Stream) -> None:
        if stream.finish == stream.natural and stream.tokens == stream.expected:
            return
        assert stream.finish in stream.ended_by, f"ended by {stream.finish} without a cause"
