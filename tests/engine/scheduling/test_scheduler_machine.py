"""Random traffic, small pools, faults at random moments: nothing hangs, leaks, or reads another's KV."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.plan import StepCosts
from tests.engine.scheduling.fake_runner import VOCABULARY
from tests.engine.scheduling.rig import Rig
from tests.engine.scheduling.truth import Script, choose

EXAMPLES = int(os.environ.get("SCHEDULER_EXAMPLES", "60"))
TOKENS = st.integers(0, VOCABULARY - 2)
TEMPLATES = (
    (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2),
    (0, 1, 2, 0, 1, 1, 0, 0, 2, 2, 1, 0, 1, 2, 0, 0, 0, 1, 2, 2, 1, 1, 0, 2),
    (2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2),
)
SCRIPTS = ((0,), (1,), (6,), (30,), (30, 4), (30, 0), (30, 1000, 3))  # of constraints; some can't be followed

HOW = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from((0, 1, 2, 3, 5, 9, 12, 20, 40)),
        "namespace": st.sampled_from((None, None, None, "", ("a", "b"))),
        "seed": st.integers(0, 1),
        "ignore_eos": st.booleans(),
        "cache_max_len": st.sampled_from((None, None, None, None, None, 0, 1, 6)),
        "prompt_logprobs": st.sampled_from((None, None, None, 0, 2)),
        "prompt_logprobs_from": st.sampled_from((0, 0, 1, 2, 5, 12, 100)),
        "priority": st.sampled_from((0, 0, 0, 1, -1)),
        "script": st.sampled_from((None, None, None, None, *SCRIPTS)),
        "repetition_penalty": st.sampled_from((1.0, 1.0, 1.0, 1.5)),
        "mirostat_target": st.sampled_from((0.0, 0.0, 0.0, 3.0)),
    }
)
CALLS = st.tuples(
    st.sampled_from(range(len(TEMPLATES))),
    st.integers(1, 24),  # tokens of the template that are kept
    st.lists(TOKENS, max_size=3),
    HOW,
)
Call = tuple[int, int, list[int], dict[str, Any]]


class CalmMachine(RuleBasedStateMachine):
    """Arrivals and steps. Every rule ends in Rig.audit; teardown lets all requests end."""

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        pages=st.sampled_from((6, 7, 8, 10, 12, 16, 24, 40)),
        tile_pages=st.sampled_from((1, 1, 2, 3)),
        max_running=st.sampled_from((1, 2, 4, 8, 8)),
        max_step_tokens=st.integers(1, 20),
        step_ms=st.sampled_from((1.0, 20.0, 1e9)),
        cascade=st.sampled_from(("off", "auto", "auto", "force")),
        cascade_levels=st.sampled_from((2, 4, 4, 8)),
    )
    def start(self, page_size: int, pages: int, tile_pages: int, step_ms: float, **limits: object) -> None:
        self.rig = Rig(
            pages,
            page_size,
            StepCosts(1.0, 0.5, 0.05),
            context=min(pages * page_size, 40),
            align=page_size * tile_pages,
            step_ms=step_ms,
            **limits,
        )

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.scheduler.paused = False
        self.rig.drain()
        self.rig.clear()
        assert self.rig.pool.free_pages == self.rig.pool.capacity
        assert not list(self.rig.scheduler.tree.nodes())

    # -- arrivals --------------------------------------------------------------------------------

    def _submit(self, prompt: list[int], call: Call) -> None:
        how = dict(call[3])
        script = how.pop("script")
        prompt = prompt[: self.rig.scheduler.limits.context - 1]
        self.rig.submit(prompt, constraint=Script(*script) if script is not None else None, **how)

    @rule(calls=st.lists(CALLS, min_size=1, max_size=4))
    def submit(self, calls: list[Call]) -> None:
        """Prompts that share a beginning with many others, often all of it."""
        for call in calls:
            template, keep, rest, *_ = call
            self._submit([*TEMPLATES[template][:keep], *rest], call)

    @precondition(lambda self: self.rig.streams)
    @rule(at=st.integers(0, 1000), cut=st.integers(0, 4), ahead=st.integers(0, 2), call=CALLS)
    def submit_next_turn(self, at: int, cut: int, ahead: int, call: Call) -> None:
        """Another's prompt and what it has generated (or will, `ahead`), less a few tokens, and then on."""
        stream = self.rig.streams[at % len(self.rig.streams)]
        tokens = list(stream.all_tokens)
        for _ in range(ahead):
            tokens.append(choose(call[3]["seed"], tokens))
        self._submit([*tokens[: len(tokens) - cut], *call[2]] or [1], call)

    @precondition(lambda self: self.rig.streams)
    @rule(at=st.integers(0, 1000), calls=st.lists(CALLS, min_size=1, max_size=3))
    def submit_again(self, at: int, calls: list[Call]) -> None:
        """The very same prompt, more than once."""
        stream = self.rig.streams[at % len(self.rig.streams)]
        for call in calls:
            self._submit(list(stream.request.prompt), call)

    # -- steps -----------------------------------------------------------------------------------

    @precondition(lambda self: self.rig.in_flight is None)
    @rule()
    def plan(self) -> None:
        self.rig.plan()

    @rule(more=st.integers(0, 8))
    def commit(self, more: int) -> None:
        """What is in flight, and some steps more."""
        if self.rig.in_flight is not None:
            self.rig.commit()
        for _ in range(more):
            if not self.rig.step():
                break


class RoughMachine(CalmMachine):
    """The same with failing steps, numbers that are not finite, clients that leave or lose their place, and a
    cleared cache."""

    @rule(picks=st.sets(st.integers(0, 7), min_size=1, max_size=3))
    def commit_with_bad_rows(self, picks: set[int]) -> None:
        plan = self.rig.in_flight or self.rig.plan()
        if plan is not None:
            self.rig.commit(frozenset(p % len(plan.sequence_ids) for p in picks))

    @rule(early=st.booleans())
    def fail(self, early: bool) -> None:
        if self.rig.in_flight or self.rig.plan():
            self.rig.fail(early=early)

    @precondition(lambda self: self.rig.streams)
    @rule(at=st.integers(0, 1000), reason=st.sampled_from(("abort", "stop")))
    def stop(self, at: int, reason: str) -> None:
        """Of any request: waiting, parked, running, in flight, ended."""
        self.rig.stop(at % len(self.rig.streams), reason)

    @precondition(lambda self: self.rig.streams)
    @rule(at=st.integers(0, 1000))
    def preempt(self, at: int) -> None:
        self.rig.preempt(at % len(self.rig.streams))

    @precondition(lambda self: self.rig.in_flight is None)
    @rule()
    def clear(self) -> None:
        self.rig.clear()

    @rule(priority=st.integers(-1, 2))
    def shed(self, priority: int) -> None:
        """The queue is full for one more of this priority."""
        self.rig.shed(priority)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.rig.scheduler.paused = paused


SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=25,
    deadline=None,
    derandomize="SCHEDULER_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
CalmMachine.TestCase.settings = SETTINGS
RoughMachine.TestCase.settings = SETTINGS
TestCalm = CalmMachine.TestCase
TestRough = RoughMachine.TestCase
