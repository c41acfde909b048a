"""The benches' arithmetic: intervals, bars, tables, batches and their plans. Nothing here measures time."""

from __future__ import annotations

import argparse
import math

import bench_cascade
import bench_plan
import bench_serve
import bench_step
import numpy as np
import pytest
from bench_batches import (
    Branch,
    attention_flops,
    batch_of,
    grouped,
    least_reads,
    nested,
    private,
    same_plan,
    step_of,
)
from bench_cascade_table import gate_bars, sizes
from bench_serve import Run, bars_of, clean_environment, rows_of, sides
from bench_step_bars import weight_bytes
from bench_tools import (
    Bar,
    Interval,
    alternate,
    at_least,
    at_most,
    geometric_mean,
    ratio_interval,
    report_bars,
    table,
)

from engine.attention.checks import check_plan
from engine.models.config import ModelConfig
from engine.plan import GateCosts

PAGE, TILE = 16, 64


# ---------------------------------------------------------------- figures


def test_the_interval_of_equal_ratios_is_a_point() -> None:
    assert ratio_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == Interval(2.0, 2.0, 2.0)


def test_the_interval_holds_what_is_true_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(40):
        over = (1.2 + 0.1 * rng.standard_normal(31)).tolist()
        found = ratio_interval(over, [1.0] * 31)
        assert found.low <= found.median <= found.high
        held += found.low <= 1.2 <= found.high
    assert held >= 34


def test_the_interval_widens_with_noise() -> None:
    noise = np.random.default_rng(2).standard_normal(31)
    found = [ratio_interval((1.2 + size * noise).tolist(), [1.0] * 31) for size in (0.01, 0.1, 0.3)]
    widths = [interval.high - interval.low for interval in found]
    assert widths == sorted(widths)


def test_the_interval_pairs_runs_that_were_beside_each_other() -> None:
    """A machine that slows down in the middle changes both of a pair, and not their ratio."""
    drift = [1.0 + i / 10 for i in range(50)]
    found = ratio_interval([1.1 * x for x in drift], drift)
    assert found.low == pytest.approx(1.1)
    assert found.high == pytest.approx(1.1)


def test_an_interval_needs_pairs() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio_interval([1.0, 2.0], [1.0])


def test_every_variant_runs_once_a_round_and_none_is_always_first() -> None:
    order: list[tuple[int, str]] = []

    def variant(name: str) -> object:
        def run(number: int) -> float:
            order.append((number, name))
            return 10.0 * number + ord(name)

        return run

    found = alternate([variant(name) for name in "abc"], 6)  # type: ignore[misc]
    assert found == [[10.0 * n + ord(name) for n in range(6)] for name in "abc"]
    assert [name for n, name in order if n == 1] == ["b", "c", "a"]
    assert {order[3 * n][1] for n in range(6)} == {"a", "b", "c"}


def test_a_geometric_mean_takes_halves_and_doubles_alike() -> None:
    assert math.isclose(geometric_mean([0.5, 2.0, 1.0]), 1.0)


# ---------------------------------------------------------------- reports


def test_a_bar_says_what_was_asked_what_was_measured_and_whether_it_is_met() -> None:
    assert str(at_least("speed", 1.2, 1.25, " x")) == "bar: speed: at least 1.2 x; measured: 1.25 x: ok"
    assert str(at_most("loss", 1.05, 1.2)) == "bar: loss: at most 1.05; measured: 1.2: MISSED"
    assert at_least("edge", 1.2, 1.2).ok
    assert at_most("edge", 1.2, 1.2).ok


def test_a_missed_bar_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    met, missed = Bar("a", "b", "c", True), Bar("d", "e", "f", False)
    assert report_bars([met, met]) == 0
    assert report_bars([met, missed]) == 1
    assert report_bars([]) == 0
    assert capsys.readouterr().out.count("MISSED") == 1


def test_a_table_lines_its_columns_up() -> None:
    lines = table([{"a": 1, "long name": 12345.6}, {"a": None, "long name": 0.123456}]).splitlines()
    assert lines == ["a  long name", "1     12,346", "-      0.123"]
    assert table([]) == "(nothing)"


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize(
    "batch",
    [
        private(3, 200, PAGE),
        grouped(1, 5, 130, 8, PAGE),
        grouped(3, 2, 64, 40, PAGE),
        nested(2, 3, 100, 200, 8, PAGE),
        batch_of("odd", [Branch(70, (Branch(10, (), 2), Branch(500, (), 1)), 2), Branch(0, (), 1)], 5, PAGE),
    ],
    ids=lambda batch: batch.name,
)
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_a_batch_gives_plans_that_can_be_run(batch: object, levels: int) -> None:
    plan = step_of(batch, TILE, "force", levels)  # type: ignore[arg-type]
    checked = check_plan(plan, PAGE, batch.pages + 1)  # type: ignore[attr-defined]
    assert plan.rows == len(batch.spans)  # type: ignore[attr-defined]
    assert sorted(checked.positions.tolist()) == sorted(s.start for s in batch.spans)  # type: ignore[attr-defined]
    assert len(plan.attention.levels) <= levels


def test_sequences_own_their_last_page_and_share_no_more_than_their_prefix() -> None:
    batch = nested(2, 3, 100, 200, 8, PAGE)
    assert len({span.table[-1] for span in batch.spans}) == 6
    for one in batch.spans:
        for other in batch.spans:
            common = sum(a == b for a, b in zip(one.table, other.table, strict=False))
            assert one is other or common in (100 // PAGE, 300 // PAGE)


@pytest.mark.parametrize(
    ("batch", "levels"),
    [
        (private(4, 300, PAGE), 4),
        (grouped(1, 16, 500, 8, PAGE), 2),
        (grouped(4, 4, 200, 30, PAGE), 2),
        (nested(4, 4, 200, 200, 8, PAGE), 3),
        (nested(3, 2, 90, 75, 8, PAGE), 3),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_plan_of_enough_levels_reads_what_was_predicted(batch: object, levels: int) -> None:
    """The prediction knows only the batch; the plan's own arrays say what is read."""
    checked = check_plan(step_of(batch, TILE, "force", levels), PAGE, batch.pages + 1)  # type: ignore[arg-type, attr-defined]
    shared = sum(int(level.tokens.sum()) for level in checked.shared)
    pages = np.diff(checked.private.page_indptr).sum()
    assert shared + PAGE * int(pages) == least_reads(batch, TILE)  # type: ignore[arg-type]


def test_the_same_work_is_recognised() -> None:
    batch = grouped(1, 4, 256, 8, PAGE)
    off, force = (step_of(batch, TILE, mode).attention for mode in ("off", "force"))  # type: ignore[arg-type]
    dear = GateCosts(byte_ns=0.0, segment_ns=1e9, level_ns=1e9)
    assert same_plan(step_of(batch, TILE, "auto", 4, dear).attention, off)
    assert same_plan(step_of(batch, TILE, "auto", 4, GateCosts()).attention, force)
    assert not same_plan(off, force)


def test_attention_flops_count_every_row_over_its_whole_context() -> None:
    batch = private(2, 32, PAGE)
    assert batch.tokens == 32 + 32
    assert attention_flops(batch, 9, 64) == 4 * 9 * 64 * 64


# ---------------------------------------------------------------- commands


def test_every_group_of_the_table_has_two_sequences() -> None:
    for quick in (True, False):
        cells = sizes(argparse.Namespace(quick=quick))
        assert len(cells) == len(set(cells))
        assert all(batch >= 2 * groups for groups, batch, _ in cells)


def test_the_gate_is_judged_on_its_mean_and_on_its_worst_cell() -> None:
    rows = [{"layer auto/best": 1.0}] * 9 + [{"layer auto/best": 1.2}]
    mean, worst = gate_bars(rows)
    assert mean.ok
    assert not worst.ok
    assert gate_bars([]) == []


def test_planning_is_judged_on_medians_and_only_for_the_batch_that_is_promised() -> None:
    """Times.assemble and Times.tree are no planner's, and judged by nobody."""
    times = [bench_plan.Times(4.0, 0.6, 9.0, 9.0), bench_plan.Times(5.0, 0.4, 9.0, 9.0)]
    times.append(bench_plan.Times(9.0, 0.5, 9.0, 9.0))
    assert [(bar.measured, bar.ok) for bar in bench_plan.bars_of(times, 1000, 5)] == [
        ("5 ms", True),
        ("0.5 ms", True),
    ]
    slow = [time._replace(scratch=5.1, cascade=0.51) for time in times]
    assert [bar.ok for bar in bench_plan.bars_of(slow, 1000, 5)] == [False, False]
    assert bench_plan.bars_of(slow, 100, 5) == bench_plan.bars_of(slow, 1000, 4) == []


def test_the_default_model_has_269_mb_of_weights() -> None:
    config = ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        context_length=8192,
        tied=True,
    )
    assert round(weight_bytes(config) / 1e6) == 269


def test_commands_know_their_options() -> None:
    assert bench_cascade.parse(["--quick"]).quick
    assert bench_step.parse(["--quick"]).batches == [1, 16]
    with pytest.raises(SystemExit):
        bench_cascade.parse(["--bars-only", "--png", "x.png"])
    with pytest.raises(SystemExit):
        bench_serve.parse(["--a", "nonsense"])


def test_the_two_sides_of_the_server_bench() -> None:
    first, second = sides(bench_serve.parse([]))
    assert dict(first.env) == {"HEADWATER_CASCADE": "auto"}
    assert dict(second.env) == {"HEADWATER_CASCADE": "off"}
    assert "{port}" in first.command
    peer = sides(bench_serve.parse(["--peer-command", "run {port}", "--peer-model", "m"]))[1]
    assert (peer.command, peer.model) == ("run {port}", "m")
    peer = sides(bench_serve.parse(["--peer-url", "http://there/v1/"]))[1]
    assert (peer.url, peer.command) == ("http://there/v1", "")


def test_a_servers_settings_are_its_sides_alone() -> None:
    env = {"HOME": "/h", "HEADWATER_CASCADE": "force", "HEADWATER_CACHE_DIR": "/c"}
    clean = clean_environment(env, [("HEADWATER_CASCADE", "off")])
    assert clean == {"HOME": "/h", "HEADWATER_CACHE_DIR": "/c", "HEADWATER_CASCADE": "off"}


def test_the_server_bench_reports_medians_and_one_bar() -> None:
    found = {
        "auto": [Run(120.0, 10.0, 5.0, 0.9), Run(130.0, 12.0, 6.0, 0.9), Run(90.0, 11.0, 7.0, 0.9)],
        "off": [Run(100.0, 10.0, 5.0, None), Run(100.0, 10.0, 5.0, None), Run(90.0, 10.0, 5.0, None)],
    }
    rows = rows_of(found)
    assert (rows[0]["output tokens/s"], rows[0]["ITL ms"], rows[0]["cached %"]) == (120.0, 6.0, 90.0)
    assert rows[1]["cached %"] is None
    (bar,) = bars_of(found, bench_serve.parse([]))
    assert bar.ok
    assert bar.bar == "at least 1.15"
    (bar,) = bars_of(found, bench_serve.parse(["--peer-url", "http://there/v1"]))
    assert not bar.ok
    assert bars_of(found, bench_serve.parse(["--a", "HEADWATER_THREADS=1"])) == []
