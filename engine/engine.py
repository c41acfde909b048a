"""The engine: submit token ids, stream deltas; a loop of plan -> run -> commit.

The asyncio loop plans and commits; one compute thread runs the model, and nothing else calls torch or touches
KV. While a step runs, requests come and go freely; what they change takes effect at the next plan.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import msgspec

from engine import machine
from engine.cache.pool import PagePool
from engine.config import EngineConfig
from engine.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    Overloaded,
    RequestError,
    StepFailed,
)
from engine.judge import judge
from engine.kernels import build
from engine.plan import GateCosts, StepCosts, StepPlan, StepResult
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.stream import RequestStream
from engine.types import Delta, EngineInfo, EngineRequest, EngineStats, FinishReason

log = logging.getLogger("headwater.engine")

SWITCH_INTERVAL = 2e-4
"""Seconds after which a thread that runs Python gives up the GIL: the default of 5 ms makes a step that comes
back from a native call wait that long beside a busy event loop. At 0.1 ms it gains no more."""


class StepRunner(Protocol):
    """What the engine needs of a runner: used by the compute thread only."""

    info: EngineInfo
    costs: StepCosts
    gate: GateCosts

    def run(self, plan: StepPlan) -> StepResult: ...


class Engine:
    """One model, its cache and its scheduler. Belongs to the event loop that started it."""

    def __init__(self, config: EngineConfig, runner: StepRunner, compute: ThreadPoolExecutor) -> None:
        self.config = config
        self._runner = runner
        self._compute = compute
        self._version = 0
        self._scheduler = self._make_scheduler()
        self._streams: dict[int, RequestStream] = {}
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._draining = False
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="headwater-engine")

    @staticmethod
    def judge(config: EngineConfig) -> None:
        """Raise ConfigError for settings that don't go together or with this machine.

        Tells all that can be told without the model, and without torch unless a GPU is asked for.
        """
        judge(config)

    @classmethod
    async def start(cls, config: EngineConfig) -> Engine:
        """Load the model on the compute thread and start the loop. Raises ConfigError or ModelError.

        Cancelled, it ends at once; what the thread has begun to load goes on, but for a compiler.
        """
        cls.judge(config)
        if config.threads > (cpus := machine.usable_cpus()):
            log.warning(
                "HEADWATER_THREADS=%d is more than the %d CPUs that may be used: threads that wait for each"
                " other's turn make every step slower",
                *(config.threads, cpus),
            )
        machine.calm_openmp()
        sys.setswitchinterval(SWITCH_INTERVAL)
        compute = ThreadPoolExecutor(1, thread_name_prefix="headwater-compute")
        try:
            runner = await asyncio.get_running_loop().run_in_executor(compute, _load_runner, config)
        except BaseException:
            compute.shutdown(wait=False)
            build.interrupt()
            raise
        return cls(config, runner, compute)

    # -- the public face -------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return self._runner.info

    @property
    def ready(self) -> bool:
        """Whether `submit` would take a request: not draining, not failed."""
        return not self._draining and not self._failure.done()

    def submit(self, request: EngineRequest) -> RequestStream:
        """Queue a request and return its stream.

        Raises at the door: RequestError for what can't be run, ContextLengthExceeded for a prompt that
        leaves no room for one token, Overloaded when the queue is full (of requests that are no less
        urgent: else the last of those ends with "shed"), EngineUnavailable when draining or failed.
        """
        if not self.ready:
            raise EngineUnavailable(
                "the engine is " + ("failed" if self._failure.done() else "shutting down")
            )
        request = self._checked(request)
        if self._scheduler.waiting >= self.config.max_waiting and not self._scheduler.shed(request.priority):
            raise Overloaded(f"{self._scheduler.waiting} requests are waiting already")
        seed = request.params.seed
        id = self._scheduler.submit(
            request, self._namespace(request), secrets.randbits(63) if seed is None else seed
        )
        stream = RequestStream(request, partial(self._stop, id))
        self._streams[id] = stream
        self._wake.set()
        return stream

    def stats(self) -> EngineStats:
        """Gauges as they are now, and counters since the start."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting,
            free_pages=scheduler.pool.free_pages,
            evictable_pages=scheduler.tree.evictable_pages,
            pinned_pages=scheduler.pinned_pages,
            requests=counters.requests,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            computed_rows=counters.computed_rows,
            recomputed_rows=counters.recomputed_rows,
            steps=counters.steps,
            failed_steps=counters.failed_steps,
            preemptions=counters.preemptions,
            evicted_pages=scheduler.tree.evicted_pages,
            collapsed_pages=scheduler.tables.collapsed_pages,
            copied_rows=counters.copied_rows,
            cascade_steps=counters.cascade_steps,
            cascade_groups=counters.cascade_groups,
            cascade_rows=counters.cascade_rows,
            cascade_levels=counters.cascade_levels,
            cascade_refused=counters.cascade_refused,
            kv_bytes_read=counters.kv_bytes_read,
            kv_bytes_saved=counters.kv_bytes_saved,
            verified_steps=counters.verified_steps,
            differing_steps=counters.differing_steps,
            finished=dict(counters.finished),
        )

    def check(self) -> None:
        """Raise AssertionError where the cache's books do not balance. Walks everything: for tests and at
        idle, between steps."""
        self._scheduler.check()

    async def drain(self) -> None:
        """Take no more requests and wait until all have ended."""
        self._draining = True
        await self._until(lambda: self._scheduler.idle)

    async def close(self) -> None:
        """Abort what runs, stop the loop and the compute thread. Calling it again does nothing."""
        self._draining = True
        if not self._task.done():
            for stream in list(self._streams.values()):
                stream.abort()
            self._wake.set()
            await self._until(lambda: self._scheduler.idle)
            self._push_events()
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._compute.shutdown(wait=True)

    async def failed(self) -> BaseException:
        """Wait until the engine has failed for good, and say why."""
        return await asyncio.shield(self._failure)

    async def reload(self, model: str | None = None) -> None:
        """Load the model's weights anew (or another model), without ending the process.

        Running requests finish on the old weights, waiting ones run on the new. Nothing cached before
        is matched afterwards. Needs memory for both while it loads; if loading fails, the error is
        raised and the old model goes on.
        """
        config = self.config if model is None else msgspec.structs.replace(self.config, model=model)
        self._scheduler.paused = True
        try:
            await self._until(lambda: self._scheduler.admitted == 0)
            if self._failure.done():
                raise EngineUnavailable("the engine is failed")
            loop = asyncio.get_running_loop()
            runner = await loop.run_in_executor(self._compute, _load_runner, config)
        except BaseException:
            self._scheduler.paused = False
            self._wake.set()
            raise
        self.config, self._runner = config, runner
        self._version += 1
        self._move_waiting()

    # -- the loop --------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        try:
            while True:
                plan = self._scheduler.plan()
                await self._deliver()
                if plan is None:
                    self._check_progress()
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                try:
                    result = await loop.run_in_executor(self._compute, self._runner.run, plan)
                except Exception as error:
                    failures += 1
                    log.exception("step %d failed (%d in a row)", plan.step, failures)
                    self._scheduler.fail(plan, f"the step that ran this request failed: {error}")
                    if failures >= self.config.max_failed_steps:
                        raise StepFailed(
                            f"{failures} steps in a row failed, the last with: {error}"
                        ) from error
                else:
                    self._scheduler.commit(plan, result)
                    failures = 0
                await self._deliver()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            await self._die(error)

    async def _deliver(self) -> None:
        """Hand the scheduler's events to their streams, and let readers run before the next step."""
        if self._push_events():
            await asyncio.sleep(0)
            async with self._changed:
                self._changed.notify_all()

    def _push_events(self) -> bool:
        events = self._scheduler.take_events()
        for id, delta in events:
            stream = self._streams[id] if delta.finish_reason is None else self._streams.pop(id)
            stream.push(delta)
        return bool(events)

    def _check_progress(self) -> None:
        """Waiting requests with nothing running and no plan would wait for ever: that is a bug, so say so."""
        scheduler = self._scheduler
        if scheduler.waiting and not scheduler.running and not scheduler.paused:
            raise RuntimeError(f"{scheduler.waiting} requests wait and nothing can run")

    async def _die(self, error: BaseException) -> None:
        """The engine has failed for good: every request ends with an error, nobody waits on."""
        log.error("the engine has failed: %s", error)
        self._failure.set_result(error)
        for stream in self._streams.values():
            stream.push(
                Delta(finish_reason="error", receipt=stream.receipt, error=f"the engine has failed: {error}")
            )
        self._streams.clear()
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure.done() or reached())

    # -- inside ----------------------------------------------------------------------------------

    def _stop(self, id: int, reason: FinishReason) -> None:
        if not self._failure.done():
            self._scheduler.stop(id, reason)
            self._wake.set()

    def _checked(self, request: EngineRequest) -> EngineRequest:
        """The request with max_tokens cut to the room that its prompt leaves."""
        prompt, params, context = request.prompt, request.params, self.info.context_length
        if not prompt:
            raise RequestError("the prompt holds no tokens", param="prompt")
        if len(prompt) >= context:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {context} tokens, and the prompt has {len(prompt)}: "
                "it leaves no room for a token.",
                param="prompt",
            )
        self._check_ids("prompt", prompt)
        if params.max_tokens < 0:
            raise RequestError("max_tokens must be 0 or more", param="max_tokens")
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", [token for token, _ in params.logit_bias])
        for field in ("cache_max_len", "prompt_logprobs", "prompt_logprobs_from"):
            if (getattr(request, field) or 0) < 0:
                raise RequestError(f"{field} must be 0 or more", param=field)
        room = context - len(prompt)
        if params.max_tokens > room:
            params = msgspec.structs.replace(params, max_tokens=room)
            request = msgspec.structs.replace(request, params=params)
        return request

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.info.vocab_size):
            raise RequestError(f"token ids go from 0 to {self.info.vocab_size - 1}", param=field)

    def _namespace(self, request: EngineRequest) -> Hashable:
        """Typed parts: the numerics and weight version first, so that neither ever matches across."""
        return (
            ("numerics", self.info.fingerprint),
            ("model", self.info.model, self._version),
            ("account", request.namespace.account),
            ("isolation", request.namespace.isolation_key),
        )

    def _make_scheduler(self) -> Scheduler:
        info, config = self.info, self.config
        limits = Limits(
            context=info.context_length,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            step_ms=config.step_ms,
            align=config.align,
            cascade=config.grouping,
            cascade_levels=config.cascade_levels,
            gate=self._runner.gate,
            token_bytes=info.kv_bytes // (info.num_pages * info.page_size * info.num_layers),
            layers=info.num_layers,
        )
        return Scheduler(PagePool(info.num_pages, info.page_size), limits, self._runner.costs)

    def _move_waiting(self) -> None:
        """Queue what waits anew, on a scheduler for the new model; counters go on."""
        self._push_events()
        old, streams = self._scheduler, self._streams
        self._scheduler, self._streams = self._make_scheduler(), {}
        old.counters.token_bytes = self._scheduler.counters.token_bytes
        self._scheduler.counters = old.counters
        for seq in old.take_waiting():
            stream = streams[seq.id]
            try:
                request = self._checked(seq.request)
            except RequestError as error:
                stream.push(Delta(finish_reason="error", error=str(error)))
                continue
            id = self._scheduler.submit(request, self._namespace(request), seq.seed)
            stream.rebind(partial(self._stop, id))
            self._streams[id] = stream
        self._wake.set()


def _load_runner(config: EngineConfig) -> StepRunner:
    from engine.runner import Runner  # torch comes with it, which takes seconds: not on the loop's thread

    return Runner.load(config)
