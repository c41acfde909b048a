"""Groups of a real batch, formed and dissolved by the scheduler while a real model decodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.cache.pool import PagePool
from engine.config import EngineConfig
from engine.runner import Runner
from engine.scheduling.cascade import CascadeMode
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.types import EngineRequest, SamplingParams
from tests.engine.attention.executors import EXECUTORS

TILE, PAGE = 32, 16
VOCAB = 320

Prompt = tuple[int, ...]
Output = tuple[tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module", params=[name for name in EXECUTORS if name != "compiled-avx2"])
def runner(request: pytest.FixtureRequest, tiny_model: Path) -> Runner:
    return Runner.load(
        EngineConfig(
            model=str(tiny_model), executor=request.param, page_size=PAGE, tile=TILE, kv_gb=0.02, threads=2
        )
    )


class Desk:
    """One scheduler on the runner; requests come and go between steps."""

    def __init__(self, runner: Runner, cascade: CascadeMode) -> None:
        info = runner.info
        self.runner = runner
        self.scheduler = Scheduler(
            PagePool(info.num_pages, info.page_size),
            Limits(info.context_length, align=TILE, cascade=cascade, step_ms=1e9),
            runner.costs,
        )
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}

    def submit(self, prompt: Prompt, tokens: int) -> int:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=0)
        request = EngineRequest(request_id="groups", prompt=prompt, params=params)
        id = self.scheduler.submit(request, "groups", 0)
        self.tokens[id], self.logprobs[id] = [], []
        return id

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is not None:
            self.scheduler.commit(plan, self.runner.run(plan))
        for id, delta in self.scheduler.take_events():
            assert delta.error is None
            self.tokens[id] += delta.token_ids
            self.logprobs[id] += [report.logprob for report in delta.logprobs]
        return plan is not None

    def finish(self) -> None:
        while self.step():
            pass
        self.scheduler.check()

    def output(self, id: int) -> Output:
        return tuple(self.tokens[id]), tuple(self.logprobs[id])


def alone(runner: Runner, prompt: Prompt, tokens: int) -> Output:
    desk = Desk(runner, "off")
    id = desk.submit(prompt, tokens)
    desk.finish()
    return desk.output(id)


def text(seed: int, tokens: int) -> Prompt:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB) for _ in range(tokens))


def together(
    runner: Runner, cascade: CascadeMode, prompts: Sequence[Prompt], lengths: Sequence[int]
) -> tuple[list[Output], Desk]:
    """The first prompts at once, the rest one a step while those decode: members join and finish."""
    desk = Desk(runner, cascade)
    at_once = 2 * len(prompts) // 3
    ids = [desk.submit(p, n) for p, n in zip(prompts[:at_once], lengths, strict=False)]
    for prompt, tokens in zip(prompts[at_once:], lengths[at_once:], strict=True):
        desk.step()
        ids.append(desk.submit(prompt, tokens))
    desk.finish()
    return [desk.output(id) for id in ids], desk


@pytest.mark.parametrize("cascade", ["off", "auto", "force"])
def test_groups_change_while_they_decode(runner: Runner, cascade: CascadeMode) -> None:
    """O020: one system prompt with many questions, groups within it, loners beside it. Members join and
    finish in mid-decode; each gets what it gets alone."""
    system, document = text(1, 2 * TILE + 7), text(2, TILE + 3)
    prompts = [system + text(100 + i, 3 + i % 9) for i in range(14)]
    prompts += [system + document + text(200 + i, 5) for i in range(6)]
    prompts += [text(300 + i, 20 + 3 * i) for i in range(4)]
    random.Random(7).shuffle(prompts)
    lengths = [2 + 5 * i % 11 for i in range(len(prompts))]
    outputs, desk = together(runner, cascade, prompts, lengths)
    for prompt, tokens, output in zip(prompts, lengths, outputs, strict=True):
        assert output == alone(runner, prompt, tokens)
    grouped = desk.scheduler.counters.cascade_rows
    if cascade != "auto":  # what the gate decides is not this test's business
        assert (grouped > 0) == (cascade == "force")


@pytest.mark.parametrize("cascade", ["off", "auto", "force"])
def test_a_hundred_equal_prompts_and_then_thirty_beside_twenty(runner: Runner, cascade: CascadeMode) -> None:
    """O020: nothing but one long common prefix; then two groups. All equal, and equal to one alone."""
    a, b = text(11, 3 * TILE + 5), text(12, 2 * TILE + 1)
    expected = {a: alone(runner, a, 4), b: alone(runner, b, 4)}
    desk = Desk(runner, cascade)
    ids = [desk.submit(a, 4) for _ in range(100)]
    desk.finish()
    assert {desk.output(id) for id in ids} == {expected[a]}
    mixed = {desk.submit(prompt, 4): prompt for prompt in [a] * 30 + [b] * 20}
    desk.finish()
    assert all(desk.output(id) == expected[prompt] for id, prompt in mixed.items())
