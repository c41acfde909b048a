"""The loop's bench: its probe, its cases and its bars. What it measures is not judged here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time

import pytest
from bench_loop import BAR_MS, Found, bars_of, line_of, parse, rows_of
from bench_loop_cases import MB, Model, cases
from bench_loop_probe import LATE_MS, Clocks, Figures, Gap, Probe, gap, shown

MODEL = Model("a", 64, 258)


def test_a_gap_says_why_the_loop_was_late() -> None:
    late = gap(Clocks(100.0, 10.0, 5.0), Clocks(161.0, 40.0, 15.0), asked=0.001)
    assert late == Gap(late=60.0, computed=30.0, queued=10.0)
    assert late.waited == 20.0
    assert gap(Clocks(0.0, 0.0, 0.0), Clocks(0.5, 0.0, 0.0), asked=0.001) == Gap(0.0, 0.0, 0.0)


def test_figures_tell_the_worst_of_each_kind_and_what_the_loop_did_then() -> None:
    figures = Figures()
    figures.add(Gap(1.0, 0.5, 0.0))
    figures.saw("here")
    figures.saw("there")
    figures.saw("there")
    figures.add(Gap(60.0, 55.0, 1.0))
    figures.saw("elsewhere")
    figures.add(Gap(90.0, 2.0, 80.0))
    figures.holds(30.0, "a thread")
    figures.holds(20.0, "another")
    report = figures.report()
    assert (report["worst_ms"], report["computed_ms"], report["queued_ms"]) == (90.0, 55.0, 80.0)
    assert (report["waited_ms"], report["stack"], report["wakings"]) == (8.0, "there", 3)
    assert (report["held_ms"], report["holder"]) == (30.0, "a thread")
    assert Figures().report()["worst_ms"] == 0.0


async def test_the_probe_notices_a_loop_that_is_held() -> None:
    probe = Probe()
    task = asyncio.create_task(probe.run())
    await asyncio.sleep(0.02)
    probe.take()
    while not probe.seen:  # until the watchdog has looked at this line, however busy the machine is
        time.sleep(0.001)  # noqa: ASYNC251
    await asyncio.sleep(0.02)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    probe.close()
    report = probe.take().report()
    assert report["worst_ms"] > LATE_MS
    assert "test_the_probe_notices_a_loop_that_is_held" in report["stack"]


def test_a_stack_is_told_from_its_innermost_frame_on() -> None:
    assert shown(None) == ""
    assert shown(sys._getframe()).startswith("test_bench_loop.py:")


def found(**figures: object) -> Found:
    fields = dict.fromkeys(Found._fields, 0.0) | {"case": "a", "statuses": "200", "stack": "s", "holder": "h"}
    return Found(**{**fields, "ok": True, **figures})


def test_a_bar_is_missed_for_what_the_server_did_and_not_for_what_others_took() -> None:
    late = found(worst_ms=500.0, queued_ms=480.0, computed_ms=10.0)
    busy = found(computed_ms=BAR_MS + 1)
    held = found(held_ms=BAR_MS + 1)
    assert [bar.ok for bar in bars_of([late, busy, held])] == [True, False, False]
    assert (busy.blame, held.blame) == ("s", "h")
    assert "MISSED" in line_of(busy)
    wrong = found(ok=False, statuses="500")
    assert [bar.ok for bar in bars_of([wrong])] == [True, False]
    assert rows_of([late])[0]["no core"] == 480.0


def test_every_case_has_a_name_of_its_own_and_bodies_that_are_what_they_say() -> None:
    every = list(cases())
    assert len({case.name for case in every}) == len(every)
    assert len(every) > 60
    for case in every:
        if case.name.startswith("64 kB"):
            (body,) = case.bodies(MODEL)
            assert json.loads(body)["model"] == "a"
            assert 63_000 < len(body) < 64_001
    by_name = {case.name: case for case in every}
    (numbers,) = by_name["body of 30 MB: numbers"].bodies(MODEL)
    assert abs(len(numbers) - 30 * MB) < 1000
    assert len(by_name["64 streams"].bodies(MODEL)) == 64
    (twice,) = by_name["one of 150,000 keys twice"].bodies(MODEL)
    assert twice.count(b'"k149999"') == 2


@pytest.mark.parametrize("arguments", [[], ["--small", "--only", "choices", "--tries", "1"]])
def test_options(arguments: list[str]) -> None:
    options = parse(arguments)
    assert options.small is bool(arguments)
    assert options.tries == (1 if arguments else 3)
