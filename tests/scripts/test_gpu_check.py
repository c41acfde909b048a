"""The GPU check on the CPU: its cases, its checks by FlashInfer's real wrappers, its report and its words."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_check
import numpy as np
import pytest
import torch
from gpu_check_bench import Cell, Sizes, cells, copy_gb_per_s
from gpu_check_cases import PAGE, Member, pages_of, random_case, shared_batch, step_plan
from gpu_check_exact import (
    Check,
    attention_checks,
    close,
    deterministic_checks,
    deterministic_engine_checks,
    engine_checks,
    equal,
)
from gpu_check_model import write_model
from gpu_check_report import Report, plot, summary, write_json

from engine.attention.checks import check_plan
from tests.engine.attention.flashinfer_shim import Launches, cpu_kernels
from tests.flashinfer_package import need_flashinfer


@pytest.fixture
def launches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    need_flashinfer()
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path_factory.mktemp("flashinfer")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with cpu_kernels() as log:
        yield log
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "random")


def clock(call: Callable[[], object]) -> float:
    at = time.perf_counter()
    call()
    return (time.perf_counter() - at) * 1e3


def test_random_cases_are_possible_plans_of_every_kind() -> None:
    depths, tails, empties = set(), set(), 0
    for seed, head_dim, decode in itertools.product(range(30), (64, 128), (False, True)):
        case = random_case(seed, head_dim, decode=decode)
        plan = step_plan(case.members)
        check_plan(plan, PAGE, case.shape.num_pages)
        check_plan(step_plan([m.flat() for m in case.members]), PAGE, case.shape.num_pages)
        depths.add(len(plan.attention.levels))
        tails |= set(plan.attention.levels[-1].last_page_len.tolist())
        empties += sum(int((level.last_page_len == 0).sum()) for level in plan.attention.levels[:-1])
        assert not decode or plan.rows == len(case.members)
    assert depths == {1, 2, 3, 4}
    assert {1, PAGE} < tails
    assert empties > 20


def test_a_case_is_the_same_each_time() -> None:
    first, second = (step_plan(random_case(5, 64).members) for _ in range(2))
    assert np.array_equal(first.write_slots, second.write_slots)


def test_chunks_are_the_same_rows() -> None:
    member = Member((), np.arange(1, 5, dtype=np.int32), 20, 8)
    assert [(m.start, m.rows) for m in member.chunks(3)] == [(20, 3), (23, 3), (26, 2)]


def test_a_shared_batch_reads_each_prefix_once() -> None:
    members = shared_batch(prefix=64, batch=10, groups=4, tail=20)
    plan = step_plan(members)
    checked = check_plan(plan, PAGE, pages_of(members))
    assert checked.shared[0].tokens.tolist() == [64] * 4
    assert checked.shared[0].rows.tolist() == [3, 3, 2, 2]
    assert checked.private.tokens.tolist() == [20] * 10


def test_the_attention_section_holds_through_the_real_wrappers(launches: Launches) -> None:
    checks = list(attention_checks("cpu", [11]))
    assert [check for check in checks if not check.ok] == []
    assert sum("graph shapes" in check.name for check in checks) == 2
    assert launches.of("merge")


def test_the_deterministic_section_names_its_pairs_and_holds(launches: Launches) -> None:
    checks = list(deterministic_checks("cpu", [11]))
    assert [check for check in checks if not check.ok] == []
    pairs = {check.name.split(": ", 2)[-1] for check in checks}
    assert {"whole, in chunks of 3 rows", "batched, each alone", "in this order, in another"} <= pairs


def test_a_wrong_result_fails_its_check() -> None:
    right = torch.ones(2, 4)
    wrong = right.clone()
    wrong[1, 2] = 1.1
    assert not close("x", wrong, right).ok
    assert not close("x", wrong / 0, right).ok
    assert not equal("x", right + 1e-7, right + 2e-7 * 2).ok
    assert close("x", right + 1e-3, right).ok


async def test_the_engine_section_holds_between_cpu_executors(model: Path) -> None:
    assert [c for c in await engine_checks(model, "torch") if not c.ok] == []


async def test_the_deterministic_engine_section_holds_on_the_cpu(model: Path) -> None:
    checks = await deterministic_engine_checks(model, "torch")
    assert [c for c in checks if not c.ok] == []
    assert len(checks) == 4


TINY = Sizes(
    prefixes=(64, 128), batches=(4,), groups=(1, 2), heads=4, kv_heads=2, head_dim=64, rounds=1, layers=2
)


def test_the_benchmark_counts_what_each_way_reads(launches: Launches) -> None:
    found = {(c.prefix, c.groups): c for c in cells("cpu", clock, "fa2", TINY, time.monotonic() + 600)}
    assert sorted(found) == [(64, 1), (64, 2), (128, 1), (128, 2)]
    token = 2 * 2 * 64 * 2
    assert found[128, 2].flat_bytes == 4 * (128 + 128) * token
    assert found[128, 2].cascade_bytes == (2 * 128 + 4 * 128) * token


def test_the_benchmark_runs_the_kernel_that_it_names(launches: Launches) -> None:
    (cell,) = cells("cpu", clock, "fa3", TINY._replace(prefixes=(64,), groups=(1,)), time.monotonic() + 600)
    assert cell.kernel == "fa3"
    assert {plan["backend"] for plan in launches.of("plan")} == {"fa3"}


def test_the_benchmark_ends_when_time_is_up(launches: Launches) -> None:
    assert list(cells("cpu", clock, "fa2", TINY, time.monotonic() - 1)) == []


def test_a_copy_is_counted_both_ways() -> None:
    assert copy_gb_per_s("cpu", lambda call: 2.0, size=1_000_000, rounds=3) == 1.0


def report(ok: bool = True) -> Report:
    return Report(
        {"gpu": "none"},
        [("attention", Check("a tree", True, "fine")), ("engine", Check("a reply", ok, "off by one"))],
        [
            Cell("fa2", p, b, g, 4.0, 2.0, 4_000_000, 1_000_000)
            for p in (512, 1024)
            for b in (8, 64)
            for g in (1, 4)
        ],
        2.0,
        ["fa3: out of time"],
        12.5,
    )


def test_the_report_holds_the_figures_and_what_follows_from_them(tmp_path: Path) -> None:
    write_json(report(ok=False), tmp_path / "x.json")
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["ok"] is False
    assert content["checks"][1] == {
        "section": "engine",
        "name": "a reply",
        "ok": False,
        "detail": "off by one",
    }
    assert content["bench"][0]["speedup"] == 2.0
    assert content["bench"][0]["flat_share_of_copy"] == 0.5
    words = summary(report(ok=False))
    assert "attention: 1 of 1 hold" in words
    assert "FAILED engine: a reply (off by one)" in words
    assert "left out: fa3: out of time" in words


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    assert plot(report().cells, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert not plot([], tmp_path / "y.png")


def test_a_run_keeps_failures_and_says_what_it_left_out() -> None:
    said: list[str] = []
    run = gpu_check.Run("cpu", budget=-1.0, say=said.append)
    run.exact("attention", iter([Check("one", False, "bad"), Check("two", True, "")]))
    run.engine("torch", [Path("x")])
    final = run.report({})
    assert final.failures == ["attention: one (bad)"]
    assert said == ["FAILED attention: one (bad)"]
    assert final.skipped == [
        "the rest of attention: out of time",
        "engine_checks of x: out of time",
        "deterministic_engine_checks of x: out of time",
    ]


def test_every_kernel_is_built_before_the_budget_starts(launches: Launches, model: Path) -> None:
    run = gpu_check.Run("cpu", budget=100.0, say=lambda words: None)
    with torch.inference_mode():
        run.compile(model)
    kinds = {kind for kind, _ in launches.seen}
    assert {"plan", "prefill", "append", "merge", "norm", "rope", "activation"} <= kinds


def test_without_a_gpu_it_says_so_in_one_line_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpu_check: ")
    assert "NVIDIA GPU" in err
    assert err.count("\n") == 1
